"""What the reference model writes when it is asked for questions, for key content and for a next question.

    .venv/bin/python lab/experiments/abilities.py --output lab/results/abilities.json

Notes are drawn as the evaluation draws prompts, from the `test` split: names, values, phrases and natural text that training
never saw. They are as long as `kvweave idle` puts in front of such a request. A question counts as answered where the model,
asked it over the same notes, gives what the notes say about the name that it asks about.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from answered import answer
from kvweave.models.adapter import Adapter
from kvweave.models.loading import load_model
from kvweave.predict.prompts import ReferencePrompts
from kvweave_lab.eval.draft import Draft, sentences
from kvweave_lab.eval.evaluation import token_count
from kvweave_lab.eval.haystack import Haystack
from kvweave_lab.eval.metrics import METRICS
from kvweave_lab.eval.samples import Setting, written
from kvweave_lab.eval.statistics import interval_over_tasks
from kvweave_lab.eval.tasks import METRIC_OF
from measured import arguments, circumstances, command_of, computed_with, keep, started

SPLIT = "test"
SETTING = Setting(SPLIT, seed=0, context_tokens=256, chunk_tokens=96)
ABOUT = ("multikey", "multivalue", "coref", "contradiction", "vartrack")
"""Tasks whose documents have several names, so that there are questions about several of them."""
MOST_NEW_TOKENS = 160

_WORD = re.compile(r"\w+")
Reply = Callable[[str], str]


@dataclass(frozen=True, slots=True)
class Notes:
    """One context: its chunks, the names and values drawn for it, and all that it says and can be asked."""

    task: str
    chunks: tuple[str, ...]
    names: frozenset[str]
    draft: Draft

    @property
    def facts(self) -> list[str]:
        """The sentences that are not natural text."""
        return [text for piece in self.draft.pieces for text in sentences(piece)]


@dataclass(frozen=True, slots=True)
class Asked:
    """A written question: whether it names something of the notes, and whether what it gets for an answer is right."""

    about_notes: float
    answered: float


@dataclass(frozen=True, slots=True)
class SummedUp:
    """Written key content: the share of the facts that it has, and the share of its sentences that the notes have."""

    facts_kept: float
    true_to_notes: float


@dataclass(frozen=True, slots=True)
class NextAsked(Asked):
    """A question written after earlier ones, and whether it is about something else than they are."""

    another: float


def drawn(task: str, number: int, count: Callable[[str], int], haystack: Haystack) -> Notes:
    """The notes of a number, the same in every run."""
    world, draft, laid = written(task, f"abilities/{task}/{SPLIT}/{number}", SETTING, count, haystack)
    return Notes(task, tuple(chunk.text for chunk in laid), frozenset(world.drawn), draft)


def asked(notes: Notes, question: str, reply: Reply) -> Asked:
    """What becomes of a written question."""
    names = named(notes, question)
    if not names or not question.rstrip().endswith("?"):
        return Asked(0.0, 0.0)
    metric = METRICS[METRIC_OF[notes.task]]
    possible = [one for one in notes.draft.questions if named(notes, one.text) == names]
    answer = reply(question) if possible else ""
    return Asked(1.0, max((metric(answer, one.answers) for one in possible), default=0.0))


def summed_up(notes: Notes, text: str) -> SummedUp:
    """How much of the facts stands in a text, and how much of the text in the notes."""
    parts = [part for part in re.split(r"(?<=[.!?])\s+", text.strip()) if part]
    context = " ".join(notes.chunks)
    return SummedUp(
        sum(fact in text for fact in notes.facts) / len(notes.facts),
        sum(part in context for part in parts) / len(parts) if parts else 0.0,
    )


def next_asked(notes: Notes, earlier: Sequence[str], question: str, reply: Reply) -> NextAsked:
    """What becomes of a question written after earlier ones."""
    found = asked(notes, question, reply)
    names = named(notes, question)
    another = bool(names) and all(names != named(notes, one) for one in earlier)
    return NextAsked(**asdict(found), another=float(another))


def named(notes: Notes, text: str) -> frozenset[str]:
    """The names and values drawn for the notes that a text has."""
    return notes.names & {*_WORD.findall(text)}


def measure(adapter: Adapter, samples: int) -> dict[str, Any]:
    """Every request's shares, means over tasks with intervals, and how many prompts are behind them."""
    wording, haystack, count = ReferencePrompts(), Haystack.of_split(SPLIT), token_count(adapter)
    found: dict[str, dict[str, list[Mapping[str, float]]]] = {"ask": {}, "sum_up": {}, "ask_like": {}}
    for task in ABOUT:
        for number in range(samples):
            notes = drawn(task, number, count, haystack)
            reply = partial(answer, adapter, chunks=notes.chunks, max_new_tokens=MOST_NEW_TOKENS)
            made: dict[str, Any] = {
                "ask": asked(notes, reply(wording.from_knowledge(1)), reply),
                "sum_up": summed_up(notes, reply(wording.sum_up())),
            }
            own = [one.text for one in notes.draft.questions if one.task in (task, f"{task}_whole")]
            if len(own) > wording.earlier_questions:
                earlier = own[: wording.earlier_questions]
                request = wording.from_history(earlier, 1)
                made["ask_like"] = next_asked(notes, earlier, reply(request), reply)
            for name, one in made.items():
                found[name].setdefault(task, []).append(asdict(one))
    return {name: _shares(by_task) for name, by_task in found.items()}


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
    parser = arguments(__doc__)
    parser.add_argument("--samples", type=int, default=100, help="notes of each kind")
    args = parser.parse_args()
    adapter = load_model()
    result = {
        "split": SPLIT,
        "context_tokens": SETTING.context_tokens,
        "digest": adapter.fingerprint.digest,
        **computed_with(adapter),
        "requests": measure(adapter, args.samples),
        **circumstances(command_of(args)),
    }
    keep(result, args.output)


if __name__ == "__main__":
    started(main)
