"""Calibration: compares cheaper and cheaper budgets with full attention on questions to a knowledge base's own documents.

It runs in steps; background work does one at a time: each question under every remaining budget, then the KV that the chosen budget
needs, in batches of chunks, then the result. What a step has found is stored, so an interrupted calibration continues. A change of
the documents makes it start over.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal, TypeAlias

from kvweave.answering.kb_question import tokenized_prompt_for
from kvweave.answering.settings import Settings
from kvweave.background.budget_trials import BudgetTrials, Reply, counted_rows
from kvweave.background.precompute import prepare_context
from kvweave.config import GenerationConfig
from kvweave.errors import InvalidRequest
from kvweave.files import try_lock
from kvweave.index.documents import ListedChunk
from kvweave.options import AskOptions
from kvweave.recipes.candidates import Candidate
from kvweave.recipes.names import EXACT
from kvweave.recipes.offline import missing_bytes, prepare_chunks
from kvweave.recipes.recipe import Recipe
from kvweave.state.calibration_results import (
    MIN_QUESTIONS,
    AutoRecipe,
    CalibrationResult,
    MeasuredQuestion,
    chosen,
)
from kvweave.state.components import Components
from kvweave.state.knowledge_base_state import KnowledgeBaseState, Progress
from kvweave.types import TokenizedPrompt

MOST_QUESTIONS: Final = 24
"""The most questions of a calibration: those asked last, then those predicted last. With so many, the 95 % interval of a share is 0.02
to either side at least."""
ANSWER_TOKENS: Final = 32
"""How many tokens of an answer are compared: all of it if it is shorter."""

_BATCH_CHUNKS: Final = 64
_ASKED_AGAIN: Final = 64
_FULL: Final = "full"

Origin: TypeAlias = Literal["asked", "predicted", "given"]


@dataclass(frozen=True, slots=True)
class Step:
    """One unit of calibration work.

    Attributes:
        stage: the kind of work, of which `done` of `total` units are done.
        about: what the unit is about, for the progress line.
        do: does it.
    """

    stage: str
    about: str
    done: int
    total: int
    do: Callable[[], None]


class Calibrator:
    """Calibrates one knowledge base for its settings, in one run; close it. Loads the model when a step first needs it.

    `given` are questions to take in place of those asked and predicted.
    """

    def __init__(
        self,
        state: KnowledgeBaseState,
        components: Components,
        settings: Settings,
        given: Sequence[str] | None = None,
    ) -> None:
        assert settings.auto is not None
        self._state, self._components, self._settings = state, components, settings
        self._auto: AutoRecipe = settings.auto
        self._system = self._auto.conditions()["system"]
        self._given = given
        self._unprepared: list[ListedChunk] | None = None
        self._unprepared_for = ""  # the recipe's name
        self._prepared = 0
        self._epoch = state.answers.epoch
        self._budgets = BudgetTrials(state, settings.config)

    def questions(self) -> dict[str, Origin]:
        """Return the questions that a calibration would use: asked ones first, then predicted ones."""
        if self._given is not None:
            return dict.fromkeys(self._given, "given")
        predictions = self._state.predictions
        asked = reversed(predictions.history.recent(MOST_QUESTIONS))
        predicted = predictions.predicted.latest(4 * MOST_QUESTIONS)
        found: dict[str, Origin] = dict.fromkeys(asked, "asked")
        for each in predicted:
            if each.dropped is None:
                found.setdefault(each.question, "predicted")
        return dict(list(found.items())[:MOST_QUESTIONS])

    def next_if_needed(self) -> Step | None:
        """Return the next step; None if no calibration is needed, or too few questions are known."""
        return self.next() if self._auto.now().needed else None

    def next(self) -> Step | None:
        """Return the next step; None if too few questions are known. Loads no model to measure another question."""
        if self._epoch != self._state.answers.epoch:
            self.close()  # nothing of a removed document may stay there
            self._unprepared, self._prepared, self._epoch = None, 0, self._state.answers.epoch
        questions = self.questions()
        if len(questions) < MIN_QUESTIONS:
            return None
        conditions, total = self._auto.conditions(), len(questions)
        measured = self._auto.table.measured(conditions)
        known = [measured[question] for question in questions if question in measured]
        alive = self._budgets.alive([each.budgets for each in known])
        todo = [question for question in questions if question not in measured] if alive else []
        if todo:
            return Step(
                "measuring questions",
                todo[0],
                total - len(todo),
                total,
                partial(self.measure, todo[0], alive, conditions),
            )
        return self._finish(questions, known)

    def run(self, progress: Progress) -> CalibrationResult:
        """Take all steps; raises InvalidRequest if too few questions are known."""
        began_s = time.time()
        while (step := self.next()) is not None:
            progress(step.stage, step.done, step.total)
            step.do()
            progress(step.stage, step.done + 1, step.total)
            result = self._auto.now().result
            if result is not None and result.made_at_s >= began_s:
                return result
        known, source = len(self.questions()), "given" if self._given is not None else "known"
        raise InvalidRequest(
            f"{known} questions are {source}, and a calibration needs {MIN_QUESTIONS}: ask more, let `kvweave idle` predict some, "
            "or give them with --questions FILE"
        )

    def close(self) -> None:
        """Delete the KV of trials; closing twice is fine."""
        self._budgets.close()

    # Steps

    def measure(self, question: str, alive: Sequence[Candidate], conditions: dict[str, str]) -> None:
        """Put one question to the model under full attention and under each budget; store what they kept of it."""
        began, epoch = time.perf_counter(), self._state.answers.epoch
        context = self._components.request_context()
        prompt, options = self._prompt(question)
        with counted_rows(context.adapter) as counted:
            full = Reply.of(context.adapter, self._budgets.store, prompt, options)
            found = {each.key: self._budgets.compare(context, each, prompt, full) for each in alive}
        passes = counted[0] / (context.adapter.geometry.layers * prompt.tokens)
        measured = MeasuredQuestion(found, time.perf_counter() - began, passes)
        with self._state.database.transaction():
            if self._state.answers.epoch == epoch:
                self._auto.table.add_measured(conditions, question, measured)

    def _finish(self, questions: dict[str, Origin], measured: Sequence[MeasuredQuestion]) -> Step:
        """Return the step that prepares what the chosen budget needs, or stores the result."""
        trials = self._budgets.trials([each.budgets for each in measured])
        best = chosen(trials)
        winner = None if best is None else self._budgets.candidates[trials.index(best)]
        if winner is not None:
            left = self._chunks_to_prepare(winner.recipe)
            if left:
                batch, done = left[:_BATCH_CHUNKS], self._prepared
                return Step(
                    "preparing chunks",
                    winner.recipe.name,
                    done,
                    done + len(left),
                    partial(self._prepare, batch, winner.recipe),
                )
        origins = list(questions.values())
        result = CalibrationResult(
            EXACT if winner is None else winner.recipe.name,
            None if winner is None else winner.ratio,
            0.0 if winner is None else winner.recipe.ratio,
            self._components.model.fingerprint.name,
            self._settings.config.calibration.calibrate_tokens,
            origins.count("asked"),
            origins.count("predicted"),
            origins.count("given"),
            time.time(),
            sum(each.seconds for each in measured),
            sum(each.passes for each in measured) / max(1, len(measured)),
            tuple(trials),
        )
        return Step("storing the result", result.recipe, 0, 1, partial(self._decide, result, self._epoch))

    def _decide(self, result: CalibrationResult, epoch: int) -> None:
        """Store the result, unless the documents have changed since `epoch`; questions then wait for an answer by it."""
        before = self._settings.options()
        with self._state.database.transaction():
            if self._state.answers.epoch != epoch:
                return
            self._auto.table.put(self._auto.conditions(), result)
        after = self._settings.options()
        if before.cacheable and before.cache_key() != after.cache_key():
            self._queue(before, after)

    def _queue(self, before: AskOptions, after: AskOptions) -> None:
        """Queue predicted questions, and the most used of those that have an answer, for one under other options."""
        answers, key = self._state.answers, before.cache_key()
        waiting = answers.pending(most=10_000, reasons=("predicted", "prefilled"))
        predicted = [each.question for each in waiting if each.options.cache_key() == key]
        asked = [question for question, options in answers.most_used() if options.cache_key() == key]
        asked = asked[:_ASKED_AGAIN]
        if not predicted and not asked:
            return
        vectors = dict(
            zip((*predicted, *asked), self._components.encoder.encode([*predicted, *asked]), strict=True)
        )
        with answers.transaction():
            for question in predicted:
                answers.delete([question], before)
                answers.add_predicted(question, vectors[question], after)
            for question in asked:
                answers.add_asked(question, vectors[question], after)

    # What steps need

    def _prompt(self, question: str) -> tuple[TokenizedPrompt, AskOptions]:
        """Return the prompt of a plain question, and its options."""
        context, options = self._components.request_context(), self._options()
        vector = context.encoder.encode([question])[0]
        return tokenized_prompt_for(context, question, vector, options), options

    def _options(self) -> AskOptions:
        """Return the options of a plain question under the settings; its answer is greedy, and cut."""
        own = self._settings.config.generation
        most = min(own.max_new_tokens or ANSWER_TOKENS, ANSWER_TOKENS)
        return self._settings.options(
            self._system,
            recipe=_FULL,
            drop_chunks=True,
            cache="off",
            generation=GenerationConfig(max_new_tokens=most, think=own.think),
        )

    def _chunks_to_prepare(self, recipe: Recipe) -> list[ListedChunk]:
        """Return the chunks that lack what the recipe needs and that this run has not prepared.

        Only those that the store has room for, where it may evict what was never asked for.
        """
        if self._unprepared is None or self._unprepared_for != recipe.name:
            self._unprepared_for, self._prepared = recipe.name, 0
            rows = list({row.kv_digest: row for row in self._state.documents.all_chunks()}.values())
            asked = [(row.kv_digest, row.kv_tokens) for row in rows]
            store, self._unprepared = self._state.store, []
            room = store.limit_bytes - store.used_bytes + store.unused_bytes
            ctx = prepare_context(self._components.request_context(), self._system)
            for number, size in missing_bytes(ctx, asked, recipe).items():
                if size <= room:
                    room -= size
                    self._unprepared.append(rows[number])
        return self._unprepared

    def _prepare(self, batch: Sequence[ListedChunk], recipe: Recipe) -> None:
        context = self._components.request_context()
        texts = context.index.texts([row.row_id for row in batch])
        chunks = [context.adapter.template.chunk_ids(text) for text in texts.values()]
        prepare_chunks(prepare_context(context, self._system), chunks, recipe)
        self._unprepared = (self._unprepared or [])[len(batch) :]
        self._prepared += len(batch)


def calibrate(
    state: KnowledgeBaseState,
    components: Components,
    settings: Settings,
    questions: Sequence[str] | None,
    progress: Progress,
) -> CalibrationResult:
    """Calibrate now, the judge of questions first; raises as `KnowledgeBase.calibrate`, except for an empty knowledge base."""
    state.database.check_writable()
    with try_lock(state.idle_lock) as free:
        if not free:
            raise InvalidRequest(
                "another process calibrates this knowledge base or does its background work; try again when it has ended"
            )
        judge = components.judge if settings.config.answers.answer_error_bound else None
        if judge is not None:
            judge.fit(progress)
        with closing(Calibrator(state, components, settings, questions)) as calibrator:
            return calibrator.run(progress)
