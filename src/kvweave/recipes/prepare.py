"""Slot 1, prepare: how a chunk's KV is made offline, before any question asks for it."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvweave.kvstore.keys import digest_tokens, quantised
from kvweave.models.adapter import Adapter
from kvweave.ops.quantise import BITS, coded_bytes, quantise
from kvweave.recipes.context import Corpus, Ids, PrepareContext
from kvweave.recipes.features import FeatureExtractor
from kvweave.recipes.request import PrefillRequest
from kvweave.types import ChunkKV, KVProvenance, Storage

ENTRY_OVERHEAD_BYTES = 8192
"""An entry's header and token ids, generously."""


def kv_bytes(adapter: Adapter, tokens: int, storage: Storage = "exact") -> int:
    """An entry of KV of so many tokens, at most."""
    shape = adapter.geometry
    if storage not in BITS:
        return tokens * shape.token_bytes + ENTRY_OVERHEAD_BYTES
    dimensions = (shape.layers, 2, shape.kv_heads, tokens, shape.head_width)
    return coded_bytes(dimensions, shape.dtype, storage) + ENTRY_OVERHEAD_BYTES


def feature_bytes(tokens: int, numbers: int = 1) -> int:
    """A note with so many float32 numbers about each of so many tokens, at most."""
    return 4 * tokens * numbers + ENTRY_OVERHEAD_BYTES


@dataclass(frozen=True, slots=True)
class Prepared:
    """A chunk's KV, and the digests of the chunks that it was made from."""

    kv: ChunkKV
    sources: tuple[str, ...]


class Prepare(Protocol):
    """Makes KV of chunks that may then stand anywhere behind a system prefix (ids).

    Inherit from it for what most preparations have in common.
    """

    @abstractmethod
    def provenances(self, adapter: Adapter, prefix: Ids, chunk_tokens: int) -> tuple[KVProvenance, ...]:
        """What may stand for a chunk of this length, the best first; nothing when the recipe prepares nothing.

        The first one is what `make` makes; the others are accepted where that is missing.
        """
        ...

    @abstractmethod
    def make(self, ctx: PrepareContext, chunk: Ids) -> Prepared:
        """Compute a chunk's KV; does not store it."""
        ...

    def accepted(self, request: PrefillRequest, spans: Sequence[int]) -> list[tuple[KVProvenance, ...]]:
        """What may stand for each of these spans of a prompt, the best first: the same in every prompt."""
        return [
            self.provenances(request.adapter, request.prefix, request.prompt.spans[number].tokens)
            for number in spans
        ]

    @property
    def extractors(self) -> tuple[FeatureExtractor, ...]:
        """What is recorded, beside what a selector asks for, of chunks prepared so: nothing."""
        return ()

    @property
    def entries(self) -> int:
        """How many KV entries making a chunk's KV leaves at most: one."""
        return 1

    @property
    def storage(self) -> Storage:
        """How what is prepared is stored: as it is."""
        return "exact"

    def bytes(self, adapter: Adapter, chunk_tokens: int) -> int:
        """What those entries take of the store, for a chunk of this length, at most."""
        return self.entries * kv_bytes(adapter, chunk_tokens, self.storage)

    @property
    def max_versions(self) -> int | None:
        """How many exact versions of a chunk's KV are kept, each with a note on its attention.

        None: as many as requests leave of any chunk (`kept.py`), without notes.
        """
        return None


@dataclass(frozen=True, slots=True)
class NotPrepared(Prepare):
    """Nothing is made offline."""

    def provenances(self, adapter: Adapter, prefix: Ids, chunk_tokens: int) -> tuple[KVProvenance, ...]:
        """None."""
        return ()

    def make(self, ctx: PrepareContext, chunk: Ids) -> Prepared:
        """Never called: there is no making."""
        raise AssertionError("a recipe that prepares nothing was asked to prepare")


@dataclass(frozen=True, slots=True)
class Bare(Prepare):
    """Prefill the chunk alone from position 0: it keeps an attention sink of its own (CacheClip §2.3)."""

    def provenances(self, adapter: Adapter, prefix: Ids, chunk_tokens: int) -> tuple[KVProvenance, ...]:
        """Exact after nothing."""
        return (KVProvenance("bare", (), rope_regime=adapter.rope_regime(chunk_tokens)),)

    def make(self, ctx: PrepareContext, chunk: Ids) -> Prepared:
        """One pass over the chunk."""
        return Prepared(ctx.adapter.encode(chunk), (digest_tokens(chunk),))


@dataclass(frozen=True, slots=True)
class Isolated(Prepare):
    """Prefill S ++ C and keep C's rows: one sink at the front of the prompt (FusionRAG eq. 5)."""

    def provenances(self, adapter: Adapter, prefix: Ids, chunk_tokens: int) -> tuple[KVProvenance, ...]:
        """Exact after the system prefix alone."""
        regime = adapter.rope_regime(len(prefix) + chunk_tokens)
        return (KVProvenance("isolated", _context(prefix), rope_regime=regime),)

    def make(self, ctx: PrepareContext, chunk: Ids) -> Prepared:
        """One pass over the chunk behind the prefix's stored KV."""
        adapter, prefix = ctx.adapter, ctx.prefix
        sources = (digest_tokens(chunk),)
        if not prefix:
            return Prepared(adapter.encode(chunk), sources)
        if adapter.rope_regime(len(prefix)) == adapter.rope_regime(len(prefix) + len(chunk)):
            return Prepared(adapter.encode(chunk, ctx.prefix_kv()), sources)
        # The prefix alone would run under other frequencies: compute both together and keep the chunk.
        both = adapter.encode((*prefix, *chunk))
        return Prepared(ChunkKV(chunk, both.kv[:, :, :, len(prefix) :].contiguous()), sources)


class WithNeighbours(Prepare):
    """Prefill a chunk behind others that it is likely to meet in prompts, so that it has seen their like.

    Their `isolated` KV stands between system prefix and chunk, so that no chunk waits for another to be finished.
    Accepts `isolated` KV where this is missing, as it is when one of the neighbours was removed.
    """

    @property
    @abstractmethod
    def kind(self) -> str:
        """What its makings are called."""
        ...

    @abstractmethod
    def neighbours(self, corpus: Corpus, chunk: Ids) -> Sequence[Ids]:
        """The chunks that stand before this one, in order."""
        ...

    @property
    def entries(self) -> int:
        """Its own, and the `isolated` one that others are prepared behind."""
        return 2

    def provenances(self, adapter: Adapter, prefix: Ids, chunk_tokens: int) -> tuple[KVProvenance, ...]:
        """Not exact: the neighbours' KV does not know each other."""
        (isolated,) = Isolated().provenances(adapter, prefix, chunk_tokens)
        return KVProvenance(
            self.kind, isolated.context, exact=False, rope_regime=isolated.rope_regime
        ), isolated

    def make(self, ctx: PrepareContext, chunk: Ids) -> Prepared:
        """One pass over the chunk behind its neighbours' stored KV, as many of them as fit the model's context.

        The chunk's own isolated KV is stored as well: it is exact where the chunk comes first, stands in where this one
        is gone, and others are prepared behind it. Without neighbours the two are the same, out of one pass.
        """
        standing = self.standing(ctx, chunk)
        if standing:
            isolated_kv(ctx, chunk)
            return kv_behind(ctx, standing, chunk)
        alone = Isolated().make(ctx, chunk)
        _stored_isolated(ctx, alone)
        return alone

    def standing(self, ctx: PrepareContext, chunk: Ids) -> list[Ids]:
        """As many of a chunk's neighbours as fit the model's context before it, the first ones first."""
        adapter = ctx.adapter
        length = len(ctx.prefix) + len(chunk)
        regime = adapter.rope_regime(length)
        standing = []
        for ids in self.neighbours(ctx.corpus, chunk):
            length += len(ids)
            if length > adapter.geometry.context_tokens or adapter.rope_regime(length) != regime:
                break
            standing.append(ids)
        return standing


@dataclass(frozen=True, slots=True)
class Similar(WithNeighbours):
    """Behind the `most` chunks most similar to it, most similar first (FusionRAG §3.1 eq. 10)."""

    most: int = 10

    @property
    def kind(self) -> str:
        """With the number of neighbours."""
        return f"similar-{self.most}"

    def neighbours(self, corpus: Corpus, chunk: Ids) -> Sequence[Ids]:
        """By similarity."""
        return corpus.similar(chunk, self.most)


@dataclass(frozen=True, slots=True)
class Previous(WithNeighbours):
    """Behind the `most` chunks that stand before it in its document.

    What a chunk's first sentences refer to mostly stands there. In none of the papers.
    """

    most: int = 1

    @property
    def kind(self) -> str:
        """With the number of neighbours."""
        return f"following-{self.most}"

    def neighbours(self, corpus: Corpus, chunk: Ids) -> Sequence[Ids]:
        """In reading order."""
        return corpus.before(chunk, self.most)


@dataclass(frozen=True, slots=True)
class SimilarAndPrevious(WithNeighbours):
    """Behind the `similar` chunks most similar to it, and then the `before` ones that stand before it in its document.

    Similar and Following in one pass. In none of the papers.
    """

    similar: int = 10
    before: int = 1

    @property
    def kind(self) -> str:
        """With both numbers of neighbours."""
        return f"woven-{self.similar}-{self.before}"

    def neighbours(self, corpus: Corpus, chunk: Ids) -> Sequence[Ids]:
        """Those before it stand nearest, and count as similar no second time."""
        before = corpus.before(chunk, self.before)
        alike = corpus.similar(chunk, self.similar + len(before))
        return [*[ids for ids in alike if ids not in before][: self.similar], *before]


def _context(prefix: Ids) -> tuple[str, ...]:
    return (digest_tokens(prefix),) if prefix else ()


def kv_behind(ctx: PrepareContext, standing: Sequence[Ids], chunk: Ids) -> Prepared:
    """A chunk's KV behind the isolated KV of others, which the context has room for; theirs is stored if it is not."""
    prefix = [ctx.prefix_kv()] if ctx.prefix else []
    before = [isolated_kv(ctx, ids) for ids in standing]
    kv = ctx.adapter.encode(chunk, *prefix, *before)
    return Prepared(kv, tuple(digest_tokens(ids) for ids in (chunk, *standing)))


def isolated_kv(ctx: PrepareContext, chunk: Ids) -> ChunkKV:
    """A chunk's isolated KV from the store, computed and stored as the shop stores it if it is not there."""
    found = ctx.store.get(ctx.adapter.fingerprint, chunk, _isolated_provenance(ctx, chunk))
    return _stored_isolated(ctx, Isolated().make(ctx, chunk)) if found is None else found


def _stored_isolated(ctx: PrepareContext, made: Prepared) -> ChunkKV:
    """A chunk's isolated KV as the shop stores it, which it does unless it has it."""
    kv = packed(made.kv, ctx.storage)
    ctx.store.put(ctx.adapter.fingerprint, kv, _isolated_provenance(ctx, kv.token_ids), made.sources)
    return kv


def _isolated_provenance(ctx: PrepareContext, chunk: Ids) -> KVProvenance:
    (exact,) = Isolated().provenances(ctx.adapter, ctx.prefix, len(chunk))
    return quantised(exact, ctx.storage)


def packed(kv: ChunkKV, storage: Storage) -> ChunkKV:
    """KV as it is stored: coded in fewer bits, or itself."""
    return kv if storage == "exact" else ChunkKV(kv.token_ids, quantise(kv.kv, storage))
