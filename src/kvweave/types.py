"""The nouns every part shares: plain frozen values, no behaviour beyond arithmetic on their own fields.

Tensor letters: L layers, G KV heads, S stored tokens, D head width.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Literal, Protocol, get_args

import torch

Storage = Literal["exact", "int8", "int4"]
"""How KV is stored: as the model computed it, or in 8 or 4 bits for a number, which is never exact."""

STORAGES: Mapping[str, Storage] = MappingProxyType({name: name for name in get_args(Storage)})

Origin = Literal["exact", "reused", "fresh"]
TokenOrigin = Literal["exact", "reused", "recomputed", "fresh"]
SpanKind = Literal["system", "chunk", "question"]
AnswerCacheUse = Literal["serve", "renew", "ignore"]
"""What a request does with the answer bank: take an earlier answer and keep a new one; only keep it; neither."""


@dataclass(frozen=True, slots=True)
class Document:
    """One file as text.

    `source` is the absolute path it came from and its identity; `digest` (hash of the file's bytes)
    identifies this version of it; `title` is for people.
    """

    source: str
    title: str
    text: str
    digest: str


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a document's text, cut at token boundaries.

    `token_ids` are the tokenizer's ids for `text` alone (separator excluded). `digest` names the content:
    equal ids give equal digests, whatever document they came from. `start`/`end` are character offsets
    into the document's text; `document` is the source and `document_digest` its version. Chunks made by
    callers with their own retriever leave the document fields empty.
    """

    text: str
    token_ids: tuple[int, ...]
    digest: str
    document: str = ""
    document_digest: str = ""
    start: int = 0
    end: int = 0


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a request asks: `system` (None: the default instruction), chunk texts in prompt order, a question."""

    question: str
    chunks: tuple[str, ...] = ()
    system: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.chunks, str):
            raise TypeError("Prompt.chunks is one string; give a list or tuple of chunk texts")
        object.__setattr__(self, "chunks", tuple(self.chunks))


@dataclass(frozen=True, slots=True)
class Span:
    """A run of prompt positions, `start` inclusive to `end` exclusive, in tokens; `chunk` indexes Prompt.chunks."""

    kind: SpanKind
    start: int
    end: int
    chunk: int = -1

    @property
    def tokens(self) -> int:
        """Length in tokens."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """The prompt as the model sees it: X = S ++ C1 ++ … ++ Cn ++ Q.

    `token_ids` has length N. `spans` cover it without gaps: one `system`, one per chunk, one `question`.
    `user_rows` is the part of the question span that the user wrote, template text left out.
    """

    token_ids: tuple[int, ...]
    spans: tuple[Span, ...]
    user_rows: tuple[int, int]

    @property
    def tokens(self) -> int:
        """N, the prompt's length in tokens."""
        return len(self.token_ids)

    def ids(self, span: Span) -> tuple[int, ...]:
        """The token ids of one span."""
        return self.token_ids[span.start : span.end]


class KVLayers(Protocol):
    """A chunk's KV where it is no plain tensor yet: to be verified, unpacked or waited for when a layer is asked for.

    A layer may be asked for by several threads at once. Nobody writes to what is returned. Queries are held so too,
    (L, H, S, D).
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """(L, 2, G, S, D)."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """The model's: what `layer` and `whole` return."""
        ...

    @property
    def nbytes(self) -> int:
        """What it takes as it is held, in bytes."""
        ...

    @property
    def awaited_s(self) -> float:
        """Seconds that another layer takes to come over a network, as far as can be told; 0 where none has to."""
        ...

    def load(self, index: int) -> None:
        """Have a layer in memory and verified, so that `layer` waits for nothing; DamagedEntry as of `layer`."""
        ...

    def layer(self, index: int) -> torch.Tensor:
        """Keys and values of one layer, (2, G, S, D); DamagedEntry if they are not what was stored."""
        ...

    def whole(self) -> torch.Tensor:
        """All of it, (L, 2, G, S, D); DamagedEntry as of `layer`."""
        ...


@dataclass(frozen=True, slots=True)
class ChunkKV:
    """A chunk's keys and values at every layer, the keys *before* rotary positions are applied.

    `token_ids` are the S tokens it stands for. `held` has shape (L, 2, G, S, D): index 0 of the second axis holds
    keys, 1 values; `queries`, where they are kept too, (L, H, S, D) for H query heads, before rotation as well. They may
    be read-only views of a mapped file, and where they come from a store they may still have to be verified or
    unpacked: read them through `layer` and `layer_queries`, or `kv` for all layers at once. Nobody writes to them.
    """

    token_ids: tuple[int, ...]
    held: torch.Tensor | KVLayers
    queries: torch.Tensor | KVLayers | None = None

    @property
    def kv(self) -> torch.Tensor:
        """All layers, (L, 2, G, S, D). Raises DamagedEntry if they are not what was stored."""
        return self.held if isinstance(self.held, torch.Tensor) else self.held.whole()

    def layer(self, index: int) -> torch.Tensor:
        """Keys and values of one layer, (2, G, S, D). Raises DamagedEntry if they are not what was stored."""
        return self.held[index] if isinstance(self.held, torch.Tensor) else self.held.layer(index)

    def load(self, index: int) -> None:
        """Have a layer in memory and verified, so that `layer` waits for nothing. Raises DamagedEntry as `layer` does."""
        for held in (self.held, self.queries):
            if held is not None and not isinstance(held, torch.Tensor):
                held.load(index)

    @property
    def awaited_s(self) -> float:
        """Seconds that another layer takes to come over a network, as far as can be told; 0 where none has to."""
        return 0.0 if isinstance(self.held, torch.Tensor) else self.held.awaited_s

    def layer_queries(self, index: int) -> torch.Tensor:
        """Queries of one layer, (H, S, D); there must be some. Raises DamagedEntry if they are not what was stored."""
        assert self.queries is not None
        return self.queries[index] if isinstance(self.queries, torch.Tensor) else self.queries.layer(index)

    @property
    def tokens(self) -> int:
        """S, the number of tokens."""
        return len(self.token_ids)

    @property
    def bytes(self) -> int:
        """Size of what is held, in bytes."""
        return self.held.nbytes + (self.queries.nbytes if self.queries is not None else 0)


@dataclass(frozen=True, slots=True)
class ChunkFeature:
    """What was recorded about a chunk beside its KV: which of its tokens sum it up, how far its KV moved, ….

    `tensors` are of any shape, float32, bfloat16, float16, int32, int64 or uint8; a name is lower-case letters,
    digits and underscores, beginning with a letter. They may be read-only views of a mapped file: nobody
    writes to them. `token_ids` are the chunk's S tokens.
    """

    token_ids: tuple[int, ...]
    tensors: Mapping[str, torch.Tensor]

    @property
    def tokens(self) -> int:
        """S, the number of tokens."""
        return len(self.token_ids)

    @property
    def bytes(self) -> int:
        """Size of the tensors in bytes."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())


@dataclass(frozen=True, slots=True)
class ModelFingerprint:
    """What stored KV depends on. `digest` covers the other digests, so equal digest means interchangeable KV.

    `name` is for people (hub id, path or "reference") and is not part of the digest.
    """

    name: str
    weights: str
    configuration: str
    tokenizer: str
    dtype: str
    digest: str


@dataclass(frozen=True, slots=True)
class KVProvenance:
    """How a chunk's KV, or a note about it, was made: the pass it came out of.

    `kind` names the way: bare, isolated, observed, similar-10, …; lower-case words, digits from the second on
    (the store checks it). Of exact KV it is a label only, but for the ending of KV with queries (`keys.with_queries`):
    two kinds with the same context are one entry. Of all else it tells entries apart. `context` are the digests of what stood before it in that pass, from the
    prompt's first token on, the shared system prefix first, then one digest per earlier chunk. `exact` is the
    taint flag: true only when every row before it in the pass was itself exact or freshly computed.
    `rope_regime` names the scaling the pass ran under, for models whose frequencies depend on the length.
    """

    kind: str
    context: tuple[str, ...]
    exact: bool = True
    rope_regime: str = "fixed"


@dataclass(frozen=True, slots=True)
class PlanSpan:
    """How one span of the prompt got its KV.

    `origin` says where it came from before selection, `recomputed_tokens` how many of its rows were then
    computed again. `reason` is a sentence for people: which entry, or why none.
    """

    kind: SpanKind
    start: int
    end: int
    origin: Origin
    recomputed_tokens: int
    reason: str
    chunk: int = -1

    @property
    def tokens(self) -> int:
        """Length in tokens."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class AnswerCacheHit:
    """An earlier answer was given: to which question, its cosine similarity (-1..1) to the one asked, and from when.

    `made_at_s` is seconds since 1970.
    """

    question: str
    similarity: float
    made_at_s: float


@dataclass(frozen=True, slots=True)
class Plan:
    """What a request computed and what it reused, span by span; the four counts partition the prompt.

    `coverage` is None unless the budget was one; `ratio` is then 0 and says nothing. `cache_hit` is there when the answer
    came from the answer bank: then there was no prompt, and no span.
    """

    recipe: str
    ratio: float
    spans: tuple[PlanSpan, ...]
    coverage: float | None = None
    cache_hit: AnswerCacheHit | None = None

    @property
    def prompt_tokens(self) -> int:
        """N."""
        return sum(span.tokens for span in self.spans)

    @property
    def exact_tokens(self) -> int:
        """Tokens whose stored KV equals full attention's and was used as it is."""
        return sum(s.tokens - s.recomputed_tokens for s in self.spans if s.origin == "exact")

    @property
    def reused_tokens(self) -> int:
        """Tokens whose stored KV is stale (made in another context) and was used as it is."""
        return sum(s.tokens - s.recomputed_tokens for s in self.spans if s.origin == "reused")

    @property
    def recomputed_tokens(self) -> int:
        """Tokens that had stored KV and were computed again."""
        return sum(span.recomputed_tokens for span in self.spans)

    @property
    def fresh_tokens(self) -> int:
        """Tokens that had no stored KV: the question, and chunks found nowhere."""
        return sum(s.tokens for s in self.spans if s.origin == "fresh")

    @property
    def reused_share(self) -> float:
        """Share of the prompt that was not computed, 0..1."""
        total = self.prompt_tokens
        return (self.exact_tokens + self.reused_tokens) / total if total else 0.0


@dataclass(frozen=True, slots=True)
class ExplainedToken:
    """One prompt token and how it got its KV in the end.

    `text` is what the token adds to the text before it; empty for all but the last token of a character that
    several make up. `origin` tells stored rows that were computed again from those used as they are.
    """

    id: int
    text: str
    origin: TokenOrigin


@dataclass(frozen=True, slots=True)
class Timing:
    """Where a request's time went, in seconds.

    `ttft_s` runs from the request's arrival to the first token's logits: retrieve + tokenize + match (look-up, load)
    + place (layers verified when first asked for, rotated, laid out) + select + recompute, and what lies between them.
    Of the `answer_tokens`, `accepted_draft_tokens` were told by the prompt or a near question's answer, and checked many in one pass.
    """

    retrieve_s: float = 0.0
    tokenize_s: float = 0.0
    match_s: float = 0.0
    place_s: float = 0.0
    select_s: float = 0.0
    recompute_s: float = 0.0
    ttft_s: float = 0.0
    decode_s: float = 0.0
    total_s: float = 0.0
    answer_tokens: int = 0
    accepted_draft_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Decoding:
    """What decoding with the KV on flash read and held, per generated token over all layers and heads.

    `attended_per_token`: entries attended to, summed over layers and KV heads. `pages_read_per_token`,
    `bytes_per_token`, `reads_per_token`: from flash, in so many reads, which bring `mean_run_entries` each.
    `hit_rate` 0..1: clusters that were in memory when they were asked for, since they had been asked for before;
    `ahead_rate` 0..1: since they had been fetched ahead. `resident_bytes`: most KV in memory.
    """

    attended_per_token: float
    pages_read_per_token: float
    bytes_per_token: float
    reads_per_token: float
    mean_run_entries: float
    hit_rate: float
    ahead_rate: float
    resident_bytes: int


@dataclass(frozen=True, slots=True)
class Source:
    """A chunk that stood in the prompt: where its text came from and how well it ranked (higher is better)."""

    document: str
    start: int
    end: int
    text: str
    score: float


@dataclass(frozen=True, slots=True)
class Answer:
    """What `ask` returns; `decoding` is None where the answer was decoded with all KV in memory."""

    text: str
    sources: tuple[Source, ...]
    plan: Plan
    timing: Timing
    decoding: Decoding | None = None


@dataclass(frozen=True, slots=True)
class SkippedFile:
    """A file that `add` left out, and why."""

    path: Path
    reason: str


@dataclass(frozen=True, slots=True)
class AddReport:
    """What one `add` did: sources by what happened to them, and the chunk KV computed or beyond the limit."""

    added: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    unchanged: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    skipped: tuple[SkippedFile, ...] = field(default=())
    chunks: int = 0
    chunk_kv_computed: int = 0
    chunk_kv_left_out: int = 0
    seconds: float = 0.0
