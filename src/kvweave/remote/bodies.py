"""Bodies of requests to a vLLM server that has the plug-in: to answer a prompt, and to prepare a chunk."""

from collections.abc import Collection, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from kvweave.config import GenerationConfig
from kvweave.options import Sampling
from kvweave.recipes.context import Corpus, Ids
from kvweave.recipes.methods import recipe_named
from kvweave.recipes.prepare import WithNeighbours
from kvweave.remote.fields import read_task
from kvweave.types import TokenizedPrompt


def answering(prompt: TokenizedPrompt, recipe: str, *, tenant: str = "", **fields: Any) -> dict[str, Any]:
    """Return the body of a request that answers a prompt; `fields` (`ratio`, `model`, …) that are None are left out.

    Raises InvalidField for a recipe that vLLM cannot run, and for an impossible budget.
    """
    spans = [[span.start, span.end] for span in prompt.spans if span.kind == "chunk" and span.tokens]
    start, end = prompt.user_rows
    own = {"spans": spans, "recipe": recipe, "user": [start, end] if start < end else None, **fields}
    return _body(prompt.token_ids, own, tenant)


def preparing(
    recipe: str, prefix: Ids, chunk: Ids, corpus: Corpus, context_tokens: int, **fields: Any
) -> dict[str, Any]:
    """Return the body of a request that prepares a chunk of a corpus after the system prefix; the reply's one token means nothing.

    Raises InvalidField for a recipe whose chunks vLLM cannot prepare.
    """
    prepare = recipe_named(recipe).prepare
    prepare = getattr(prepare, "inner", prepare)
    room: Any = SimpleNamespace(
        adapter=SimpleNamespace(
            geometry=SimpleNamespace(context_tokens=context_tokens - 1), rope_regime=lambda tokens: "fixed"
        ),
        prefix=prefix,
        corpus=corpus,
    )
    before = prepare.neighbours(room, chunk) if isinstance(prepare, WithNeighbours) else []
    own = corpus.previous(chunk, len(before))
    previous = sum(1 for each in before if each in own)
    whole, spans = list(prefix), []
    for part in (*before, chunk):
        spans.append([len(whole), len(whole) + len(part)])
        whole += part
    named = {"spans": spans, "recipe": recipe, "prepare": True, "previous": previous, **fields}
    return {**_body([*whole, whole[-1]], named, ""), "max_tokens": 1}


def decoding(
    settings: GenerationConfig, most: int, ends: Collection[int], *, stops: bool = True
) -> dict[str, Any]:
    """Return the fields of a streamed request that generates as kvweave's own engine does, `most` tokens at most.

    `ends` are the tokens at which the model ends a reply. With `stops`, vLLM ends it at the stop texts too.
    """
    body: dict[str, Any] = {
        "max_tokens": most,
        "temperature": settings.temperature,
        "top_p": settings.top_p,
        "seed": settings.seed,
        "stop_token_ids": sorted(ends),
        # vLLM would take these from the model's generation config.
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    if isinstance(settings, Sampling):
        if settings.stop and stops:
            body["stop"] = list(settings.stop)
        if settings.logprobs is not None:
            body |= {"logprobs": settings.logprobs, "return_tokens_as_token_ids": True}
    return {name: value for name, value in body.items() if value is not None}


def _body(ids: Sequence[int], fields: Mapping[str, Any], tenant: str) -> dict[str, Any]:
    params = {"kvweave": {name: value for name, value in fields.items() if value is not None}}
    task = read_task(params, ids)
    assert task is not None
    body: dict[str, Any] = {"prompt": list(ids), "kv_transfer_params": params}
    if salt := task.salt(ids, tenant):
        body["cache_salt"] = salt
    return body
