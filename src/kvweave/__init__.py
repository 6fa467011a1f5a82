"""kvweave: answers over your own documents that never compute the same thing twice.

    kb = kvweave.open("my-notes")        a knowledge base: add, ask, stream
    kvweave.prefill(adapter, store, …)   one level down: your own retriever, ordinary transformers models

Names are imported when first used, so that `import kvweave` itself costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from kvweave.core import Answer as Answer
    from kvweave.core import Plan as Plan
    from kvweave.core import Prompt as Prompt
    from kvweave.core import Timing as Timing
    from kvweave.decode.settings import ClusteredKV as ClusteredKV
    from kvweave.engine.continuing import generate as generate
    from kvweave.engine.continuing import prefill as prefill
    from kvweave.engine.engine import KnowledgeBase as KnowledgeBase
    from kvweave.engine.engine import open_knowledge_base as open  # noqa: F401  in __all__ by its new name
    from kvweave.errors import KvweaveError as KvweaveError
    from kvweave.models.adapter import Adapter as Adapter
    from kvweave.models.loading import load_model as load_model
    from kvweave.recipes.methods import METHODS as METHODS
    from kvweave.recipes.prefill import prepare as prepare
    from kvweave.recipes.recipe import Recipe as Recipe
    from kvweave.store.chunk_store import ChunkStore as ChunkStore

_EXPORTS = {
    "Adapter": "models.adapter",
    "Answer": "core",
    "ChunkStore": "store.chunk_store",
    "ClusteredKV": "decode.settings",
    "KnowledgeBase": "engine.engine",
    "KvweaveError": "errors",
    "METHODS": "recipes.methods",
    "Plan": "core",
    "Prompt": "core",
    "Recipe": "recipes.recipe",
    "Timing": "core",
    "generate": "engine.continuing",
    "load_model": "models.loading",
    "open": "engine.engine",
    "prefill": "engine.continuing",
    "prepare": "recipes.prefill",
}
_RENAMED = {"open": "open_knowledge_base"}

__all__ = sorted(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'kvweave' has no attribute {name!r}")
    return getattr(import_module(f"kvweave.{_EXPORTS[name]}"), _RENAMED.get(name, name))


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
