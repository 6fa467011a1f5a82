"""Three texts, prepared in a store, and their prefill."""

from kvweave.kvstore.chunk_store import ChunkStore
from kvweave.models.adapter import Adapter
from kvweave.recipes.context import PrepareContext
from kvweave.recipes.methods import recipe_named
from kvweave.recipes.offline import prepare_chunks
from kvweave.recipes.recipe import run
from kvweave.recipes.request import PrefillResult
from kvweave.types import Prompt, TokenizedPrompt

TEXTS = (
    "The bell rings at nine.",
    "The gate opens at ten.",
    "The boat leaves at noon.",
    "Soup is served at one.",
)


def prepared(adapter: Adapter, store: ChunkStore, texts: tuple[str, ...]) -> None:
    ctx = PrepareContext(adapter, store, adapter.template.prefix_ids(None))
    ctx.prefix_kv()
    prepare_chunks(ctx, [adapter.template.chunk_ids(text) for text in texts], recipe_named("reuse"))


def asked(adapter: Adapter) -> TokenizedPrompt:
    return adapter.template.render(Prompt("When does the boat leave?", TEXTS))


def prefilled(
    adapter: Adapter, store: ChunkStore, recipe: str = "reuse", ratio: float = 0.0
) -> PrefillResult:
    return run(recipe_named(recipe), adapter, store, asked(adapter), ratio=ratio)


def origins(result: PrefillResult) -> list[str]:
    return [span.origin for span in result.plan.spans if span.kind == "chunk"]
