"""One run: two knowledge bases of the same documents, one of which predicts; people's questions to both; what was served.

Both go the product's way, and are asked in turn. The answers of the knowledge base without predictions are those of full
computation. People's questions are never shown to the model before they are asked.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from kvweave.engine.background.runner import BackgroundStopped
from kvweave.engine.background.status import PredictionStatus, idle_status
from kvweave.engine.knowledge_base import KnowledgeBase, open_knowledge_base
from kvweave.engine.state import Progress, no_progress
from kvweave.errors import InvalidRequest
from kvweave.files import write_atomically
from kvweave.results import Answer
from kvweave_lab.eval.metrics import f1, normalized
from kvweave_lab.eval.natural.prompts import MAX_NEW_TOKENS, instruction
from kvweave_lab.eval.natural.questions import UNANSWERABLE, Question, QuestionSet
from kvweave_lab.results_log import ResultsLog

Arm = Literal["computed", "predicted"]
ARMS: Final[tuple[Arm, ...]] = ("computed", "predicted")

SAME_F1: Final = 0.5
"""A served answer is wrong if it has a lower F1 with the computed one."""

_VERSION: Final = 1
_PREDICTING: Final = ("abstract", "prediction")


@dataclass(frozen=True, slots=True)
class Request:
    """What to run.

    Attributes:
        documents: how many documents; the first ones that questions of the split are about, those that a question links together.
        predictions: questions that are predicted and answered ahead, at least; other wordings of them come on top.
        split: dev or test.
        limit: questions of people; None for all that the documents answer.
        examples: worked examples in the instruction, at most 3; 0 is the product's own instruction.
        settings: of both knowledge bases, such as the model.
    """

    documents: int
    predictions: int
    split: str = "dev"
    limit: int | None = None
    examples: int = 3
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PredictionOutcome:
    """One question of a person in one arm.

    Attributes:
        arm: computed or predicted.
        question: its id.
        text: the answer.
        origin: what the question whose stored answer was given was predicted from; None if the answer was computed.
        served_by: that question; empty as before.
        ready: whether no token of a chunk had to be computed from nothing.
        exact: share of the chunks' tokens whose KV was exact; 1 for an answer that was served.
        seconds: until the answer was there.
        contains: whether the answer contains one of the set's.
    """

    arm: Arm
    question: str
    text: str
    origin: str | None
    served_by: str
    ready: bool
    exact: float
    seconds: float
    contains: bool


@dataclass(frozen=True, slots=True)
class Figures:
    """What all questions say.

    Attributes:
        questions: how many were asked in each arm.
        served: share that got the answer of a predicted question, and `served_by_origin` of which kind.
        ready: share whose chunk KV was all there, by arm; served ones included.
        wrong: share of all questions that got an answer which is not the computed one.
        contains: share of answers that contain one of the set's, by arm.
        mean_s: mean seconds, by arm.
        idle_s, idle_flops: idle work of the predicting arm.
        predictions: what each kind of prediction is worth, and `dropped` why questions were dropped.
    """

    questions: int
    served: float
    served_by_origin: dict[str, int]
    ready: dict[str, float]
    wrong: float
    contains: dict[str, float]
    mean_s: dict[str, float]
    idle_s: float
    idle_flops: float
    predicted: dict[str, int]
    predictions: dict[str, PredictionStatus]
    dropped: dict[str, int]
    summaries_dropped: dict[str, int]


class PredictionLog(ResultsLog[tuple[str, str], PredictionOutcome]):
    """The outcomes by arm and question; raises as ResultsLog does."""

    def __init__(self, folder: Path, run_config: Mapping[str, Any]) -> None:
        super().__init__(
            folder,
            run_config,
            file="prediction.jsonl",
            version=_VERSION,
            key=lambda outcome: (outcome.arm, outcome.question),
            parse=lambda content: PredictionOutcome(**content),
        )


def choose(content: QuestionSet, request: Request) -> tuple[list[str], list[Question]]:
    """Return the names of the documents and the questions that they answer.

    Raises InvalidRequest if no question of the split is about so few documents.
    """
    own = [each for each in content.questions if each.split == request.split and each.kind != UNANSWERABLE]
    names: dict[str, None] = {}
    for question in own:
        linked = dict.fromkeys(evidence.doc for evidence in question.evidence)
        if len(names | linked) <= request.documents:
            names |= linked
    asked = [each for each in own if each.evidence and {one.doc for one in each.evidence} <= names.keys()]
    if not asked:
        raise InvalidRequest(
            f"no question of the split {request.split!r} is about {request.documents} documents or fewer; name more "
            "--documents or another --split"
        )
    return list(names), asked[: request.limit]


def run(
    content: QuestionSet, request: Request, folder: Path, progress: Progress = no_progress
) -> tuple[Figures, list[PredictionOutcome]]:
    """Run or resume it in a folder; raises InvalidRequest for a folder of another run, and as `choose`."""
    names, asked = choose(content, request)
    with PredictionLog(folder, _configuration(names, request)) as log, ExitStack() as opened:
        bases = {
            arm: opened.enter_context(closing(_open(arm, names, content, request, folder, progress)))
            for arm in ARMS
        }
        if any(log.get(("predicted", question.id)) is None for question in asked):
            _predict(bases["predicted"], request.predictions, progress)
        outcomes: list[PredictionOutcome] = []
        for number, question in enumerate(asked):
            progress("questions", number, len(asked))
            # In turn, and each one first as often as the other: the machine's load changes.
            for arm in ARMS if number % 2 == 0 else reversed(ARMS):
                outcomes.append(_asked(bases[arm], arm, question, log))
        progress("questions", len(asked), len(asked))
        return _figures(outcomes, bases["predicted"]), outcomes


def _configuration(names: Sequence[str], request: Request) -> dict[str, Any]:
    return {
        "documents": list(names),
        "predictions": request.predictions,
        "split": request.split,
        "examples": request.examples,
        "settings": {name: str(value) for name, value in request.settings.items()},
    }


def _open(
    arm: Arm, names: Sequence[str], content: QuestionSet, request: Request, folder: Path, progress: Progress
) -> KnowledgeBase:
    """Return the knowledge base of an arm with the documents in it."""
    for name in names:
        path = folder / "documents" / name
        if not path.exists():
            write_atomically(path, [content.documents[name].encode()])
    settings: dict[str, Any] = {"max_new_tokens": MAX_NEW_TOKENS, "idle_power": "any", **request.settings}
    system = instruction(request.examples)
    if system is not None:
        settings["system"] = system
    base = open_knowledge_base(arm, home=folder / "home", **settings)
    try:
        base.add(folder / "documents", progress=progress)
    except BaseException:
        base.close()
        raise
    return base


def _predict(base: KnowledgeBase, most: int, progress: Progress) -> None:
    """Do idle work until so many questions are predicted and answered, or nothing is left to do."""

    def until(kind: str, done: int, total: int) -> None:
        waiting = base.answers.pending(1, ("predicted", "prefilled"))
        if kind in _PREDICTING and _predicted(base) >= most and not waiting:
            raise BackgroundStopped
        progress(kind, done, total)

    base.idle(until)


def _predicted(base: KnowledgeBase) -> int:
    """Return how many questions were predicted, without other wordings of them."""
    kept = base.predictions.predicted.totals().predicted
    return sum(number for origin, number in kept.items() if origin != "paraphrase")


def _asked(base: KnowledgeBase, arm: Arm, question: Question, log: PredictionLog) -> PredictionOutcome:
    """Return the outcome of a question; ask it if the log lacks it."""
    outcome = log.get((arm, question.id))
    if outcome is None:
        answer = base.ask(question.text)
        if (
            arm == "computed" and answer.plan.cache_hit is not None
        ):  # of an earlier question that reads the same
            answer = base.ask(question.text, cache="refresh")
        outcome = _outcome(arm, question, answer, base.predictions.predicted.origin_of)
        log.add(outcome)
    return outcome


def _outcome(
    arm: Arm, question: Question, answer: Answer, origin_of: Callable[[str], str | None]
) -> PredictionOutcome:
    hit = answer.plan.cache_hit
    chunks = [span for span in answer.plan.spans if span.kind == "chunk"]
    tokens = sum(span.tokens for span in chunks)
    exact = sum(span.tokens for span in chunks if span.origin == "exact")
    said = normalized(answer.text)
    return PredictionOutcome(
        arm,
        question.id,
        answer.text,
        None if hit is None else origin_of(hit.question) or "asked",
        "" if hit is None else hit.question,
        all(span.origin != "fresh" for span in chunks),
        exact / tokens if tokens else 1.0,
        answer.timing.total_s,
        any(normalized(each) in said for each in question.answers),
    )


def _figures(outcomes: Sequence[PredictionOutcome], base: KnowledgeBase) -> Figures:
    by_arm = {arm: [each for each in outcomes if each.arm == arm] for arm in ARMS}
    computed = {each.question: each.text for each in by_arm["computed"]}
    served = [each for each in by_arm["predicted"] if each.origin not in (None, "asked")]
    wrong = [each for each in served if not is_same(each.text, computed[each.question])]
    number, status = len(by_arm["predicted"]), idle_status(base)
    origins = [each.origin or "" for each in served]
    return Figures(
        number,
        len(served) / number,
        {origin: origins.count(origin) for origin in dict.fromkeys(origins)},
        {arm: _mean([float(each.ready) for each in own]) for arm, own in by_arm.items()},
        len(wrong) / number,
        {arm: _mean([float(each.contains) for each in own]) for arm, own in by_arm.items()},
        {arm: _mean([each.seconds for each in own]) for arm, own in by_arm.items()},
        status.spent.seconds,
        status.spent.flops,
        base.predictions.predicted.totals().predicted,
        status.predictions,
        status.dropped,
        status.summaries_dropped,
    )


def is_same(served: str, computed: str) -> bool:
    """Return whether a served answer is the computed one: the same words but for articles and signs, or an F1 of SAME_F1."""
    return normalized(served) == normalized(computed) or f1(served, computed) >= SAME_F1


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
