"""Simulated requests: chunks that may meet in a prompt, prefilled one after another before any question.

They show how much the tokens of a chunk attend to earlier chunks, and can leave exact KV of the chunk after some of them.
"""

import random
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice, zip_longest
from typing import ClassVar

import torch
from torch import Tensor

from kvweave.kvstore.keys import digest_tokens
from kvweave.models.engine import Engine
from kvweave.models.fused_cache import PlacedSpan
from kvweave.recipes.context import Ids, PrepareContext, StoreEntry
from kvweave.recipes.features import (
    AttentionRecorder,
    FeatureExtractor,
    attention_key,
    attention_to_earlier,
    feature_bytes,
)
from kvweave.recipes.prepare import isolated_provenance, kv_bytes
from kvweave.recipes.request import OBSERVED
from kvweave.types import ChunkFeature, KVProvenance, Span, TokenizedPrompt


@dataclass(frozen=True, slots=True)
class SimulatedRequests(FeatureExtractor):
    """How much each token of a chunk attends to one earlier chunk, on average over simulated requests.

    A simulated request is an ordinary prefill of the system prefix and at most `max_chunks` of the chunks that are prepared
    together, as many as fit the model's context. In each of the `rounds` every chunk takes part in one request. The order of the
    chunks is shuffled; in every second round it is the previous one reversed, so that the first chunk then comes after others. If
    there are fewer than `max_chunks`, other chunks of the corpus join, the most similar first, without getting features or KV.
    A chunk that never came after another one, such as the only one of a corpus, gets no feature.

    With `max_versions` so many versions of every chunk's KV after others are kept too, each with a feature of its attention. The
    provenance kind says so, because simulations that kept no KV have to be repeated then. The feature is also stored under the
    kind without versions.
    """

    rounds: int = 3
    max_chunks: int = 8
    max_versions: int | None = None

    across_chunks: ClassVar[bool] = True

    def provenance(self, adapter: Engine, prefix: Ids, chunk_tokens: int) -> KVProvenance:
        """Return the provenance after the system prefix, whatever the other chunks were."""
        kind = f"rehearsed-{self.rounds}-{self.max_chunks}"
        if self.max_versions is not None:
            kind = f"{kind}-{self.max_versions}"
        return replace(isolated_provenance(adapter, prefix, chunk_tokens), kind=kind)

    def extract(self, ctx: PrepareContext, chunks: Sequence[Ids]) -> Iterator[StoreEntry]:
        """Run one prefill per simulated request."""
        inter: dict[Ids, list[Tensor]] = {}  # each (P, n)
        sources: dict[Ids, dict[str, None]] = {}
        wanted = dict.fromkeys(sorted((ids for ids in chunks if ids), key=digest_tokens))
        for request in self._requests(ctx, [*wanted, *self._others(ctx, wanted)]):
            about = [number for number, ids in enumerate(request, 1) if number > 1 and ids in wanted]
            for number, share, digests, entries in _simulate(ctx, request, about, self.max_versions):
                inter.setdefault(request[number - 1], []).append(share)
                sources.setdefault(request[number - 1], {}).update(dict.fromkeys(digests))
                yield from entries
        extractors = dict.fromkeys((replace(self, max_versions=None), self))
        for chunk, shares in inter.items():
            feature = ChunkFeature(chunk, {"inter": torch.cat(shares).mean(dim=0)})
            for extractor in extractors:
                provenance = extractor.provenance(ctx.adapter, ctx.prefix, len(chunk))
                yield StoreEntry(feature, provenance, tuple(sources[chunk]))

    def bytes(self, adapter: Engine, chunk_tokens: int) -> int:
        """Count one number per token; with `max_versions`, also KV and its attention from each round."""
        if self.max_versions is None:
            return feature_bytes(chunk_tokens)
        version = kv_bytes(adapter, chunk_tokens) + feature_bytes(chunk_tokens, self.max_chunks + 1)
        return 2 * feature_bytes(chunk_tokens) + self.rounds * version

    def _others(self, ctx: PrepareContext, wanted: Collection[Ids]) -> list[Ids]:
        """Return other chunks of the corpus, as many as fill one request up."""
        room = min(self.max_chunks, ctx.corpus.size) - len(wanted)
        if room <= 0:
            return []  # similarity costs an embedding model, so do not ask for it without need
        similar = (ctx.corpus.similar(ids, self.max_chunks - 1) for ids in wanted)
        ranked = chain.from_iterable(zip_longest(*similar))  # the nearest of each, then the second of each, …
        others = dict.fromkeys(ids for ids in ranked if ids and ids not in wanted)
        return list(islice(others, room))

    def _requests(self, ctx: PrepareContext, chunks: Sequence[Ids]) -> Iterator[list[Ids]]:
        """Yield the chunks of each request, in prompt order; the order of `chunks` does not matter."""
        order = sorted(chunks, key=digest_tokens)
        for number in range(self.rounds):
            order = order[::-1] if number % 2 else random.Random(number).sample(order, len(order))
            yield from (part for part in self._parts(ctx, order) if len(part) > 1)

    def _parts(self, ctx: PrepareContext, order: Sequence[Ids]) -> Iterator[list[Ids]]:
        """Cut a round into requests of about the same number of chunks, each of which fits the context."""
        count = -(-len(order) // max(1, -(-len(order) // self.max_chunks)))
        part: list[Ids] = []
        for chunk in order:
            if len(part) == count or not _fits(ctx, [*part, chunk]):
                yield part
                part = []
            part.append(chunk)
        yield part


def _fits(ctx: PrepareContext, chunks: Sequence[Ids]) -> bool:
    """Return whether the context has room for the chunks, under the rotary frequencies of the prefix alone."""
    length = len(ctx.prefix) + sum(map(len, chunks))
    regimes = {ctx.adapter.rope_regime(tokens) for tokens in (len(ctx.prefix), length)}
    return length <= ctx.adapter.geometry.context_tokens and len(regimes) == 1


def _simulate(
    ctx: PrepareContext, chunks: Sequence[Ids], about: Sequence[int], max_versions: int | None
) -> Iterator[tuple[int, Tensor, tuple[str, ...], list[StoreEntry]]]:
    """Prefill S ++ chunks; yield of each chunk `about`, by its number from 1, what its version shows, and entries to store.

    That is its attention (P, n) to the P chunks before it, and the digests of these and its own. `about` never has the first,
    whose version is the isolated one.
    """
    if not about:
        return
    adapter, start = ctx.adapter, len(ctx.prefix)
    prompt = _prompt(ctx.prefix, chunks)
    kv_cache = adapter.new_cache(prompt.tokens, [PlacedSpan(ctx.prefix_kv(), 0, 0)] if start else [])
    recorder = AttentionRecorder(prompt, about)
    plan = adapter.rows(torch.arange(start, prompt.tokens))
    plan.hooks.append(recorder.hook)
    adapter.compute(kv_cache, prompt.token_ids, plan, capture=max_versions is not None)
    digests = tuple(digest_tokens(ids) for ids in chunks)
    context = (digest_tokens(ctx.prefix),) if start else ()
    for number in about:
        span, feature, sources = prompt.spans[number], recorder.feature(number), digests[:number]
        inter = attention_to_earlier(feature, number - 1)
        assert inter is not None
        entries: list[StoreEntry] = []
        if max_versions is not None:
            regime = adapter.rope_regime(prompt.tokens)
            provenance = KVProvenance(OBSERVED, (*context, *sources[:-1]), rope_regime=regime)
            kv = adapter.extract_chunk_kv(kv_cache, prompt.token_ids, span.start, span.end)
            entries.append(StoreEntry(kv, provenance, sources, max_versions))
            entries.append(StoreEntry(feature, attention_key(provenance), sources))
        yield number, inter, sources, entries


def _prompt(prefix: Ids, chunks: Sequence[Ids]) -> TokenizedPrompt:
    """Return a prompt without a question."""
    spans = [Span("system", 0, len(prefix))]
    for number, ids in enumerate(chunks):
        spans.append(Span("chunk", spans[-1].end, spans[-1].end + len(ids), number))
    return TokenizedPrompt((*prefix, *(token for ids in chunks for token in ids)), tuple(spans), (0, 0))
