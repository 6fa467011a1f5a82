"""Sends a prompt to vLLM and hands on the tokens of the reply."""

import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from kvweave.config import GenerationConfig
from kvweave.errors import EngineError, EngineUnavailable
from kvweave.kvstore.keys import digest_tokens
from kvweave.kvstore.kv_store import KVStore
from kvweave.recipes.context import StoreEntry
from kvweave.recipes.recipe import Recipe
from kvweave.remote.client import Event
from kvweave.remote.fields import answering, decoding
from kvweave.remote.model import RemoteModel, as_engine
from kvweave.results import Plan, PlanSpan, Timing
from kvweave.types import USUAL_TAGS, ReplyFormat, Span, TokenizedPrompt

_ID: Final = "token_id:"


class RemoteToken(NamedTuple):
    """A token of a reply; if the request asked for them, its log probability and the likeliest tokens with theirs."""

    id: int
    logprob: float | None = None
    likeliest: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)
class RemoteAnswer:
    """A reply that vLLM has begun, as `PrefillResult`; `tokens` yields it and ends vLLM's work when it is closed.

    Attributes:
        finish: why vLLM ended the reply; None until then.
        completion_tokens: as vLLM counts them; None if the reply was ended here.
        cached_tokens: how many first tokens of the prompt vLLM did not schedule; None if it does not say.
    """

    model: RemoteModel
    recipe: Recipe
    coverage: float | None
    prompt: TokenizedPrompt
    prepared: frozenset[int]
    events: Generator[Event, None, None]
    timing: Timing = field(default_factory=Timing)
    finish: str | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    new_entries: tuple[StoreEntry, ...] = ()
    selected: None = None
    scores: None = None
    cost: None = None
    _first: list[RemoteToken] = field(default_factory=list)

    def begin(self) -> None:
        """Wait for the first tokens; raises as `RemoteModel.stream`."""
        began = time.perf_counter()
        while not self._first and self.finish is None and (event := next(self.events, None)) is not None:
            self._first = self._read(event)
        seconds = time.perf_counter() - began
        self.timing = Timing(recompute_s=seconds, ttft_s=seconds, total_s=seconds)

    def tokens(self) -> Generator[RemoteToken, None, None]:
        """Yield the reply's tokens, those that end it included; raises as `RemoteModel.stream`."""
        try:
            yield from self._first
            for event in self.events:
                yield from self._read(event)
        finally:
            self.events.close()

    @property
    def plan(self) -> Plan:
        """How the prompt got its KV, as far as it is known here: which chunks were prepared, and what vLLM reports."""
        budget = self.recipe.budget(None, self.coverage)
        spans = tuple(self._span(number, span) for number, span in enumerate(self.prompt.spans))
        return Plan(self.recipe.name, budget.ratio, spans, budget.coverage)

    def _span(self, number: int, span: Span) -> PlanSpan:
        cached = self.cached_tokens
        reused = number in self.prepared and (cached is None or span.end <= cached)
        if reused:
            reason = "prepared by vLLM, which does not say how many of its tokens it recomputed"
        elif span.kind == "question":
            reason = "the question is always computed"
        else:
            reason = "computed by vLLM, or in its prefix cache"
        return PlanSpan(
            span.kind, span.start, span.end, "reused" if reused else "fresh", 0, reason, span.chunk
        )

    def _read(self, event: Event) -> list[RemoteToken]:
        if isinstance(usage := event.get("usage"), dict):
            self.completion_tokens = usage.get("completion_tokens")
            self.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        found = []
        for choice in event.get("choices", ()):
            ids = choice.get("token_ids")
            if ids is None:
                raise EngineError(f"vLLM at {self.model.place} returns no token_ids; it may be too old")
            found += _tokens(ids, choice.get("logprobs"))
            self.finish = choice.get("finish_reason") or self.finish
        if self.finish not in (None, "stop", "length"):
            raise EngineUnavailable(f"vLLM at {self.model.place} gave the answer up ({self.finish})")
        return found


def ask(
    model: RemoteModel,
    store: KVStore,
    recipe: Recipe,
    prompt: TokenizedPrompt,
    generation: GenerationConfig,
    most: int,
    ends: frozenset[int],
    coverage: float | None = None,
) -> RemoteAnswer:
    """Send a prompt and return the reply once its first token is there.

    Args:
        store: has notes of the chunks that were prepared.
        recipe: with its budget as its own ratio, or `coverage` instead.
        most: the most tokens of the reply.
        ends: the tokens at which the model ends a reply.

    Raises as `RemoteModel.stream`; InvalidField for a recipe or a budget that vLLM cannot run.
    """
    budget = recipe.budget(None, coverage)
    ratio = budget.ratio if budget.coverage is None else None
    # Exact prefixes are left to vLLM's own cache.
    sent = prompt if recipe.match.position_independent else _without_chunks(prompt)
    digest = model.fingerprint.digest
    body: dict[str, Any] = {
        **answering(sent, recipe.name, ratio=ratio, coverage=budget.coverage, model=digest),
        **decoding(generation, most, ends, stops=_thinks_never(prompt.reply)),
    }
    prepared = frozenset(_prepared(model, store, recipe, prompt))
    answer = RemoteAnswer(model, recipe, coverage, prompt, prepared, model.stream(body))
    answer.begin()
    return answer


def _thinks_never(form: ReplyFormat) -> bool:
    """Whether no reply begins with thoughts: these may spell a stop text, which ends the answer alone."""
    return form.thoughts == "none" or (form.thoughts == "tagged" and form.tags == USUAL_TAGS)


def _without_chunks(prompt: TokenizedPrompt) -> TokenizedPrompt:
    return TokenizedPrompt(prompt.token_ids, (), prompt.user_rows, prompt.reply)


def _prepared(model: RemoteModel, store: KVStore, recipe: Recipe, prompt: TokenizedPrompt) -> Sequence[int]:
    """Return the numbers of the chunk spans that were sent to be prepared."""
    chunks = [number for number, span in enumerate(prompt.spans) if span.kind == "chunk" and span.tokens]
    notes, prefix = recipe.prepare.extractors, prompt.ids(prompt.spans[0])
    if not (notes and recipe.match.position_independent):
        return []
    wanted = []
    for number in chunks:
        ids = prompt.ids(prompt.spans[number])
        wanted.append((digest_tokens(ids), notes[0].provenance(as_engine(model), prefix, len(ids))))
    stored = store.has_many(model.fingerprint, wanted, "note")
    return [number for number, is_stored in zip(chunks, stored, strict=True) if is_stored]


def _tokens(ids: Sequence[int], logprobs: Any) -> list[RemoteToken]:
    if not logprobs:
        return [RemoteToken(token) for token in ids]
    found = []
    for token, own, others in zip(ids, logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True):
        ranked = sorted(others.items(), key=lambda pair: -pair[1])
        likeliest = tuple((int(name.removeprefix(_ID)), value) for name, value in ranked)
        found.append(RemoteToken(token, own, likeliest))
    return found
