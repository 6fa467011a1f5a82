"""Rehearsed requests: chunks that may meet in a prompt, prefilled behind each other before any question comes.

They tell how much the tokens of a chunk lean on chunks before it, and may leave exact KV of it behind some of them.
"""

import random
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice, zip_longest
from typing import ClassVar

import torch
from torch import Tensor

from kvweave.kvstore.keys import digest_tokens
from kvweave.models.adapter import Adapter
from kvweave.models.fused_cache import PlacedSpan
from kvweave.models.hooks import AttentionShares
from kvweave.recipes.context import Ids, PrepareContext
from kvweave.recipes.entries import StoreEntry
from kvweave.recipes.prepare import Isolated, feature_bytes, kv_bytes
from kvweave.recipes.request import OBSERVED
from kvweave.recipes.state import rows_of
from kvweave.types import ChunkFeature, KVProvenance, Span, TokenizedPrompt

_SHARES = "shares"


def attention_key(kv: KVProvenance) -> KVProvenance:
    """What names the note on the attention of a chunk whose KV was made so."""
    return replace(kv, kind="attention")


class ChunkAttention:
    """Watches a pass that computes whole chunks of a prompt, behind exact rows, and writes a note about each.

    Args:
        prompt: what the pass computes.
        chunks: the numbers of the chunks' spans; the pass computes all their rows.
    """

    def __init__(self, prompt: TokenizedPrompt, chunks: Sequence[int]) -> None:
        self._prompt, self._chunks = prompt, chunks
        spans = [prompt.spans[number] for number in chunks]
        self._rows = rows_of(spans)
        self.hook = AttentionShares(self._rows, [(span.start, span.end) for span in prompt.spans])

    def feature(self, number: int) -> ChunkFeature:
        """What one of the chunks attended to; call it after the pass."""
        span = self._prompt.spans[number]
        inside = (self._rows >= span.start) & (self._rows < span.end)
        earlier = [n for n in range(1, number) if self._prompt.spans[n].tokens]
        shares = self.hook.shares.cpu()[inside][:, [0, *earlier, number]]  # (n, P + 2)
        return ChunkFeature(self._prompt.ids(span), {_SHARES: shares.T.contiguous()})


@dataclass(frozen=True, slots=True)
class StoredAttention:
    """What a version's note says, averaged over layers and heads; its n tokens' shares add up to 1.

    `prefix` (n,) goes to the system prefix, `inter` (P, n) to each of the P chunks before it, `intra` (n,) to its own.
    """

    prefix: Tensor
    inter: Tensor
    intra: Tensor


def stored_attention(feature: ChunkFeature | None, earlier: int) -> StoredAttention | None:
    """Read a note about a chunk that stood behind so many others; None if there is none, or it is about another path."""
    if feature is None or feature.tensors[_SHARES].shape[0] != earlier + 2:
        return None
    shares = feature.tensors[_SHARES]
    return StoredAttention(shares[0], shares[1:-1], shares[-1])


@dataclass(frozen=True, slots=True)
class SimulatedRequests:
    """How much each token of a chunk attends to one earlier chunk, on the mean over rehearsed requests.

    A rehearsed request is an ordinary prefill of the system prefix and at most `most_chunks` of the chunks that are
    prepared together, as many as fit the model's context. All of them take part in each of `turns` turns, in a
    shuffled order or, every second time, in the one before it backwards, so that whoever stood first stands behind
    others. With `max_versions` the KV of every chunk behind others is kept too, with a note on its attention. That it was
    is noted under a kind of its own, beside the same note as without: who rehearsed without keeping KV has kept none.

    Fewer than `most_chunks` are joined by chunks that the corpus holds already, the most similar first, about which
    nothing is noted or kept. A chunk that never stood behind another one, as the only one of a corpus cannot, gets no
    note.
    """

    turns: int = 3
    most_chunks: int = 8
    max_versions: int | None = None

    together: ClassVar[bool] = True

    def provenance(self, adapter: Adapter, prefix: Ids, chunk_tokens: int) -> KVProvenance:
        """Behind the system prefix, whatever the other chunks were."""
        (isolated,) = Isolated().provenances(adapter, prefix, chunk_tokens)
        kind = f"rehearsed-{self.turns}-{self.most_chunks}"
        if self.max_versions is not None:
            kind = f"{kind}-{self.max_versions}"
        return KVProvenance(kind, isolated.context, rope_regime=isolated.rope_regime)

    def make(self, ctx: PrepareContext, chunks: Sequence[Ids]) -> Iterator[StoreEntry]:
        """One prefill for each rehearsed request."""
        behind: dict[Ids, list[Tensor]] = {}  # each (P, n)
        sources: dict[Ids, dict[str, None]] = {}
        asked = dict.fromkeys(sorted((ids for ids in chunks if ids), key=digest_tokens))
        for request in self._requests(ctx, [*asked, *self._company(ctx, asked)]):
            about = [number for number, ids in enumerate(request, 1) if number > 1 and ids in asked]
            for version in _rehearse(ctx, request, about, self.max_versions):
                behind.setdefault(version.chunk, []).append(version.inter)
                sources.setdefault(version.chunk, {}).update(dict.fromkeys(version.sources))
                yield from version.kept
        noting = dict.fromkeys((replace(self, max_versions=None), self))
        for chunk, inter in behind.items():
            feature = ChunkFeature(chunk, {"inter": torch.cat(inter).mean(dim=0)})
            for each in noting:
                provenance = each.provenance(ctx.adapter, ctx.prefix, len(chunk))
                yield StoreEntry(feature, provenance, tuple(sources[chunk]))

    def bytes(self, adapter: Adapter, chunk_tokens: int) -> int:
        """One number for each token; with `max_versions`, KV and its attention to every chunk from each turn as well."""
        if self.max_versions is None:
            return feature_bytes(chunk_tokens)
        version = kv_bytes(adapter, chunk_tokens) + feature_bytes(chunk_tokens, self.most_chunks + 1)
        return 2 * feature_bytes(chunk_tokens) + self.turns * version

    def _company(self, ctx: PrepareContext, asked: Collection[Ids]) -> list[Ids]:
        """Other chunks of the corpus, as many as a request has room for beside those that are asked about."""
        room = min(self.most_chunks, ctx.corpus.size) - len(asked)
        if room <= 0:
            return []  # likeness costs an embedding model, so it is not asked for in vain
        alike = (ctx.corpus.similar(ids, self.most_chunks - 1) for ids in asked)
        turns = chain.from_iterable(zip_longest(*alike))  # the nearest of each, then the second of each, …
        others = dict.fromkeys(ids for ids in turns if ids and ids not in asked)
        return list(islice(others, room))

    def _requests(self, ctx: PrepareContext, chunks: Sequence[Ids]) -> Iterator[list[Ids]]:
        """The chunks of each request, in order; the same whatever order they are given in."""
        order = sorted(chunks, key=digest_tokens)
        for turn in range(self.turns):
            order = order[::-1] if turn % 2 else random.Random(turn).sample(order, len(order))
            yield from (part for part in self._parts(ctx, order) if len(part) > 1)

    def _parts(self, ctx: PrepareContext, order: Sequence[Ids]) -> Iterator[list[Ids]]:
        """Requests of about the same number of chunks; a new one begins where the next chunk has no room."""
        most = -(-len(order) // max(1, -(-len(order) // self.most_chunks)))
        part: list[Ids] = []
        for chunk in order:
            if len(part) == most or not _fits(ctx, [*part, chunk]):
                yield part
                part = []
            part.append(chunk)
        yield part


def _fits(ctx: PrepareContext, chunks: Sequence[Ids]) -> bool:
    """Whether the model has room for them behind the prefix, without leaving the frequencies of the prefix alone."""
    length = len(ctx.prefix) + sum(map(len, chunks))
    regimes = {ctx.adapter.rope_regime(tokens) for tokens in (len(ctx.prefix), length)}
    return length <= ctx.adapter.geometry.context_tokens and len(regimes) == 1


@dataclass(frozen=True, slots=True)
class _Version:
    """One chunk in one rehearsed request: its inter attention (P, n), what it was made from, what is kept of it."""

    chunk: Ids
    inter: Tensor
    sources: tuple[str, ...]
    kept: tuple[StoreEntry, ...]


def _rehearse(
    ctx: PrepareContext, chunks: Sequence[Ids], about: Sequence[int], max_versions: int | None
) -> Iterator[_Version]:
    """Prefill S ++ chunks; a version of those chunks, counted from 1, that it is about: never the first, which is isolated."""
    if not about:
        return
    adapter = ctx.adapter
    prompt = _prompt(ctx.prefix, chunks)
    known = len(ctx.prefix)
    kv_cache = adapter.new_cache(prompt.tokens, [PlacedSpan(ctx.prefix_kv(), 0, 0)] if known else [])
    noted = ChunkAttention(prompt, about)
    plan = adapter.rows(torch.arange(known, prompt.tokens))
    plan.hooks.append(noted.hook)
    adapter.compute(kv_cache, prompt.token_ids, plan, capture=max_versions is not None)
    digests = tuple(digest_tokens(ids) for ids in chunks)
    context = (digest_tokens(ctx.prefix),) if known else ()
    for number in about:
        span, feature, sources = prompt.spans[number], noted.feature(number), digests[:number]
        found = stored_attention(feature, number - 1)
        assert found is not None
        kept: tuple[StoreEntry, ...] = ()
        if max_versions is not None:
            regime = adapter.rope_regime(prompt.tokens)
            provenance = KVProvenance(OBSERVED, (*context, *sources[:-1]), rope_regime=regime)
            kv = adapter.captured(kv_cache, prompt.token_ids, span.start, span.end)
            kept = (
                StoreEntry(kv, provenance, sources, max_versions),
                StoreEntry(feature, attention_key(provenance), sources),
            )
        yield _Version(chunks[number - 1], found.inter, sources, kept)


def _prompt(prefix: Ids, chunks: Sequence[Ids]) -> TokenizedPrompt:
    """A prompt without a question."""
    spans = [Span("system", 0, len(prefix))]
    for number, ids in enumerate(chunks):
        spans.append(Span("chunk", spans[-1].end, spans[-1].end + len(ids), number))
    return TokenizedPrompt((*prefix, *(token for ids in chunks for token in ids)), tuple(spans), (0, 0))
