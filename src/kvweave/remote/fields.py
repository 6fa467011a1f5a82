"""The field `kvweave` of a request's `kv_transfer_params`: which tokens are chunks, and how their KV is reused.

    {"spans": [[start, end], …], "recipe": "weave", "ratio": 0.1, "user": [start, end]}
    {"spans": [[start, end], …], "recipe": "weave", "prepare": true, "previous": 1}

The first answers a prompt. The second stores what the recipe prepares of the last span; the spans before it are the chunks
that it may be prepared after, the last `previous` of them those before it in its document.

Both may name the `model`: the digest of its fingerprint. kvweave-vllm, the plug-in of vLLM, reads all this.
`answering` and `preparing` make the bodies of such requests.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, Final

from kvweave.config import GenerationConfig
from kvweave.errors import InvalidRequest
from kvweave.kvstore.keys import digest_tokens
from kvweave.options import Sampling
from kvweave.recipes.context import Corpus, Ids
from kvweave.recipes.methods import in_any_storage, recipe_named
from kvweave.recipes.offline import preparation_steps
from kvweave.recipes.place import Causal, TruePositions
from kvweave.recipes.prepare import WithNeighbours
from kvweave.recipes.recipe import Recipe, SelectedRows
from kvweave.recipes.request import Budget
from kvweave.recipes.shift import ShiftedRows
from kvweave.types import ModelFingerprint, Span, TokenizedPrompt

FIELD: Final = "kv_transfer_params.kvweave"
SALT: Final = "kvweave:"
"""What the `cache_salt` of every request begins with whose KV is not exact."""

DESCRIBE: Final = {"describe": True}
"""A field that asks what is served: the reply to `/v1/completions` then has a `Description` under `kvweave` and no choices."""

_KNOWN: Final = frozenset({"spans", "recipe", "ratio", "coverage", "user", "prepare", "previous", "model"})


@dataclass(frozen=True, slots=True)
class Description:
    """What a vLLM server with the plug-in says of itself.

    Attributes:
        version: of kvweave there.
        model: the fingerprint of the served model.
        context_tokens: the greatest length of a prompt with its answer.
    """

    version: str
    model: ModelFingerprint
    context_tokens: int

    @staticmethod
    def read(given: Mapping[str, Any]) -> "Description":
        """Return what `asdict` made a dictionary of; raises TypeError or KeyError for another one."""
        return Description(**{**given, "model": ModelFingerprint(**given["model"])})


class InvalidField(InvalidRequest):
    """A field of a request that cannot be honoured; `field` is its path in the body."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


@dataclass(frozen=True, slots=True)
class Task:
    """What a request asks of kvweave.

    Attributes:
        spans: (start, end) of each chunk's tokens, in order.
        recipe: the recipe, over KV in whatever storage it is there.
        budget: how many stale tokens are recomputed.
        user: (start, end) of what the user wrote; None for all that follows the chunks.
        previous: None answers a prompt; a number prepares the last span, see above.
    """

    spans: tuple[tuple[int, int], ...]
    recipe: Recipe
    budget: Budget
    user: tuple[int, int] | None = None
    previous: int | None = None

    @property
    def exact(self) -> bool:
        """Whether all KV that the request leaves equals full attention's."""
        return self.previous is None and (
            not self.recipe.match.position_independent or self.budget.recomputes_all
        )

    @property
    def end(self) -> int:
        """The position after the last chunk, where the question starts."""
        return self.spans[-1][1] if self.spans else 0

    def first(self, count: int) -> "Task":
        """Return the task with its first `count` chunks alone."""
        return replace(self, spans=self.spans[:count])

    def prompt(self, token_ids: Sequence[int]) -> TokenizedPrompt:
        """Return the prompt as recipes see it; text between chunks is a chunk without stored KV. The question may be cut."""
        ids = tuple(token_ids)
        edges = [self.spans[0][0], *(edge for span in self.spans for edge in span)] if self.spans else [0]
        parts = [
            Span("chunk", start, end, number)
            for number, (start, end) in enumerate(pairwise(sorted(set(edges))))
        ]
        spans = (Span("system", 0, edges[0]), *parts, Span("question", self.end, len(ids)))
        start, end = self.user or (self.end, len(ids))
        user = (start, min(end, len(ids))) if start < len(ids) else (self.end, len(ids))
        return TokenizedPrompt(ids, spans, user)

    def salt(self, token_ids: Sequence[int], tenant: str = "") -> str:
        """Return the `cache_salt` that keeps vLLM from taking this request's KV for exact, or for another approximation.

        Without a selection KV depends on the text before it alone, so prompts that begin alike share their blocks.
        """
        if self.exact:
            return tenant
        said: list[object] = [self.recipe.name, tenant]
        if self.recipe.select.selective or self.previous is not None:
            budget = (self.budget.ratio, self.budget.coverage)
            said += [budget, self.spans, self.user, self.previous, digest_tokens(token_ids)]
        return SALT + blake2b(json.dumps(said).encode(), digest_size=16).hexdigest()


def read_task(params: Mapping[str, Any] | None, token_ids: Sequence[int]) -> Task | None:
    """Return the task of a request with these `kv_transfer_params`; None without a field `kvweave`.

    Raises InvalidField, naming the field.
    """
    given = (params or {}).get("kvweave")
    if given is None:
        return None
    if not isinstance(given, dict):
        raise InvalidField(FIELD, f"it is {given!r}; give an object with `spans` and a `recipe`")
    if unknown := sorted(given.keys() - _KNOWN):
        raise InvalidField(
            f"{FIELD}.{unknown[0]}", f"there is no such field; known are {', '.join(sorted(_KNOWN))}"
        )
    recipe = _recipe(given.get("recipe", "weave"))
    spans = _spans(given.get("spans", ()), token_ids)
    user = None if given.get("user") is None else _span(f"{FIELD}.user", given["user"], len(token_ids))
    if user is not None and spans and user[0] < spans[-1][1]:
        raise InvalidField(
            f"{FIELD}.user", f"it starts at {user[0]}, before the last chunk ends at {spans[-1][1]}"
        )
    previous = given.get("previous", 0) if given.get("prepare") else None
    if previous is not None and not (isinstance(previous, int) and 0 <= previous < max(1, len(spans))):
        raise InvalidField(
            f"{FIELD}.previous", f"it is {previous!r}; give a number of the {len(spans) - 1} other spans"
        )
    if previous is not None and any(step.across_chunks for step in preparation_steps(recipe)):
        raise InvalidField(
            f"{FIELD}.recipe", f"{recipe.name} prepares chunks together, which one request at a time cannot"
        )
    if previous is not None and not spans:
        raise InvalidField(f"{FIELD}.spans", "it is empty; the last span is the chunk to prepare")
    return Task(spans, recipe, _budget(recipe, given), user, previous)


def _recipe(name: object) -> Recipe:
    field = f"{FIELD}.recipe"
    if not isinstance(name, str):
        raise InvalidField(field, f"it is {name!r}; give a name such as weave")
    try:
        recipe = in_any_storage(recipe_named(name))
    except InvalidRequest as error:
        raise InvalidField(field, str(error)) from error
    in_place = (recipe.place, recipe.attend) == (TruePositions(), Causal())
    if not in_place or not isinstance(recipe.recompute, SelectedRows | ShiftedRows):
        raise InvalidField(
            field,
            f"{name} places or attends to KV in its own way, which vLLM's attention cannot; choose another recipe",
        )
    return recipe


def _budget(recipe: Recipe, given: Mapping[str, Any]) -> Budget:
    for name in ("ratio", "coverage"):
        value = given.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise InvalidField(f"{FIELD}.{name}", f"it is {value!r}; give a number between 0 and 1")
    try:
        budget = recipe.budget(given.get("ratio"), given.get("coverage"))
    except InvalidRequest as error:
        name = "coverage" if given.get("coverage") is not None else "ratio"
        raise InvalidField(f"{FIELD}.{name}", str(error)) from error
    if not recipe.select.selective and not (budget.recomputes_none or budget.recomputes_all):
        raise InvalidField(f"{FIELD}.ratio", f"{recipe.name} recomputes nothing or everything; give 0 or 1")
    if budget.coverage is not None and not recipe.select.supports_coverage:
        raise InvalidField(
            f"{FIELD}.coverage", f"the scores of {recipe.name} are no shares of a whole; give a ratio"
        )
    return budget


def _spans(given: object, token_ids: Sequence[int]) -> tuple[tuple[int, int], ...]:
    if not isinstance(given, list | tuple):
        raise InvalidField(f"{FIELD}.spans", f"it is {given!r}; give a list of [start, end]")
    spans: list[tuple[int, int]] = []
    for number, each in enumerate(given):
        field = f"{FIELD}.spans[{number}]"
        name = each[2] if isinstance(each, list | tuple) and len(each) == 3 else None
        start, end = _span(field, each if name is None else each[:2], len(token_ids))
        if spans and start < spans[-1][1]:
            raise InvalidField(
                field, f"it starts at {start}, before the span before it ends at {spans[-1][1]}"
            )
        if end >= len(token_ids):
            raise InvalidField(
                field, f"it ends with the prompt, at {end}; at least one token must follow the chunks"
            )
        if name is not None and name != digest_tokens(token_ids[start:end]):
            raise InvalidField(field, f"the tokens {start} … {end - 1} are not those of the chunk {name!r}")
        spans.append((start, end))
    return tuple(spans)


def _span(field: str, given: object, tokens: int) -> tuple[int, int]:
    if not (isinstance(given, list | tuple) and len(given) == 2 and all(type(each) is int for each in given)):
        raise InvalidField(field, f"it is {given!r}; give [start, end] in tokens")
    start, end = given
    if not 0 <= start < end <= tokens:
        raise InvalidField(
            field, f"it is [{start}, {end}]; give 0 ≤ start < end ≤ {tokens}, the tokens of the prompt"
        )
    return start, end


# Bodies of requests


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
