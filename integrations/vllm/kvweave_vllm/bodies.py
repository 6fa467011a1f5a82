"""Bodies of requests to a vLLM server that has kvweave, for OpenAI's client."""

from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from kvweave.embedding import TextEncoder
from kvweave.models.prompt import PromptTemplate
from kvweave.recipes.context import ChunkList, Vectors
from kvweave.recipes.methods import recipe_named
from kvweave.recipes.prepare import WithNeighbours
from kvweave.types import Prompt, TokenizedPrompt
from kvweave_vllm.affinity import HEADER, session_key
from kvweave_vllm.fields import read_task

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
    fields: dict[str, Any] = {"spans": _chunk_spans(prompt), "recipe": recipe, "user": list(prompt.user_rows)}
    fields |= {name: value for name, value in (("ratio", ratio), ("coverage", coverage)) if value is not None}
    return _body(prompt.token_ids, fields, tenant, options)


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
    prepare = recipe_named(recipe).prepare
    prepare = getattr(prepare, "inner", prepare)
    room: Any = SimpleNamespace(
        adapter=SimpleNamespace(
            geometry=SimpleNamespace(context_tokens=context_tokens - 1), rope_regime=lambda tokens: "fixed"
        ),
        prefix=prefix,
        corpus=corpus,
    )
    for chunk in dict.fromkeys(ids):
        before = prepare.neighbours(room, chunk) if isinstance(prepare, WithNeighbours) else []
        own = corpus.previous(chunk, len(before))
        previous = sum(1 for each in before if each in own)
        whole, spans = list(prefix), []
        for part in (*before, chunk):
            spans.append([len(whole), len(whole) + len(part)])
            whole += part
        fields = {"spans": spans, "recipe": recipe, "prepare": True, "previous": previous}
        yield _body([*whole, whole[-1]], fields, "", {**options, "max_tokens": 1})


def _chunk_spans(prompt: TokenizedPrompt) -> list[list[int]]:
    return [[span.start, span.end] for span in prompt.spans if span.kind == "chunk" and span.tokens]


def _body(ids: Sequence[int], fields: dict[str, Any], tenant: str, options: dict[str, Any]) -> dict[str, Any]:
    params = {"kvweave": fields}
    task = read_task(params, ids)
    assert task is not None
    extra: dict[str, Any] = {"kv_transfer_params": params}
    if salt := task.salt(ids, tenant):
        extra["cache_salt"] = salt
    body = {"prompt": list(ids), "extra_body": extra, **options}
    # A chunk is prepared where the requests go that it names.
    spans = task.spans if task.previous is None else task.spans[-1:]
    if key := session_key((ids[start:end] for start, end in spans), tenant):
        body["extra_headers"] = {HEADER: key, **options.get("extra_headers", {})}
    return body
