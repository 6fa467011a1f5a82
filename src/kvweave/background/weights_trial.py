"""Compares a knowledge base's model with the same model in fewer bits per weight, on questions to its documents.

Both get the same prompts and decode greedily: its own model under full attention, the other one under full attention and under each
budget. One other model is loaded at a time. Nothing that was found is stored before the verdict.
"""

import gc
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import torch

from kvweave.background.budget_trials import BudgetTrials, Reply
from kvweave.background.step import Step
from kvweave.errors import InvalidRequest, NotEnoughMemory
from kvweave.kvstore.memory_store import MemoryStore
from kvweave.models.adapter import Adapter
from kvweave.models.precision import BITS, WeightBits
from kvweave.models.quantised import held_bytes
from kvweave.options import AskOptions
from kvweave.recipes.methods import recipe_named
from kvweave.recipes.names import EXACT
from kvweave.state.calibration_results import Measured, Trial, chosen, summarised
from kvweave.state.components import Components
from kvweave.state.tried_weights import TriedWeights, WeightsTrial
from kvweave.types import TokenizedPrompt

_FULL: Final = "full"

PromptOf = Callable[[str], tuple[TokenizedPrompt, AskOptions]]
"""Returns a question's prompt, and the options of its answer."""


def fewer_bits(names: Sequence[str], own: str) -> tuple[WeightBits, ...]:
    """Return the named bits, each once, from the most to the fewest.

    `own` are the knowledge base's, auto before a model is recorded. Raises InvalidRequest for a name that is none, and for bits
    that are no fewer than its own: only fewer can save anything.
    """
    fewer = BITS[1:] if own == "auto" else BITS[BITS.index(own) + 1 :]
    for name in names:
        if name not in BITS[1:]:
            raise InvalidRequest(f"weights {name!r} cannot be tried; try {' or '.join(BITS[1:])}")
        if name not in fewer:
            left = f"try {' or '.join(fewer)}" if fewer else "there are no fewer to try"
            raise InvalidRequest(
                f"this knowledge base was made with --weights {own}, and {name} is no fewer bits; {left}"
            )
    return tuple(bits for bits in fewer if bits in names)


@dataclass(frozen=True, slots=True)
class _Expected:
    """A question's prompt and options, and the reply of the knowledge base's model."""

    prompt: TokenizedPrompt
    options: AskOptions
    reply: Reply


class WeightsTrials:
    """The trials of some bits, one question in each step; close it, which frees the model that is loaded for them.

    Args:
        components: has the knowledge base's model, and loads the others.
        bits: fewer than its own, from the most to the fewest.
        budgets: tried with these bits as well, as long as full attention with them keeps enough.
        prompt_of: gives the prompts.
    """

    def __init__(
        self,
        components: Components,
        bits: Sequence[WeightBits],
        budgets: BudgetTrials,
        prompt_of: PromptOf,
    ) -> None:
        self._components, self._bits, self._budgets, self._prompt_of = components, bits, budgets, prompt_of
        self._loaded: tuple[WeightBits, Adapter] | None = None
        self._questions: list[str] = []
        self._expected: dict[str, _Expected] = {}
        self._measured: dict[WeightBits, list[Mapping[str, Measured]]] = {}  # by budget; as the questions
        self._bytes: dict[WeightBits, int] = {}
        self.close()

    def next(self, questions: Iterable[str]) -> Step | None:
        """Return the next step; None if there is none left. The questions of the first call count until `close`."""
        self._questions = self._questions or list(questions)
        total = len(self._questions)
        for bits in self._bits:
            done = len(self._measured[bits])
            if done < total:
                question = self._questions[done]
                return Step(
                    f"trying {bits} weights", question, done, total, partial(self._put, bits, question)
                )
        return None

    def found(self) -> TriedWeights:
        """Return what was found, after the last step."""
        own = self._components.adapter
        trials = tuple(self._trial(bits) for bits in self._bits)
        return TriedWeights(own.fingerprint.weight_bits, held_bytes(own.model), trials)

    def close(self) -> None:
        """Free the model, and forget what was found; the next step begins anew."""
        self._free()
        self._questions, self._expected, self._bytes = [], {}, {}
        self._measured = {bits: [] for bits in self._bits}

    def _put(self, bits: WeightBits, question: str) -> None:
        """Put one question to the model with these bits, and to the knowledge base's own if that was not asked yet."""
        expected = self._expected.get(question) or self._ask(question)
        other, own = self._model(bits), expected.reply
        reply = _reply(other, expected.prompt, expected.options)
        full = Measured(reply.first_token == own.first_token, reply.text == own.text, 1.0, 0.0)
        measured, total = self._measured[bits], len(self._questions)
        found = {_FULL: full}
        if self._full_trial([*measured, found]).keeps:
            context = replace(self._components.request_context(), model=other)
            alive = self._budgets.alive(measured, total)
            found |= self._budgets.measure(context, alive, expected.prompt, expected.options, own)
            del context
        measured.append(found)
        if len(measured) == total:
            del other
            self._free()

    def _ask(self, question: str) -> _Expected:
        prompt, options = self._prompt_of(question)
        expected = _Expected(prompt, options, _reply(self._components.adapter, prompt, options))
        self._expected[question] = expected
        return expected

    def _model(self, bits: WeightBits) -> Adapter:
        if self._loaded is None or self._loaded[0] != bits:
            self._free()
            try:
                self._loaded = bits, self._components.load_with(bits)
            except NotEnoughMemory as error:  # its advice is about the one model of a command
                raise NotEnoughMemory(
                    f"{error.shortage}, beside the knowledge base's own model",
                    f"free memory, or leave out --try-weights {bits}",
                ) from error
            self._bytes[bits] = held_bytes(self._loaded[1].model)
        return self._loaded[1]

    def _free(self) -> None:
        if self._loaded is None:
            return
        on_gpu = self._loaded[1].geometry.device.type == "cuda"
        self._loaded = None
        gc.collect()  # a model's modules and hooks refer to each other
        if on_gpu:
            torch.cuda.empty_cache()

    def _full_trial(self, measured: Sequence[Mapping[str, Measured]]) -> Trial:
        """Return what full attention with some bits has kept."""
        losses = self._budgets.losses(len(self._questions))
        return summarised(_FULL, 1.0, 0, [each[_FULL] for each in measured], losses)

    def _trial(self, bits: WeightBits) -> WeightsTrial:
        measured, total = self._measured[bits], len(self._questions)
        full = self._full_trial(measured)
        best = chosen(self._budgets.trials(measured, total)) if full.keeps else None
        return WeightsTrial(
            bits,
            self._bytes[bits],
            total,
            full.first_tokens,
            full.answers,
            full.first_tokens_interval,
            full.answers_interval,
            full.keeps,
            EXACT if best is None else best.recipe,
            0.0 if best is None else best.budget,
        )


def _reply(adapter: Adapter, prompt: TokenizedPrompt, options: AskOptions) -> Reply:
    return Reply.of(adapter, MemoryStore(), recipe_named(_FULL), prompt, options)
