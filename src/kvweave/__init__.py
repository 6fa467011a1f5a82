"""kvweave: answers over your own documents that never compute the same thing twice.

    kb = kvweave.open("my-notes")        a knowledge base: add, ask, stream
    kvweave.prefill(adapter, store, …)   one level down: your own retriever, ordinary transformers models

Names are imported when first used, so that `import kvweave` itself costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvweave.version import __version__ as __version__

if TYPE_CHECKING:
    from kvweave.api import generate as generate
    from kvweave.api import prefill as prefill
    from kvweave.decode.settings import OffloadSettings as OffloadSettings
    from kvweave.errors import KvweaveError as KvweaveError
    from kvweave.knowledge_base import KnowledgeBase as KnowledgeBase
    from kvweave.knowledge_base import open_knowledge_base as open  # noqa: F401  in __all__ by its new name
    from kvweave.kvstore.chunk_store import ChunkStore as ChunkStore
    from kvweave.models.adapter import Adapter as Adapter
    from kvweave.models.loading import load_model as load_model
    from kvweave.recipes.methods import METHODS as METHODS
    from kvweave.recipes.offline import prepare as prepare
    from kvweave.recipes.recipe import Recipe as Recipe
    from kvweave.results import Answer as Answer
    from kvweave.results import Plan as Plan
    from kvweave.results import Timing as Timing
    from kvweave.types import Prompt as Prompt

_EXPORTS = {
    "Adapter": "models.adapter",
    "Answer": "results",
    "ChunkStore": "kvstore.chunk_store",
    "KnowledgeBase": "knowledge_base",
    "KvweaveError": "errors",
    "METHODS": "recipes.methods",
    "OffloadSettings": "decode.settings",
    "Plan": "results",
    "Prompt": "types",
    "Recipe": "recipes.recipe",
    "Timing": "results",
    "generate": "api",
    "load_model": "models.loading",
    "open": "knowledge_base",
    "prefill": "api",
    "prepare": "recipes.offline",
}

__all__ = sorted(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'kvweave' has no attribute {name!r}")
    if _EXPORTS[name] == "knowledge_base":
        from kvweave.extras import require_knowledge_base

        require_knowledge_base("kb", f"kvweave.{name}")
    attribute = "open_knowledge_base" if name == "open" else name
    return getattr(import_module(f"kvweave.{_EXPORTS[name]}"), attribute)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
