"""Everything that a recipe wants made of chunks before any question: their KV, and records about them."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

from kvweave.kvstore.keys import digest_tokens
from kvweave.recipes.context import Ids, PrepareContext
from kvweave.recipes.entries import StoreEntry
from kvweave.recipes.features import FeatureExtractor, placeholder
from kvweave.recipes.recipe import Recipe
from kvweave.types import ChunkFeature


def prepare_chunks(ctx: PrepareContext, chunks: Iterable[Sequence[int]], recipe: Recipe) -> int:
    """Make and store what the recipe needs of each chunk and the store lacks.

    `chunks` are token ids as they stand in a prompt (`adapter.template.chunk_ids(text)`); records may be made of all
    of them together. Returns how many chunks had something computed and stored, each before the next begins: an
    interrupted run keeps what it did.
    """
    ctx = replace(ctx, storage=recipe.prepare.storage)  # also for KV that records take and store on the way
    wanted = list(dict.fromkeys(map(tuple, chunks)))  # a text that is there twice is made once
    named = [(digest_tokens(ids), len(ids)) for ids in wanted]
    lacking = set(_without_kv(ctx, named, recipe))
    made = set()
    for number, ids in enumerate(wanted):
        if number in lacking and _make_kv(ctx, ids, recipe):
            made.add(ids)
        ctx.progress(len(ids))
    for extractor in _records(recipe):
        about = [wanted[number] for number in _without_note(ctx, named, extractor)]
        made |= _make_record(ctx, _nowhere(ctx, about, extractor), extractor)
    return len(made)


def lacking(ctx: PrepareContext, chunks: Sequence[tuple[str, int]], recipe: Recipe) -> dict[int, int]:
    """Which of some chunks, given by digest and tokens, lack the KV that the recipe prepares first of all, or a record.

    With each, in order, about how many bytes of the store it takes to make up for what it lacks.
    """
    room: dict[int, int] = defaultdict(int)
    for number in _without_kv(ctx, chunks, recipe):
        room[number] += recipe.prepare.bytes(ctx.adapter, chunks[number][1])
    for extractor in _records(recipe):
        for number in _without_note(ctx, chunks, extractor):
            room[number] += extractor.bytes(ctx.adapter, chunks[number][1])
    return dict(sorted(room.items()))


def _records(recipe: Recipe) -> list[FeatureExtractor]:
    """The preparation's before the selector's: it may leave what the selector asks for."""
    return list(dict.fromkeys((*recipe.prepare.extractors, *recipe.select.extractors)))


def _without_kv(ctx: PrepareContext, chunks: Sequence[tuple[str, int]], recipe: Recipe) -> list[int]:
    provenances = [recipe.prepare.provenances(ctx.adapter, ctx.prefix, tokens) for _, tokens in chunks]
    asked = [(n, chunks[n][0], made[0]) for n, made in enumerate(provenances) if made]
    held = ctx.store.has_many(
        ctx.adapter.fingerprint, [(digest, provenance) for _, digest, provenance in asked]
    )
    return [number for (number, _, _), there in zip(asked, held, strict=True) if not there]


def _without_note(
    ctx: PrepareContext, chunks: Sequence[tuple[str, int]], extractor: FeatureExtractor
) -> list[int]:
    """Those of which nothing is recorded, but for those about which nothing can be said among the chunks there are."""
    asked = [(digest, extractor.provenance(ctx.adapter, ctx.prefix, tokens)) for digest, tokens in chunks]
    held = ctx.store.has_features(ctx.adapter.fingerprint, asked)
    without = [number for number, there in enumerate(held) if not there]
    if not without or not ctx.corpus.size:
        return without
    empty = [(asked[number][0], placeholder(asked[number][1], ctx.corpus)) for number in without]
    silent = ctx.store.has_features(ctx.adapter.fingerprint, empty)
    return [number for number, there in zip(without, silent, strict=True) if not there]


def _make_kv(ctx: PrepareContext, chunk: Ids, recipe: Recipe) -> bool:
    provenance = recipe.prepare.provenances(ctx.adapter, ctx.prefix, len(chunk))[0]
    if ctx.store.import_entries(ctx.adapter.fingerprint, [(chunk, provenance)])[0]:
        return False  # another machine has made it
    made = recipe.prepare.make(ctx, chunk)
    return ctx.store.put(ctx.adapter.fingerprint, made.kv, provenance, made.sources)


def _nowhere(ctx: PrepareContext, chunks: Sequence[Ids], extractor: FeatureExtractor) -> list[Ids]:
    """Those of which no other machine has made the record either."""
    asked = [(chunk, extractor.provenance(ctx.adapter, ctx.prefix, len(chunk))) for chunk in chunks]
    held = ctx.store.import_features(ctx.adapter.fingerprint, asked)
    return [chunk for chunk, there in zip(chunks, held, strict=True) if not there]


def _make_record(ctx: PrepareContext, chunks: Sequence[Ids], extractor: FeatureExtractor) -> set[Ids]:
    """The chunks that got a note; of the others is noted that there is none, until other chunks are around."""
    made, said = set(), set()
    for kept in extractor.make(ctx, chunks) if chunks else ():
        said.add(kept.content.token_ids)
        if kept.put(ctx.store, ctx.adapter.fingerprint) and isinstance(kept.content, ChunkFeature):
            made.add(kept.content.token_ids)
    for chunk in chunks if ctx.corpus.size else ():
        if chunk not in said:
            provenance = placeholder(extractor.provenance(ctx.adapter, ctx.prefix, len(chunk)), ctx.corpus)
            empty = StoreEntry(ChunkFeature(chunk, {}), provenance, (digest_tokens(chunk),), max_versions=1)
            empty.put(ctx.store, ctx.adapter.fingerprint)
    return made
