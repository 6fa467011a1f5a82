"""What calls return: the answer to a question with its plan, timing and sources, and the report of an `add`."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from kvweave.types import SpanKind

SpanOrigin = Literal["exact", "reused", "fresh"]
FinishReason = Literal["stop", "length"]
"""Why a reply ended: the model ended it, or it reached its greatest length."""
TokenOrigin = Literal["exact", "reused", "recomputed", "fresh"]
AnswerCacheUse = Literal["use", "refresh", "off"]
"""What a request does with the answer cache.

use: return a cached answer if there is one, and store a new one; refresh: compute and store an answer; off: neither.
"""


@dataclass(frozen=True, slots=True)
class PlanSpan:
    """How one span of the prompt got its KV.

    Attributes:
        kind: system, chunk or question.
        start: first prompt position.
        end: prompt position after the last one.
        origin: where the KV came from, before selection.
        recomputed_tokens: number of its tokens that were then recomputed.
        reason: for people: which entry was used, or why none.
        chunk: index into Prompt.chunks.
    """

    kind: SpanKind
    start: int
    end: int
    origin: SpanOrigin
    recomputed_tokens: int
    reason: str
    chunk: int = -1

    @property
    def tokens(self) -> int:
        """Length in tokens."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class AnswerCacheHit:
    """A cached answer was used: its question, the cosine (-1..1) to the one asked, and when it was computed.

    `made_at_s` is seconds since 1970.
    """

    question: str
    similarity: float
    made_at_s: float


@dataclass(frozen=True, slots=True)
class Plan:
    """What a request computed and what it reused, span by span; the four token counts add up to the prompt.

    Attributes:
        recipe: full name.
        ratio: the budget; 0 if it was a coverage.
        spans: of the prompt, in order; none for a cached answer.
        coverage: the budget; None if it was a ratio.
        cache_hit: the cached answer's question, cosine and time; None if the answer was computed.
        auto: why `auto` stands for this recipe; empty if a recipe was named.
        without_vector: chunks that had no vector yet: words alone find them.
    """

    recipe: str
    ratio: float
    spans: tuple[PlanSpan, ...]
    coverage: float | None = None
    cache_hit: AnswerCacheHit | None = None
    auto: str = ""
    without_vector: int = 0

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""
        return sum(span.tokens for span in self.spans)

    @property
    def exact_tokens(self) -> int:
        """Tokens whose stored KV equals full attention's and was used unchanged."""
        return sum(s.tokens - s.recomputed_tokens for s in self.spans if s.origin == "exact")

    @property
    def reused_tokens(self) -> int:
        """Tokens whose stored KV is stale (computed in another context) and was used unchanged."""
        return sum(s.tokens - s.recomputed_tokens for s in self.spans if s.origin == "reused")

    @property
    def recomputed_tokens(self) -> int:
        """Tokens that had stored KV and were recomputed."""
        return sum(span.recomputed_tokens for span in self.spans)

    @property
    def fresh_tokens(self) -> int:
        """Tokens without stored KV: the question, and chunks that are not stored."""
        return sum(s.tokens for s in self.spans if s.origin == "fresh")

    @property
    def reused_share(self) -> float:
        """Share of the prompt that was not computed, 0..1."""
        total = self.prompt_tokens
        return (self.exact_tokens + self.reused_tokens) / total if total else 0.0


@dataclass(frozen=True, slots=True)
class ExplainedToken:
    """One prompt token and where its KV came from in the end.

    `text` is what the token adds to the text before it. Of several tokens that form one character, all but the last have
    an empty text. `origin` distinguishes stored KV that was recomputed from stored KV that was used unchanged. `score` is
    what the recipe gave the token for its choice of tokens to recompute, None where it gave none.
    """

    id: int
    text: str
    origin: TokenOrigin
    score: float | None = None


@dataclass(frozen=True, slots=True)
class LikelyToken:
    """A token that may follow, what it adds to the text, and the natural logarithm of its probability.

    The probability is the model's own: before temperature and nucleus.
    """

    id: int
    text: str
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprob(LikelyToken):
    """A chosen token, and the likeliest tokens at its place, the likeliest first; it may be one of them."""

    likeliest: tuple[LikelyToken, ...] = ()


@dataclass(frozen=True, slots=True)
class Prefill:
    """How far a request's prompt is: so many of its tokens are in the KV cache, `cached_tokens` of them from stored KV.

    `total_tokens` is 0 while the prompt is not known.
    """

    done_tokens: int
    total_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Piece:
    """The next piece of an answer's text, and its tokens if log probabilities were asked for.

    The text of a piece may end inside a token.
    """

    text: str
    tokens: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Timing:
    """Where a request's time went, in seconds.

    `ttft_s` is the time from the request's start to the first token's logits. It contains retrieve, tokenize, match (look up
    and load), place (verify, rotate and lay out layers), select, recompute, and the time between them.
    `accepted_draft_tokens` of the `answer_tokens` came from drafts and were verified several in one pass.
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
class DecodeStats:
    """What decoding with the KV on disk read and kept in memory, per generated token.

    Attributes:
        attended_per_token: entries attended to, summed over layers and KV heads.
        pages_read_per_token: pages read from disk, over all layers and heads.
        bytes_per_token: bytes read from disk, over all layers and heads.
        reads_per_token: number of reads, over all layers and heads.
        mean_run_entries: entries per read, on average.
        hit_rate: 0..1, requested clusters that were in memory because they had been requested before.
        ahead_rate: 0..1, requested clusters that were in memory because they had been prefetched.
        resident_bytes: most KV in memory at a time.
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
    """A chunk of the prompt: its document, character offsets, text, and retrieval score (higher is better).

    `page` (or slide, from 1), `heading` ("Guide > Setup") and `line` (from 1) tell people where it begins. None or empty
    where the document has none, or was indexed by a version that did not record them.
    """

    document: str
    start: int
    end: int
    text: str
    score: float
    page: int | None = None
    heading: str = ""
    line: int | None = None


@dataclass(frozen=True, slots=True)
class FoundPassage:
    """A passage that a search found, and why; None where a ranking does not have it.

    Attributes:
        source: the passage, its place and its score.
        word_rank: its place by words, from 1.
        bm25: its score by words.
        words: the words of the question that it holds, as they are indexed: `~` marks a stem, `^` a name.
        vector_rank: its place by vectors, from 1.
        cosine: similarity of its vector to the question's, -1..1.
        all_words: whether it holds every word of the question, and few chunks do.
        quotes: what of the question it holds word for word, and few chunks do; this puts it first.
        rerank_score: what the reranker gave it; None without one.
        lacks_vector: whether it has no vector yet, and was found by its words alone.
    """

    source: Source
    word_rank: int | None
    bm25: float | None
    words: tuple[str, ...]
    vector_rank: int | None
    cosine: float | None
    all_words: bool
    quotes: tuple[str, ...]
    rerank_score: float | None
    lacks_vector: bool = False


@dataclass(frozen=True, slots=True)
class Answer:
    """What `ask` returns.

    Attributes:
        text: the answer; empty if the reply ended inside the model's thoughts.
        sources: the chunks of the prompt.
        plan: what was computed and what was reused.
        timing: where the time went.
        decoding: None if the answer was decoded with all KV in memory.
        reasoning: a reasoning model's thoughts before the answer; they are not cached.
        finish_reason: why the reply ended; "stop" for a cached answer.
        supported: whether the passages hold the answer; None if that was not checked (setting `check_answers`).
    """

    text: str
    sources: tuple[Source, ...]
    plan: Plan
    timing: Timing
    decoding: DecodeStats | None = None
    reasoning: str = ""
    finish_reason: FinishReason = "stop"
    supported: bool | None = None


@dataclass(frozen=True, slots=True)
class SkippedFile:
    """A file that `add` skipped, and why."""

    path: Path
    reason: str


@dataclass(frozen=True, slots=True)
class DocumentNote:
    """A doubt about the text of a document that `add` has indexed: an uncertain encoding, pages without text."""

    path: Path
    note: str


@dataclass(frozen=True, slots=True)
class CopiedDocument:
    """A document with the same bytes as another, `same_as`; what both hold counts once in a search."""

    path: Path
    same_as: Path


@dataclass(frozen=True, slots=True)
class AddReport:
    """The result of one `add`: sources by what happened to them, chunks, and chunk KV computed or left out by the limit.

    `notes` and `copies` are about the added and changed documents. `chunk_kv_waiting` chunks are still to be prepared; questions about
    them are answered all the same. `vectors_waiting` of them are found by their words alone until their vectors are there.
    """

    added: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    unchanged: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    skipped: tuple[SkippedFile, ...] = field(default=())
    chunks: int = 0
    chunk_kv_computed: int = 0
    chunk_kv_left_out: int = 0
    seconds: float = 0.0
    notes: tuple[DocumentNote, ...] = ()
    copies: tuple[CopiedDocument, ...] = ()
    chunk_kv_waiting: int = 0
    vectors_waiting: int = 0


@dataclass(frozen=True, slots=True)
class PrepareReport:
    """The result of one `prepare`: for how many chunks KV or features were stored, and how many exceed the store's limit.

    `embedded` chunks had no vector before.
    """

    computed: int = 0
    left_out: int = 0
    seconds: float = 0.0
    embedded: int = 0

    @property
    def chunks(self) -> int:
        """For how many chunks anything was stored, at least."""
        return max(self.computed, self.embedded)
