"""Everything that a recipe wants made of chunks before any question: their KV, and records about them."""

from collections.abc import Iterable, Sequence

from kvweave.core import ChunkNote
from kvweave.recipes.recipe import Recipe
from kvweave.recipes.record import Record
from kvweave.recipes.workshop import Ids, Workshop
from kvweave.store.keys import digest_tokens


def prepare_chunks(shop: Workshop, chunks: Iterable[Sequence[int]], recipe: Recipe) -> int:
    """Make and store what the recipe needs of each chunk and the store lacks.

    `chunks` are token ids as they stand in a prompt (`adapter.template.chunk_ids(text)`); records may be made of all
    of them together. Returns how many chunks had something computed and stored, each before the next begins: an
    interrupted run keeps what it did.
    """
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
        made |= _make_record(shop, about, record)
    return len(made)


def lacking(shop: Workshop, chunks: Sequence[tuple[str, int]], recipe: Recipe) -> list[int]:
    """Which of some chunks, given by digest and tokens, lack the KV that the recipe prepares first of all, or a record."""
    without = set(_without_kv(shop, chunks, recipe))
    for record in _records(recipe):
        without.update(_without_note(shop, chunks, record))
    return sorted(without)


def _records(recipe: Recipe) -> list[Record]:
    """The preparation's before the selector's: it may leave what the selector asks for."""
    return list(dict.fromkeys((*recipe.prepare.records, *recipe.select.records)))


def _without_kv(shop: Workshop, chunks: Sequence[tuple[str, int]], recipe: Recipe) -> list[int]:
    makings = [recipe.prepare.makings(shop.adapter, shop.prefix, tokens) for _, tokens in chunks]
    asked = [(n, chunks[n][0], made[0]) for n, made in enumerate(makings) if made]
    held = shop.store.has_many(shop.adapter.fingerprint, [(digest, making) for _, digest, making in asked])
    return [number for (number, _, _), there in zip(asked, held, strict=True) if not there]


def _without_note(shop: Workshop, chunks: Sequence[tuple[str, int]], record: Record) -> list[int]:
    asked = [(digest, record.making(shop.adapter, shop.prefix, tokens)) for digest, tokens in chunks]
    held = shop.store.has_notes(shop.adapter.fingerprint, asked)
    return [number for number, there in enumerate(held) if not there]


def _make_kv(shop: Workshop, chunk: Ids, recipe: Recipe) -> bool:
    making = recipe.prepare.makings(shop.adapter, shop.prefix, len(chunk))[0]
    made = recipe.prepare.make(shop, chunk)
    return shop.store.put(shop.adapter.fingerprint, made.kv, making, made.sources)


def _make_record(shop: Workshop, chunks: Sequence[Ids], record: Record) -> set[Ids]:
    """The chunks that got a note."""
    made = set()
    for kept in record.make(shop, chunks) if chunks else ():
        if kept.put(shop.store, shop.adapter.fingerprint) and isinstance(kept.content, ChunkNote):
            made.add(kept.content.token_ids)
    return made
