"""Bodies of requests to a vLLM server that has kvweave, for OpenAI's client."""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from kvweave.embedding import TextEncoder
from kvweave.models.prompt import PromptTemplate
from kvweave.recipes.context import ChunkList, Vectors
from kvweave.remote.affinity import session_headers
from kvweave.remote.fields import answering, preparing
from kvweave.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def request(
    tokenizer: "PreTrainedTokenizerBase",
    chunks: Sequence[str],
    question: str,
    *,
    system: str | None = None,
    recipe: str = "auto",
    ratio: float | None = None,
    coverage: float | None = None,
    tenant: str = "",
    **options: Any,
) -> dict[str, Any]:
    """Return the arguments of `client.completions.create` for a question about chunks.

    Among them is the header `x-session-id`, by which a router sends requests with the same heavy chunks to the same replica.

    Args:
        tokenizer: the served model's.
        chunks: chunk texts, in the order of the prompt.
        system: the instruction; None is the default one. It must be the one that the chunks were prepared with.
        recipe: which tokens are recomputed; see `kvweave.METHODS`.
        ratio: the share 0..1 of stale tokens to recompute; without a budget the recipe's own is used.
        coverage: instead of a ratio, the share 0..1 of the selector's scores.
        tenant: separates the requests of one tenant from others' in vLLM's prefix cache and at a router.
        options: further arguments of the call: `model`, which it needs, `max_tokens`, `stream`, ….

    Raises InvalidRequest for an unknown recipe or an impossible budget.
    """
    prompt = PromptTemplate(tokenizer).render(Prompt(question, tuple(chunks), system))
    body = answering(prompt, recipe, ratio=ratio, coverage=coverage, tenant=tenant)
    return _arguments(body, options, tenant)


def preparations(
    tokenizer: "PreTrainedTokenizerBase",
    chunks: Sequence[str],
    *,
    system: str | None = None,
    recipe: str = "auto",
    context_tokens: int = 32768,
    embed: Callable[[Sequence[str]], Vectors] | None = None,
    **options: Any,
) -> Iterator[dict[str, Any]]:
    """Yield the arguments of one call of `client.completions.create` for each chunk, which prepares it.

    The reply's one token means nothing. Chunks that are stored already cost a look-up.

    Args:
        chunks: the chunk texts of one document, in its order.
        recipe: a recipe's name; int8+weave stores 8 bits per number.
        context_tokens: the greatest length that the server takes.
        embed: returns unit vectors (n, width) of texts, for recipes that prepare a chunk after similar ones; by default those
            of kvweave's own embedding model.
    """
    template = PromptTemplate(tokenizer)
    ids = [tuple(template.chunk_ids(text)) for text in chunks]
    prefix = tuple(template.prefix_ids(system))
    corpus = ChunkList([chunks], template.chunk_ids, embed or (lambda texts: TextEncoder(None).encode(texts)))
    for chunk in dict.fromkeys(ids):
        yield _arguments(preparing(recipe, prefix, chunk, corpus, context_tokens), options)


def _arguments(body: dict[str, Any], options: dict[str, Any], tenant: str = "") -> dict[str, Any]:
    """Return a body as arguments of `client.completions.create`, with options where the body says nothing."""
    extra = {name: body.pop(name) for name in ("kv_transfer_params", "cache_salt") if name in body}
    headers = session_headers(extra["kv_transfer_params"], body["prompt"], tenant)
    arguments = {**options, **body, "extra_body": extra}
    if headers:
        arguments["extra_headers"] = {**headers, **options.get("extra_headers", {})}
    return arguments
