"""The results of calls: answers with their plan, timing and sources, found passages, and reports; and all of them as plain values."""

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from kvweave.types import SpanKind

_Made = TypeVar("_Made")

SpanOrigin = Literal["exact", "reused", "fresh"]
FinishReason = Literal["stop", "length"]
"""Why a reply ended: stop if the model ended it, length if it reached its greatest length."""
TokenOrigin = Literal["exact", "reused", "recomputed", "fresh"]
AnswerCacheUse = Literal["use", "refresh", "off"]
"""The use of the answer cache by a request.

use: return a cached answer if there is one, and store a new one; refresh: compute and store an answer; off: neither.
"""


@dataclass(frozen=True, slots=True)
class PlanSpan:
    """How one span of the prompt got its KV.

    Attributes:
        kind: system, chunk or question.
        start: first prompt position.
        end: prompt position after the last one.
        origin: origin of the KV before tokens are selected for recomputation.
        recomputed_tokens: number of tokens that were then recomputed.
        reason: the stored entry that was used, or why no entry was used, as text for people.
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
    """The use of a cached answer: its question, the cosine (-1..1) of the two questions, and the time of its computation.

    `made_at_s` is in seconds since 1970. `judged` is the model's score of both questions (logit of yes minus logit of no) if they
    share the answer on its word, else None.
    """

    question: str
    similarity: float
    made_at_s: float
    judged: float | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """The computed and reused parts of a prompt, span by span. The four token counts add up to its length.

    Attributes:
        recipe: full name of the recipe.
        ratio: the budget of recomputation as a ratio; 0 if the budget was a coverage.
        spans: the spans of the prompt, in order; empty for a cached answer.
        coverage: the budget as a coverage; None if it was a ratio.
        cache_hit: the cached answer that was used; None if the answer was computed.
        auto: why `auto` selected this recipe; empty if a recipe was named.
        without_vector: number of chunks without a vector yet, which only their words can find.
        fallback_at: number of the answer's tokens before which the prompt was computed in full, since the next one was open
            (setting `fallback_margin`); None if it was not. The other figures are those of the first token.
    """

    recipe: str
    ratio: float
    spans: tuple[PlanSpan, ...]
    coverage: float | None = None
    cache_hit: AnswerCacheHit | None = None
    auto: str = ""
    without_vector: int = 0
    fallback_at: int | None = None

    @property
    def stale(self) -> bool:
        """Whether some KV was found that had been computed in another context."""
        return any(span.origin == "reused" for span in self.spans)

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
    """One prompt token and the final origin of its KV.

    `text` is the text that the token adds. Of several tokens that form one character, all but the last have an empty text.
    `origin` distinguishes stored KV that was recomputed from stored KV that was used unchanged. `score` is the token's score in the
    recipe's choice of tokens to recompute, or None without a score.
    """

    id: int
    text: str
    origin: TokenOrigin
    score: float | None = None


@dataclass(frozen=True, slots=True)
class LikelyToken:
    """A possible next token, the text that it adds, and the natural logarithm of its probability.

    The probability is the model's, before temperature and nucleus sampling.
    """

    id: int
    text: str
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprob(LikelyToken):
    """A chosen token, and the likeliest tokens at its position, likeliest first; the chosen token may be one of them."""

    likeliest: tuple[LikelyToken, ...] = ()


@dataclass(frozen=True, slots=True)
class Prefill:
    """The progress of a prompt: `done_tokens` are in the KV cache, `cached_tokens` of them from stored KV.

    `total_tokens` is 0 until the prompt is assembled.
    """

    done_tokens: int
    total_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Piece:
    """The next piece of an answer's text, and its tokens if the request asked for log probabilities.

    The text of a piece may end inside a token.
    """

    text: str
    tokens: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Timing:
    """The times of a request, in seconds.

    `ttft_s` is the time from the request's start to the first token's logits. It contains retrieve, tokenize, match (look up
    and load), place (verify, rotate and lay out layers), select, recompute, and the time between them.
    `judge_s` is the time in which the model judged whether a stored question asks the same; `ttft_s` contains it.
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
    judge_s: float = 0.0


@dataclass(frozen=True, slots=True)
class DecodeStats:
    """The reads and the memory of decoding with the KV on disk, per generated token.

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

    `page` (or slide, from 1), `heading` ("Guide > Setup") and `line` (from 1) are its place for people. They are None or
    empty if the document has none, or if an older version of kvweave indexed it.
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
class SearchReason:
    """Why a search found a passage. The ranks and scores of a ranking without the passage are None.

    Attributes:
        word_rank: its place by words, from 1.
        bm25: its score by words.
        vector_rank: its place by vectors, from 1.
        cosine: similarity of its vector to the question's, -1..1.
        all_words: whether it holds every word of the question, and few chunks do.
        quotes: the parts of the question that it holds word for word, and few chunks do; they rank it first.
        rerank_score: the reranker's score; None without a reranker.
        lacks_vector: whether it has no vector yet, so that only its words found it.
    """

    word_rank: int | None = None
    bm25: float | None = None
    vector_rank: int | None = None
    cosine: float | None = None
    all_words: bool = False
    quotes: tuple[str, ...] = ()
    rerank_score: float | None = None
    lacks_vector: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundPassage(SearchReason):
    """A passage that a search found, and why.

    `source` has its place and its score. `words` are the words of the question that it holds, as they are indexed: `~` marks a
    stem, `^` a name.
    """

    source: Source
    words: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a question.

    Attributes:
        text: the answer; empty if the reply ended inside the model's thoughts.
        sources: the chunks of the prompt.
        plan: the computed and reused parts of the prompt.
        timing: the times of the request.
        decoding: the reads of decoding with the KV on disk; None if all KV was in memory.
        reasoning: a reasoning model's thoughts before the answer; they are not cached.
        finish_reason: why the reply ended; "stop" for a cached answer.
        supported: whether the passages support the answer; None without the setting `check_answers`.
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
class PreparedChunks:
    """What preparing a caller's chunks did.

    Attributes:
        chunks: the number of different chunks.
        computed: how many of them had not been prepared before.
        tokens: their length together.
    """

    chunks: int
    computed: int
    tokens: int


@dataclass(frozen=True, slots=True)
class SkippedFile:
    """A file that `add` skipped, and the reason."""

    path: Path
    reason: str


@dataclass(frozen=True, slots=True)
class DocumentNote:
    """A doubt about the text of a document that `add` has indexed: an uncertain encoding, pages without text."""

    path: Path
    note: str


@dataclass(frozen=True, slots=True)
class CopiedDocument:
    """A document with the same bytes as the document `same_as`. A search counts the two as one."""

    path: Path
    same_as: Path


@dataclass(frozen=True, slots=True)
class AddReport:
    """The result of one `add`: the sources by outcome, the number of chunks, and the chunk KV computed or over the store's limit.

    `notes` and `copies` are about the added and changed documents. `chunk_kv_waiting` chunks are still to be prepared; questions can
    already use them. `vectors_waiting` of them are found only by their words until their vectors are computed. `kept` are documents
    whose files are gone, and which stay because their folder is empty now.
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
    kept: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PrepareReport:
    """The result of one `prepare`: chunks with newly stored KV or features, and chunks left out by the store's limit.

    `embedded` is the number of chunks that got their first vector.
    """

    computed: int = 0
    left_out: int = 0
    seconds: float = 0.0
    embedded: int = 0

    @property
    def chunks(self) -> int:
        """Least number of chunks for which KV, features or a vector were stored."""
        return max(self.computed, self.embedded)


# Results as plain dictionaries, for `--json` and for replies over HTTP, and answers from such dictionaries


def facts(value: Any) -> Any:
    """Return a result as dictionaries, lists and plain values. A plan includes its token counts."""
    if isinstance(value, Plan):
        counts = [name for name, each in vars(Plan).items() if isinstance(each, property)]
        return {**_fields(value), **{name: getattr(value, name) for name in counts}}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _fields(value)
    if isinstance(value, dict):
        return {str(key): facts(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [facts(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def _fields(value: Any) -> dict[str, Any]:
    return {field.name: facts(getattr(value, field.name)) for field in dataclasses.fields(value)}


def answer_from(stored: Mapping[str, Any]) -> Answer:
    """Return the answer from the dictionaries that `facts` made of it. Raises KeyError or TypeError for any other dictionary."""
    plan, decoding = stored["plan"], stored.get("decoding")
    return dataclasses.replace(
        _made(Answer, stored),
        sources=tuple(_made(Source, each) for each in stored["sources"]),
        plan=dataclasses.replace(
            _made(Plan, plan),
            spans=tuple(_made(PlanSpan, each) for each in plan["spans"]),
            cache_hit=_made(AnswerCacheHit, plan["cache_hit"]) if plan["cache_hit"] else None,
        ),
        timing=_made(Timing, stored["timing"]),
        decoding=_made(DecodeStats, decoding) if decoding else None,
    )


def tokens_from(stored: Iterable[Mapping[str, Any]]) -> tuple[ExplainedToken, ...]:
    """Return explained tokens from the dictionaries that `facts` made of them. Raises as `answer_from`."""
    return tuple(_made(ExplainedToken, each) for each in stored)


def _made(kind: type[_Made], stored: Mapping[str, Any]) -> _Made:
    """Return a dataclass from the entries that are its fields. A newer version of kvweave may have written more entries."""
    names = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: value for name, value in stored.items() if name in names})
