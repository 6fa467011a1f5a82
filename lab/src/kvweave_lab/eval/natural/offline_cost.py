"""What preparing chunks costs, measured: model passes and stored bytes per token of a chunk.

A recipe prepares the chunks of a few documents in an empty store. Tokens that pass through the model's embedding are counted,
and the bytes of what is stored. A second model, such as CacheClip's, is not counted.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from kvweave.files import write_atomically
from kvweave.kvstore.memory_store import MemoryStore
from kvweave.models.adapter import Adapter
from kvweave.recipes.context import Corpus, PrepareContext
from kvweave.recipes.offline import prepare_chunks
from kvweave.recipes.prepare import NotPrepared
from kvweave.recipes.recipe import Recipe
from kvweave.types import ChunkFeature, ChunkKV, KVProvenance, ModelFingerprint

CHUNKS = 12
"""The fewest chunks that are prepared, so that a chunk has ten neighbours."""


@dataclass(frozen=True, slots=True)
class OfflineCost:
    """What a recipe costs before any question.

    Attributes:
        passes: tokens that ran through the model per token of a chunk.
        bytes_per_token: stored bytes of KV and features per token of a chunk.
    """

    passes: float
    bytes_per_token: float


def measure_cost(
    adapter: Adapter, recipe: Recipe, texts: Sequence[str], corpus: Corpus, system: str | None
) -> OfflineCost:
    """Prepare chunks by a recipe, and count; the texts are all chunks of the corpus, so that neighbours count once."""
    prefix = tuple(adapter.template.prefix_ids(system))
    chunks = [tuple(adapter.template.chunk_ids(text)) for text in texts]
    tokens = sum(map(len, dict.fromkeys(chunks)))
    store = _CountingStore()
    ctx = PrepareContext(adapter, store, prefix, corpus)
    if prefix:
        ctx.prefix_kv()
    before = store.used_bytes
    with _counted_tokens(adapter) as counted:
        prepare_chunks(ctx, chunks, recipe)
    stored = store.used_bytes - before + store.feature_bytes
    return OfflineCost(counted[0] / tokens, stored / tokens)


def measure_costs(
    adapter: Adapter,
    recipes: Iterable[Recipe],
    texts: Sequence[str],
    corpus: Corpus,
    system: str | None,
    folder: Path,
) -> dict[str, OfflineCost]:
    """Return the cost of each recipe that prepares chunks, by name; recipes that prepare the same share a measurement.

    Measurements are kept in `folder`, which belongs to the corpus: later calls with the same model find them there.
    """
    common = [adapter.fingerprint.digest, len(texts), system]
    costs: dict[str, OfflineCost] = {}
    for recipe in {each.name: each for each in recipes}.values():
        if recipe.prepare == NotPrepared():
            continue
        what = json.dumps([*common, repr(recipe.prepare), repr(recipe.select.extractors)])
        file = folder / f"{xxhash.xxh3_128_hexdigest(what.encode())}.json"
        if not file.exists():
            found = measure_cost(adapter, recipe, texts, corpus, system)
            write_atomically(file, [json.dumps(asdict(found)).encode()])
        costs[recipe.name] = OfflineCost(**json.loads(file.read_bytes()))
    return costs


class _CountingStore(MemoryStore):
    """Counts the bytes of features too."""

    def __init__(self) -> None:
        super().__init__()
        self.feature_bytes = 0

    def put(
        self,
        model: ModelFingerprint,
        content: ChunkKV | ChunkFeature,
        provenance: KVProvenance,
        sources: Sequence[str],
        *,
        max_versions: int | None = None,
    ) -> bool:
        """Store an entry, and count it if it is a feature."""
        if isinstance(content, ChunkFeature):
            self.feature_bytes += content.bytes
        return super().put(model, content, provenance, sources, max_versions=max_versions)


@contextmanager
def _counted_tokens(adapter: Adapter) -> Iterator[list[int]]:
    """Count in this context the tokens that pass through the model's embedding, in a list of one number."""
    counted = [0]

    def count(module: Any, inputs: tuple[Any, ...]) -> None:
        counted[0] += inputs[0].numel()

    handle = adapter.model.get_input_embeddings().register_forward_pre_hook(count)
    try:
        yield counted
    finally:
        handle.remove()
