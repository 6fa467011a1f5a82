"""Measures how well the reference model writes questions, summaries and next questions.

    .venv/bin/python lab/experiments/abilities.py --output lab/results/abilities.json

Notes are generated like prompts of the evaluation, from the `test` split: its names, values, phrases and natural text are
not in the training data. They are as long as the notes in such a request of `kvweave idle`. A question counts as answered
if the model's answer, over the same notes, is what they say about the name in the question.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from experiment import (
    argument_parser,
    command_of,
    dtype_and_device,
    environment,
    plain_answer,
    run_script,
    write_result,
)
from kvweave.background.prompts import ReferencePrompts
from kvweave.models.adapter import Adapter
from kvweave.models.loading import load_model
from kvweave_lab.eval.documents import Draft, sentences
from kvweave_lab.eval.evaluation import token_count
from kvweave_lab.eval.metrics import METRICS
from kvweave_lab.eval.samples import SampleSpec, draw_context
from kvweave_lab.eval.tasks import METRIC_OF
from kvweave_lab.eval.world import Haystack
from kvweave_lab.statistics import interval_over_tasks

SPLIT = "test"
SETTING = SampleSpec(SPLIT, seed=0, context_tokens=256, chunk_tokens=96)
TASKS = ("multikey", "multivalue", "coref", "contradiction", "vartrack")
"""Tasks whose documents have several names, so that questions about different names exist."""
MAX_NEW_TOKENS = 160

_WORD = re.compile(r"\w+")
Reply = Callable[[str], str]


@dataclass(frozen=True, slots=True)
class Notes:
    """One context: its chunks, the names and values drawn for it, and the draft with its statements and questions."""

    task: str
    chunks: tuple[str, ...]
    names: frozenset[str]
    draft: Draft

    @property
    def facts(self) -> list[str]:
        """The sentences that state facts, as opposed to natural text."""
        return [text for piece in self.draft.pieces for text in sentences(piece)]


@dataclass(frozen=True, slots=True)
class QuestionScore:
    """Whether a generated question names something in the notes, and whether its answer is correct; 0..1."""

    about_notes: float
    answered: float


@dataclass(frozen=True, slots=True)
class SummaryScore:
    """The share of the facts in a generated summary, and the share of its sentences in the notes; 0..1."""

    facts_kept: float
    true_to_notes: float


@dataclass(frozen=True, slots=True)
class NextQuestionScore(QuestionScore):
    """The scores of a question generated from earlier ones, and whether it names something else; 0..1."""

    another: float


def draw_notes(task: str, number: int, count: Callable[[str], int], haystack: Haystack) -> Notes:
    """Return the notes with this number, the same in every run."""
    world, draft, chunks = draw_context(task, f"abilities/{task}/{SPLIT}/{number}", SETTING, count, haystack)
    return Notes(task, tuple(chunk.text for chunk in chunks), frozenset(world.drawn), draft)


def score_question(notes: Notes, question: str, reply: Reply) -> QuestionScore:
    """Return the scores of a generated question."""
    names = names_in(notes, question)
    if not names or not question.rstrip().endswith("?"):
        return QuestionScore(0.0, 0.0)
    metric = METRICS[METRIC_OF[notes.task]]
    possible = [one for one in notes.draft.questions if names_in(notes, one.text) == names]
    answer = reply(question) if possible else ""
    return QuestionScore(1.0, max((metric(answer, one.answers) for one in possible), default=0.0))


def score_summary(notes: Notes, text: str) -> SummaryScore:
    """Return the scores of a generated summary."""
    written = [sentence for sentence in re.split(r"(?<=[.!?])\s+", text.strip()) if sentence]
    context = " ".join(notes.chunks)
    return SummaryScore(
        sum(fact in text for fact in notes.facts) / len(notes.facts),
        sum(sentence in context for sentence in written) / len(written) if written else 0.0,
    )


def score_next_question(
    notes: Notes, earlier: Sequence[str], question: str, reply: Reply
) -> NextQuestionScore:
    """Return the scores of a question generated from earlier ones."""
    scores = score_question(notes, question, reply)
    names = names_in(notes, question)
    another = bool(names) and all(names != names_in(notes, one) for one in earlier)
    return NextQuestionScore(**asdict(scores), another=float(another))


def names_in(notes: Notes, text: str) -> frozenset[str]:
    """Return the names and values of the notes that occur in a text."""
    return notes.names & {*_WORD.findall(text)}


def measure(adapter: Adapter, samples: int) -> dict[str, Any]:
    """Return for each kind of request the mean scores over tasks, with intervals, and the number of prompts."""
    prompts, haystack, count = ReferencePrompts(), Haystack.of_split(SPLIT), token_count(adapter)
    scores: dict[str, dict[str, list[Mapping[str, float]]]] = {"ask": {}, "sum_up": {}, "ask_like": {}}
    for task in TASKS:
        for number in range(samples):
            notes = draw_notes(task, number, count, haystack)
            reply = partial(plain_answer, adapter, chunks=notes.chunks, max_new_tokens=MAX_NEW_TOKENS)
            own: dict[str, Any] = {
                "ask": score_question(notes, reply(prompts.predict_from_documents(1).text), reply),
                "sum_up": score_summary(notes, reply(prompts.summarise().text)),
            }
            questions = [one.text for one in notes.draft.questions if one.task in (task, f"{task}_whole")]
            if len(questions) > prompts.earlier_questions:
                earlier = questions[: prompts.earlier_questions]
                request = prompts.predict_from_history(earlier, 1).text
                own["ask_like"] = score_next_question(notes, earlier, reply(request), reply)
            for name, one in own.items():
                scores[name].setdefault(task, []).append(asdict(one))
    return {name: _shares(by_task) for name, by_task in scores.items()}


def _shares(by_task: Mapping[str, Sequence[Mapping[str, float]]]) -> dict[str, Any]:
    columns = next(iter(by_task.values()))[0]
    return {
        "prompts": sum(map(len, by_task.values())),
        "tasks": list(by_task),
        "shares": {
            name: asdict(interval_over_tasks([[one[name] for one in part] for part in by_task.values()]))
            for name in columns
        },
    }


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--samples", type=int, default=100, help="notes of each kind")
    args = parser.parse_args()
    adapter = load_model()
    result = {
        "split": SPLIT,
        "context_tokens": SETTING.context_tokens,
        "digest": adapter.fingerprint.digest,
        **dtype_and_device(adapter),
        "requests": measure(adapter, args.samples),
        **environment(command_of(args)),
    }
    write_result(result, args.output)


if __name__ == "__main__":
    run_script(main)
