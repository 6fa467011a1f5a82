"""Everything that a recipe wants made of chunks before any question: their KV, and records about them."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

from kvweave.kvstore.keys import digest_tokens
from kvweave.recipes.chunk_features import Record, unsaid
from kvweave.recipes.context import Ids, Workshop
from kvweave.recipes.entries import Kept
from kvweave.recipes.recipe import Recipe
from kvweave.types import ChunkNote


def prepare_chunks(shop: Workshop, chunks: Iterable[Sequence[int]], recipe: Recipe) -> int:
    """Make and store what the recipe needs of each chunk and the store lacks.

    `chunks` are token ids as they stand in a prompt (`adapter.template.chunk_ids(text)`); records may be made of all
    of them together. Returns how many chunks had something computed and stored, each before the next begins: an
    interrupted run keeps what it did.
    """
    shop = replace(shop, storage=recipe.prepare.storage)  # also for KV that records take and store on the way
    wanted = list(dict.fromkeys(map(tuple, chunks)))  # a text that is there twice is made once
    named = [(digest_tokens(ids), len(ids)) for ids in wanted]
    lacking = set(_without_kv(shop, named, recipe))
    made = set()
    for number, ids in enumerate(wanted):
        if number in lacking and _make_kv(shop, ids, recipe):
            made.add(ids)
        shop.progress(len(ids))
    for record in _records(recipe):
        about = [wanted[number] for number in _without_note(shop, named, record)]
        made |= _make_record(shop, _nowhere(shop, about, record), record)
    return len(made)


def lacking(shop: Workshop, chunks: Sequence[tuple[str, int]], recipe: Recipe) -> dict[int, int]:
    """Which of some chunks, given by digest and tokens, lack the KV that the recipe prepares first of all, or a record.

    With each, in order, about how many bytes of the store it takes to make up for what it lacks.
    """
    room: dict[int, int] = defaultdict(int)
    for number in _without_kv(shop, chunks, recipe):
        room[number] += recipe.prepare.bytes(shop.adapter, chunks[number][1])
    for record in _records(recipe):
        for number in _without_note(shop, chunks, record):
            room[number] += record.bytes(shop.adapter, chunks[number][1])
    return dict(sorted(room.items()))


def _records(recipe: Recipe) -> list[Record]:
    """The preparation's before the selector's: it may leave what the selector asks for."""
    return list(dict.fromkeys((*recipe.prepare.records, *recipe.select.records)))


def _without_kv(shop: Workshop, chunks: Sequence[tuple[str, int]], recipe: Recipe) -> list[int]:
    makings = [recipe.prepare.makings(shop.adapter, shop.prefix, tokens) for _, tokens in chunks]
    asked = [(n, chunks[n][0], made[0]) for n, made in enumerate(makings) if made]
    held = shop.store.has_many(shop.adapter.fingerprint, [(digest, making) for _, digest, making in asked])
    return [number for (number, _, _), there in zip(asked, held, strict=True) if not there]


def _without_note(shop: Workshop, chunks: Sequence[tuple[str, int]], record: Record) -> list[int]:
    """Those of which nothing is recorded, but for those about which nothing can be said among the chunks there are."""
    asked = [(digest, record.making(shop.adapter, shop.prefix, tokens)) for digest, tokens in chunks]
    held = shop.store.has_notes(shop.adapter.fingerprint, asked)
    without = [number for number, there in enumerate(held) if not there]
    if not without or not shop.corpus.size:
        return without
    empty = [(asked[number][0], unsaid(asked[number][1], shop.corpus)) for number in without]
    silent = shop.store.has_notes(shop.adapter.fingerprint, empty)
    return [number for number, there in zip(without, silent, strict=True) if not there]


def _make_kv(shop: Workshop, chunk: Ids, recipe: Recipe) -> bool:
    making = recipe.prepare.makings(shop.adapter, shop.prefix, len(chunk))[0]
    if shop.store.adopt(shop.adapter.fingerprint, [(chunk, making)])[0]:
        return False  # another machine has made it
    made = recipe.prepare.make(shop, chunk)
    return shop.store.put(shop.adapter.fingerprint, made.kv, making, made.sources)


def _nowhere(shop: Workshop, chunks: Sequence[Ids], record: Record) -> list[Ids]:
    """Those of which no other machine has made the record either."""
    asked = [(chunk, record.making(shop.adapter, shop.prefix, len(chunk))) for chunk in chunks]
    held = shop.store.adopt_notes(shop.adapter.fingerprint, asked)
    return [chunk for chunk, there in zip(chunks, held, strict=True) if not there]


def _make_record(shop: Workshop, chunks: Sequence[Ids], record: Record) -> set[Ids]:
    """The chunks that got a note; of the others is noted that there is none, until other chunks are around."""
    made, said = set(), set()
    for kept in record.make(shop, chunks) if chunks else ():
        said.add(kept.content.token_ids)
        if kept.put(shop.store, shop.adapter.fingerprint) and isinstance(kept.content, ChunkNote):
            made.add(kept.content.token_ids)
    for chunk in chunks if shop.corpus.size else ():
        if chunk not in said:
            making = unsaid(record.making(shop.adapter, shop.prefix, len(chunk)), shop.corpus)
            empty = Kept(ChunkNote(chunk, {}), making, (digest_tokens(chunk),), most_versions=1)
            empty.put(shop.store, shop.adapter.fingerprint)
    return made
