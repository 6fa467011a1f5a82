"""Chunk KV of several recipes on disk, once for all that prepare alike."""

from collections.abc import Sequence
from pathlib import Path
from typing import Self

from kvweave.kvstore.chunk_store import ChunkStore
from kvweave.models.adapter import Adapter
from kvweave.recipes.chunks_api import prepare
from kvweave.recipes.prepare import Prepare
from kvweave.recipes.recipe import Recipe


class PreparedStores:
    """Stores of the same chunks under one folder; a context manager, which closes them.

    Preparing them is what making one does; what recipes record beside the KV is there too.
    """

    def __init__(
        self, adapter: Adapter, folder: Path, chunks: Sequence[str], recipes: Sequence[Recipe]
    ) -> None:
        self._made: list[tuple[Prepare, ChunkStore]] = []
        for recipe in recipes:
            if not any(known == recipe.prepare for known, _ in self._made):
                store = ChunkStore(folder / str(len(self._made)), limit_bytes=2**62)
                self._made.append((recipe.prepare, store))
            prepare(adapter, self.of(recipe), chunks, recipe=recipe)

    def of(self, recipe: Recipe) -> ChunkStore:
        """The one that holds what a recipe looks for."""
        return next(store for known, store in self._made if known == recipe.prepare)

    def files(self) -> list[Path]:
        """Those of the first store."""
        return sorted(self._made[0][1].folder.glob("??/*.safetensors"))

    def close(self) -> None:
        """Close all of them; closing twice is fine."""
        for _, store in self._made:
            store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
