"""Prepare chunks before any question: compute and store the KV and the features that a recipe needs."""

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from kvweave.embedding import TextEncoder
from kvweave.errors import InvalidRequest
from kvweave.kvstore.keys import ContentKind, digest_tokens
from kvweave.kvstore.kv_store import KVStore
from kvweave.models.adapter import Adapter
from kvweave.recipes.context import ChunkList, Ids, PrepareContext, StoreEntry
from kvweave.recipes.features import FeatureExtractor, placeholder
from kvweave.recipes.methods import as_recipe
from kvweave.recipes.names import AUTO
from kvweave.recipes.prepare import Prepare
from kvweave.recipes.recipe import Recipe
from kvweave.types import ChunkFeature, KVProvenance, ModelFingerprint, Storage

_LOG = logging.getLogger(__name__)


def prepare(
    adapter: Adapter,
    store: KVStore,
    chunks: Sequence[str],
    *,
    recipe: str | Recipe = AUTO,
    prepare: str | None = None,
    storage: str = "exact",
    system: str | None = None,
    embedding: str | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> int:
    """Compute and store what a recipe needs of some chunks; return how many chunks were computed.

    Chunks that are stored already cost a look-up. Where a recipe prepares chunks after others, these are taken
    from the same list: the chunks before it, or the most similar ones.

    Args:
        chunks: the chunk texts, in the order of their document.
        recipe: a recipe or its name.
        prepare: another preparation for a recipe given by its name, such as similar.
        storage: how chunk KV is stored: exact, int8 or int4.
        system: the instruction that prompts will have; None is the default one. KV prepared with another one is not found.
        embedding: the embedding model for similar chunks; None is the default one.
        progress: called with the tokens that passes have run over, and how many they will.

    Raises UnknownRecipe, InvalidRequest, and as `ChunkStore.put`.
    """
    if isinstance(chunks, str):
        raise TypeError("chunks is one string; give a list or tuple of chunk texts")
    adapter.check_weights()
    ids = [tuple(adapter.template.chunk_ids(text)) for text in chunks]
    corpus = ChunkList(
        [chunks], adapter.template.chunk_ids, lambda texts: TextEncoder(embedding).encode(texts)
    )
    chosen = as_recipe(recipe, prepare, storage)
    kv_steps = len({chosen.prepare.plain, chosen.prepare})
    total, done = kv_steps * sum(map(len, dict.fromkeys(ids))), 0

    def advance(tokens: int) -> None:
        nonlocal done
        done += tokens
        progress(done, total)

    ctx = PrepareContext(adapter, store, tuple(adapter.template.prefix_ids(system)), corpus, advance)
    return prepare_chunks(ctx, ids, chosen)


def prepare_chunks(ctx: PrepareContext, chunks: Iterable[Sequence[int]], recipe: Recipe) -> int:
    """Compute and store what the recipe needs of each chunk and the store does not hold.

    `chunks` are token ids as they appear in a prompt (`adapter.template.chunk_ids(text)`). Features may be extracted of all
    of them together. Each entry is stored before the next is computed, so that an interrupted run keeps what it did.
    Return the number of chunks for which something was computed and stored.
    """
    wanted = list(dict.fromkeys(map(tuple, chunks)))  # equal texts are computed once
    computed = set[Ids]()
    for step in preparation_steps(recipe):
        if step.prepare in (None, recipe.prepare):  # plainer KV comes along
            computed |= step.compute(ctx, wanted)
    return len(computed)


def copy_prepared(source: KVStore, ctx: PrepareContext, chunks: Iterable[Ids], recipe: Recipe) -> None:
    """Copy what the recipe prepares of chunks from `source`, as far as it is listed there, to the store of `ctx`, where it is not."""
    model = ctx.adapter.fingerprint
    for ids in dict.fromkeys(chunks):
        where, digest = (ctx.adapter, ctx.prefix, len(ids)), digest_tokens(ids)
        for provenance in _only_in(
            source, ctx.store, model, digest, recipe.prepare.provenances(*where), "kv"
        ):
            if (kv := source.get(model, ids, provenance)) is not None:
                ctx.store.put(model, kv, provenance, [digest])
        features = [each.provenance(*where) for each in extractors_of(recipe)]
        for provenance in _only_in(source, ctx.store, model, digest, features, "note"):
            (feature,) = source.find_features(model, [(ids, provenance)])
            if feature is not None:
                ctx.store.put(model, feature, provenance, [digest])


def _only_in(
    source: KVStore,
    other: KVStore,
    model: ModelFingerprint,
    digest: str,
    provenances: Sequence[KVProvenance],
    content: ContentKind,
) -> list[KVProvenance]:
    wanted = [(digest, each) for each in provenances]
    here, there = (store.has_many(model, wanted, content) for store in (source, other))
    return [each for (_, each), mine, theirs in zip(wanted, here, there, strict=True) if mine and not theirs]


@dataclass(frozen=True, slots=True)
class PreparationStep:
    """One kind of entry that a recipe prepares of every chunk: KV, by `prepare`, or the feature of an `extractor`.

    `storage` says how KV is stored that is computed on the way.
    """

    storage: Storage
    prepare: Prepare | None = None
    extractor: FeatureExtractor | None = None

    @property
    def across_chunks(self) -> bool:
        """Whether the result depends on which chunks are prepared together."""
        return self.extractor is not None and self.extractor.across_chunks

    def kind(self, ctx: PrepareContext) -> str:
        """Return the kind of entry that is made; empty if nothing is prepared."""
        if self.extractor is not None:
            return self.extractor.provenance(ctx.adapter, ctx.prefix, 1).kind
        assert self.prepare is not None
        return next((each.kind for each in self.prepare.provenances(ctx.adapter, ctx.prefix, 1)), "")

    def missing(self, ctx: PrepareContext, chunks: Sequence[tuple[str, int]]) -> list[int]:
        """Return the places of chunks, given by digest and number of tokens, that lack the entry; ascending."""
        if self.extractor is not None:
            return _missing_features(ctx, chunks, self.extractor)
        assert self.prepare is not None
        return _missing_kv(ctx, chunks, self.prepare)

    def compute(self, ctx: PrepareContext, chunks: Sequence[Ids]) -> set[Ids]:
        """Compute and store the entry of each chunk that lacks it; return those that got one. Of KV, report progress.

        Raises as `ChunkStore.put` if no chunk's KV could be stored; where some could, a warning says so.
        """
        ctx = replace(ctx, storage=self.storage)
        named = [(digest_tokens(ids), len(ids)) for ids in chunks]
        missing = set(self.missing(ctx, named))
        if self.extractor is not None:
            without = [chunks[number] for number in sorted(missing)]
            return _extract(ctx, _not_imported(ctx, without, self.extractor), self.extractor)
        assert self.prepare is not None
        computed, refused = set[Ids](), list[InvalidRequest]()
        for number, ids in enumerate(chunks):
            try:
                if number in missing and _compute_kv(ctx, ids, self.prepare):
                    computed.add(ids)
            except InvalidRequest as error:  # such as KV of NaN: the other chunks may be sound
                refused.append(error)
            ctx.progress(len(ids))
        if refused and not computed:
            raise refused[0]
        if refused:
            _LOG.warning("%d of %d chunks are not prepared: %s", len(refused), len(chunks), refused[0])
        return computed


def preparation_steps(recipe: Recipe) -> list[PreparationStep]:
    """Return the preparations of the recipe, the cheapest first: requests can use the entries of each step at once."""
    kv = dict.fromkeys((recipe.prepare.plain, recipe.prepare))
    storage = recipe.prepare.storage
    return [
        *(PreparationStep(storage, prepare=prepare) for prepare in kv),
        *(PreparationStep(storage, extractor=extractor) for extractor in extractors_of(recipe)),
    ]


def missing_bytes(ctx: PrepareContext, chunks: Sequence[tuple[str, int]], recipe: Recipe) -> dict[int, int]:
    """Return which chunks lack the recipe's KV or a feature, and about how many bytes of the store these take.

    `chunks` are digests and numbers of tokens; the keys of the result are places in them, ascending. KV of the recipe's
    first choice counts, not what else may be used instead.
    """
    prepare, plain = recipe.prepare, recipe.prepare.plain
    missing: dict[int, int] = defaultdict(int)
    without = _missing_kv(ctx, chunks, prepare)
    without_plain = set(_missing_kv(ctx, chunks, plain)) if plain != prepare else set(without)
    for number in without:
        stored = 0 if number in without_plain else plain.bytes(ctx.adapter, chunks[number][1])
        missing[number] += prepare.bytes(ctx.adapter, chunks[number][1]) - stored
    for extractor in extractors_of(recipe):
        counted = without if extractor in prepare.by_products else ()
        for number in set(_missing_features(ctx, chunks, extractor)).difference(counted):
            missing[number] += extractor.bytes(ctx.adapter, chunks[number][1])
    return dict(sorted(missing.items()))


@dataclass(frozen=True, slots=True)
class PreparationCost:
    """What preparing chunks costs, in tokens that passes of the model run over.

    `shared` is paid once, for the plain KV of all chunks that others are prepared after; `own` is each chunk's.
    """

    shared: int
    own: tuple[int, ...]

    def of(self, wanted: Iterable[int]) -> int:
        """Return the cost of preparing the chunks at these places."""
        return self.shared + sum(self.own[place] for place in wanted)


def preparation_cost(
    ctx: PrepareContext, chunks: Sequence[tuple[str, int]], recipe: Recipe
) -> PreparationCost:
    """Return about what preparing each of some chunks costs, among the corpus of `ctx`.

    `chunks` are digests and numbers of tokens.
    """
    shared, own = 0, [0] * len(chunks)
    for step in preparation_steps(recipe):
        if step.extractor is not None and step.extractor in recipe.prepare.by_products:
            continue  # measured on the way
        for place in set(step.missing(ctx, chunks)):
            if step.prepare in (None, recipe.prepare):
                own[place] += chunks[place][1]
            else:
                shared += chunks[place][1]
    return PreparationCost(shared, tuple(own))


def extractors_of(recipe: Recipe) -> list[FeatureExtractor]:
    """Return the preparation's extractors before the selector's: they may store the feature that the selector reads."""
    return list(dict.fromkeys((*recipe.prepare.extractors, *recipe.select.extractors)))


def _missing_kv(ctx: PrepareContext, chunks: Sequence[tuple[str, int]], prepare: Prepare) -> list[int]:
    provenances = [prepare.provenances(ctx.adapter, ctx.prefix, tokens) for _, tokens in chunks]
    wanted = [(number, chunks[number][0], each[0]) for number, each in enumerate(provenances) if each]
    stored = ctx.store.has_many(
        ctx.adapter.fingerprint, [(digest, provenance) for _, digest, provenance in wanted]
    )
    return [number for (number, _, _), is_stored in zip(wanted, stored, strict=True) if not is_stored]


def _missing_features(
    ctx: PrepareContext, chunks: Sequence[tuple[str, int]], extractor: FeatureExtractor
) -> list[int]:
    """Return the chunks without a feature, except those whose feature cannot be computed among the corpus' chunks."""
    wanted = [(digest, extractor.provenance(ctx.adapter, ctx.prefix, tokens)) for digest, tokens in chunks]
    stored = ctx.store.has_many(ctx.adapter.fingerprint, wanted, "note")
    missing = [number for number, is_stored in enumerate(stored) if not is_stored]
    if not missing or not ctx.corpus.size:
        return missing
    placeholders = [(wanted[number][0], placeholder(wanted[number][1], ctx.corpus)) for number in missing]
    impossible = ctx.store.has_many(ctx.adapter.fingerprint, placeholders, "note")
    return [number for number, is_impossible in zip(missing, impossible, strict=True) if not is_impossible]


def _compute_kv(ctx: PrepareContext, chunk: Ids, prepare: Prepare) -> bool:
    provenance = prepare.provenances(ctx.adapter, ctx.prefix, len(chunk))[0]
    if ctx.store.import_entries(ctx.adapter.fingerprint, [(chunk, provenance)])[0]:
        return False  # another machine has computed it
    prepared = prepare.compute(ctx, chunk)
    for feature in prepared.features:
        feature.put(ctx.store, ctx.adapter.fingerprint)
    return ctx.store.put(ctx.adapter.fingerprint, prepared.kv, provenance, prepared.sources)


def _not_imported(ctx: PrepareContext, chunks: Sequence[Ids], extractor: FeatureExtractor) -> list[Ids]:
    """Import the features that other machines have computed; return the other chunks."""
    wanted = [(chunk, extractor.provenance(ctx.adapter, ctx.prefix, len(chunk))) for chunk in chunks]
    stored = ctx.store.import_entries(ctx.adapter.fingerprint, wanted, "note")
    return [chunk for chunk, is_stored in zip(chunks, stored, strict=True) if not is_stored]


def _extract(ctx: PrepareContext, chunks: Sequence[Ids], extractor: FeatureExtractor) -> set[Ids]:
    """Extract and store features; return the chunks that got one, and store placeholders for the others."""
    stored, extracted = set(), set()
    for entry in extractor.extract(ctx, chunks) if chunks else ():
        extracted.add(entry.content.token_ids)
        if entry.put(ctx.store, ctx.adapter.fingerprint) and isinstance(entry.content, ChunkFeature):
            stored.add(entry.content.token_ids)
    for chunk in chunks if ctx.corpus.size else ():
        if chunk not in extracted:
            provenance = placeholder(extractor.provenance(ctx.adapter, ctx.prefix, len(chunk)), ctx.corpus)
            empty = StoreEntry(ChunkFeature(chunk, {}), provenance, (digest_tokens(chunk),), max_versions=1)
            empty.put(ctx.store, ctx.adapter.fingerprint)
    return stored
