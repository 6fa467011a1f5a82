"""Slot 1, prepare: how a chunk's KV is made offline, before any question asks for it."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvweave.core import ChunkKV, Making
from kvweave.models.adapter import Adapter
from kvweave.recipes.record import Record
from kvweave.recipes.request import PrefillRequest
from kvweave.recipes.workshop import Corpus, Ids, Workshop
from kvweave.store.keys import digest_tokens


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
    def makings(self, adapter: Adapter, prefix: Ids, chunk_tokens: int) -> tuple[Making, ...]:
        """What may stand for a chunk of this length, the best first; nothing when the recipe prepares nothing.

        The first one is what `make` makes; the others are accepted where that is missing.
        """
        ...

    @abstractmethod
    def make(self, shop: Workshop, chunk: Ids) -> Prepared:
        """Compute a chunk's KV; does not store it."""
        ...

    def accepted(self, request: PrefillRequest, spans: Sequence[int]) -> list[tuple[Making, ...]]:
        """What may stand for each of these spans of a prompt, the best first: the same in every prompt."""
        system, *_ = request.prompt.spans
        prefix = request.prompt.ids(system)
        return [
            self.makings(request.adapter, prefix, request.prompt.spans[number].tokens) for number in spans
        ]

    @property
    def records(self) -> tuple[Record, ...]:
        """What is recorded, beside what a selector asks for, of chunks prepared so: nothing."""
        return ()

    @property
    def entries(self) -> int:
        """How many KV entries a chunk gets at most: one."""
        return 1

    @property
    def most_versions(self) -> int | None:
        """How many exact versions of a chunk's KV are kept, each with a note on its attention.

        None: as many as requests leave, without notes.
        """
        return None


@dataclass(frozen=True, slots=True)
class NotPrepared(Prepare):
    """Nothing is made offline."""

    def makings(self, adapter: Adapter, prefix: Ids, chunk_tokens: int) -> tuple[Making, ...]:
        """None."""
        return ()

    def make(self, shop: Workshop, chunk: Ids) -> Prepared:
        """Never called: there is no making."""
        raise AssertionError("a recipe that prepares nothing was asked to prepare")


@dataclass(frozen=True, slots=True)
class Bare(Prepare):
    """Prefill the chunk alone from position 0: it keeps an attention sink of its own (CacheClip §2.3)."""

    def makings(self, adapter: Adapter, prefix: Ids, chunk_tokens: int) -> tuple[Making, ...]:
        """Exact after nothing."""
        return (Making("bare", (), rope_regime=adapter.rope_regime(chunk_tokens)),)

    def make(self, shop: Workshop, chunk: Ids) -> Prepared:
        """One pass over the chunk."""
        return Prepared(shop.adapter.encode(chunk), (digest_tokens(chunk),))


@dataclass(frozen=True, slots=True)
class Isolated(Prepare):
    """Prefill S ++ C and keep C's rows: one sink at the front of the prompt (FusionRAG eq. 5)."""

    def makings(self, adapter: Adapter, prefix: Ids, chunk_tokens: int) -> tuple[Making, ...]:
        """Exact after the system prefix alone."""
        regime = adapter.rope_regime(len(prefix) + chunk_tokens)
        return (Making("isolated", _context(prefix), rope_regime=regime),)

    def make(self, shop: Workshop, chunk: Ids) -> Prepared:
        """One pass over the chunk behind the prefix's stored KV."""
        adapter, prefix = shop.adapter, shop.prefix
        sources = (digest_tokens(chunk),)
        if not prefix:
            return Prepared(adapter.encode(chunk), sources)
        if adapter.rope_regime(len(prefix)) == adapter.rope_regime(len(prefix) + len(chunk)):
            return Prepared(adapter.encode(chunk, shop.prefix_kv()), sources)
        # The prefix alone would run under other frequencies: compute both together and keep the chunk.
        both = adapter.encode((*prefix, *chunk))
        return Prepared(ChunkKV(chunk, both.kv[:, :, :, len(prefix) :].contiguous()), sources)


class Behind(Prepare):
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

    def makings(self, adapter: Adapter, prefix: Ids, chunk_tokens: int) -> tuple[Making, ...]:
        """Not exact: the neighbours' KV does not know each other."""
        (isolated,) = Isolated().makings(adapter, prefix, chunk_tokens)
        return Making(self.kind, isolated.context, exact=False, rope_regime=isolated.rope_regime), isolated

    def make(self, shop: Workshop, chunk: Ids) -> Prepared:
        """One pass over the chunk behind its neighbours' stored KV, as many of them as fit the model's context.

        The chunk's own isolated KV is stored as well: it is exact where the chunk comes first, stands in where this one
        is gone, and others are prepared behind it.
        """
        isolated_kv(shop, chunk)
        return _make_behind(shop, self.neighbours(shop.corpus, chunk), chunk)


@dataclass(frozen=True, slots=True)
class Similar(Behind):
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
class Following(Behind):
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
class Woven(Behind):
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


def _make_behind(shop: Workshop, neighbours: Sequence[Ids], chunk: Ids) -> Prepared:
    adapter = shop.adapter
    regime = adapter.rope_regime(len(shop.prefix) + len(chunk))
    before: list[ChunkKV] = [shop.prefix_kv()] if shop.prefix else []
    sources = [digest_tokens(chunk)]
    length = len(shop.prefix) + len(chunk)
    for ids in neighbours:
        if (
            length + len(ids) > adapter.geometry.context_tokens
            or adapter.rope_regime(length + len(ids)) != regime
        ):
            break
        before.append(isolated_kv(shop, ids))
        sources.append(digest_tokens(ids))
        length += len(ids)
    return Prepared(adapter.encode(chunk, *before), tuple(sources))


def isolated_kv(shop: Workshop, chunk: Ids) -> ChunkKV:
    """A chunk's isolated KV from the store, computed and stored if it is not there."""
    isolated = Isolated()
    (making,) = isolated.makings(shop.adapter, shop.prefix, len(chunk))
    found = shop.store.get(shop.adapter.fingerprint, chunk, making)
    if found is None:
        made = isolated.make(shop, chunk)
        shop.store.put(shop.adapter.fingerprint, made.kv, making, made.sources)
        found = made.kv
    return found
