"""One run: three knowledge bases of the same documents, one of which predicts; the set's questions to all; what was served.

All go the product's way, and are asked in turn: kvweave without predictions, kvweave with them, and the recipe that reuses
exact prefixes alone (RAGCache's reuse). Other systems differ from the last only in which stored answers they give, so they
are derived from its answers and from the same predictions (`systems.py`). The set's questions are never shown to the model before they
are asked. An interrupted run resumes, in idle work too: what is predicted is the knowledge base's own.
"""

import json
import math
import shutil
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal

from kvweave.answer_cache.predictions import PredictedQuestion
from kvweave.answer_cache.records import CachedAnswer
from kvweave.errors import InvalidRequest
from kvweave.files import write_atomically
from kvweave.knowledge_base import KnowledgeBase, open_knowledge_base
from kvweave.results import Answer
from kvweave.state.active_requests import BackgroundStopped
from kvweave.state.knowledge_base_state import Progress, no_progress
from kvweave_lab.eval.natural.prompts import MAX_NEW_TOKENS, instruction
from kvweave_lab.eval.natural.questions import UNANSWERABLE, Question, QuestionSet
from kvweave_lab.eval.prediction.funnel import Funnel, Passage, ServedRow, funnel
from kvweave_lab.eval.prediction.systems import (
    Chunks,
    Derivation,
    Prediction,
    Served,
    SystemFigures,
    contains,
    executed,
)
from kvweave_lab.results_log import ResultsLog

Arm = Literal["computed", "predicted", "prefix", "unscreened"]
ARMS: Final[tuple[Arm, ...]] = ("computed", "predicted", "prefix")
"""What is asked; `unscreened` are answers to predicted questions that kvweave has dropped and another system would give."""

_VERSION: Final = 2
_PREDICTING: Final = ("abstract", "prediction")
_BASE: Final = "documents"
_ALL: Final = 1_000_000
_PREDICTIONS: Final = "predictions.json"
_FUNNEL: Final = "funnel.json"
_NAMES: Final[dict[Arm, str]] = {"computed": "kvweave without predictions", "predicted": "kvweave"}


@dataclass(frozen=True, slots=True)
class Request:
    """What to run.

    Attributes:
        documents: how many documents; the first ones that questions of the split are about, those that a question links together.
        predictions: questions that are predicted and answered ahead, at least.
        split: dev or test.
        limit: questions of the set; None for all that the documents answer.
        examples: worked examples in the instruction, at most 3; 0 is the product's own instruction.
        settings: of both knowledge bases, such as the model.
        minutes: after so many, nothing else is predicted, answered or asked.
    """

    documents: int
    predictions: int
    split: str = "dev"
    limit: int | None = None
    examples: int = 3
    settings: Mapping[str, Any] = field(default_factory=dict)
    minutes: float = math.inf


@dataclass(frozen=True, slots=True)
class PredictionOutcome:
    """One question of a person in one arm.

    Attributes:
        arm: one of ARMS, or unscreened.
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
        questions: how many every arm was asked.
        funnel: what is left of the set's questions from prediction to answer.
        systems: each system's row.
        served_by_origin: questions that kvweave answered from predictions, by what these were predicted from.
        idle_s, idle_flops: idle work by kind.
        predicted: questions that were kept, by origin; `dropped` why others were not, and `summaries_dropped` likewise.
        median_cosine, greatest_cosine: of a person's question and the nearest predicted one, dropped ones included.
    """

    questions: int
    funnel: Funnel
    systems: tuple[SystemFigures, ...]
    served_by_origin: dict[str, int]
    idle_s: dict[str, float]
    idle_flops: dict[str, float]
    predicted: dict[str, int]
    dropped: dict[str, int]
    summaries_dropped: dict[str, int]
    median_cosine: float
    greatest_cosine: float


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
) -> tuple[Figures, list[PredictionOutcome], list[Served], list[Prediction]]:
    """Run or resume it in a folder, as far as it comes in `request.minutes`; raises InvalidRequest for a folder of another run.

    Raises as `choose` too.

    Returns the figures, what the arms answered, what the derived systems served, and what was predicted.
    """
    names, asked = choose(content, request)
    ends = time.monotonic() + 60 * request.minutes
    with PredictionLog(folder, _configuration(names, request)) as log, ExitStack() as opened:
        base_of = _opener(names, content, request, folder, progress, opened)
        predicting = base_of("predicted")
        predictions = _predictions(predicting, request.predictions, folder / _PREDICTIONS, ends, progress)

        def unscreened(question: str) -> str:
            return _asked(predicting, "unscreened", Question(question, question, (), "", (), ""), log).text

        def prompt(question: str) -> Chunks:
            said = predicting.prompt(question)
            spans = predicting.model.template.render(said).spans
            return list(zip(said.chunks, (span.tokens for span in spans[1:-1]), strict=True))

        path = folder / _FUNNEL  # of before the first question was asked
        if path.exists():
            content_of = json.loads(path.read_text(encoding="utf-8"))
            rows = tuple(ServedRow(**each) for each in content_of.pop("rows"))
            passages = tuple(Passage(**each) for each in content_of.pop("passages"))
            left = Funnel(**content_of, rows=rows, passages=passages)
        else:
            left = funnel(predicting, asked, predictions, unscreened, prompt, progress)
            if (folder / _PREDICTIONS).exists():
                write_atomically(path, [json.dumps(asdict(left), indent=1).encode()])
        outcomes: list[PredictionOutcome] = []
        done = 0
        for number, question in enumerate(asked):
            if time.monotonic() >= ends or not path.exists():
                break
            progress("questions", number, len(asked))
            # In turn, and each one first as often as the others: the machine's load changes.
            first = number % len(ARMS)
            for arm in (*ARMS[first:], *ARMS[:first]):
                outcomes.append(_asked(base_of(arm), arm, question, log))
            done = number + 1
        figures, served = _figures(asked[:done], outcomes, predictions, predicting, left, unscreened, prompt)
        return figures, outcomes, served, predictions


def _configuration(names: Sequence[str], request: Request) -> dict[str, Any]:
    return {
        "documents": list(names),
        "predictions": request.predictions,
        "split": request.split,
        "examples": request.examples,
        "settings": {name: str(value) for name, value in request.settings.items()},
    }


def _opener(
    names: Sequence[str],
    content: QuestionSet,
    request: Request,
    folder: Path,
    progress: Progress,
    opened: ExitStack,
) -> Callable[[Arm], KnowledgeBase]:
    """Return a function that returns an arm's knowledge base with the documents in it; each is opened once, to be closed with `opened`.

    Each has a model of its own in memory.
    """
    for name in names:
        path = folder / "documents" / name
        if not path.exists():
            write_atomically(path, [content.documents[name].encode()])
    settings: dict[str, Any] = {"max_new_tokens": MAX_NEW_TOKENS, "idle_power": "any", **request.settings}
    system = instruction(request.examples)
    if system is not None:
        settings["system"] = system

    def added(arm: Arm, **others: Any) -> KnowledgeBase:
        base = open_knowledge_base(_BASE, home=folder / arm, **{**settings, **others})
        try:
            base.add(folder / "documents", progress=progress)
        except BaseException:
            base.close()
            raise
        return base

    if not (folder / "predicted").exists():
        added("computed").close()  # the other one has the same KV, which is computed once
        partly = folder / "predicted-partly"
        shutil.rmtree(partly, ignore_errors=True)
        shutil.copytree(folder / "computed", partly)
        partly.rename(folder / "predicted")
    others: dict[Arm, dict[str, Any]] = {"computed": {}, "predicted": {}, "prefix": {"recipe": "prefix"}}
    return cache(lambda arm: opened.enter_context(closing(added(arm, **others[arm]))))


def _predictions(
    base: KnowledgeBase, most: int, path: Path, ends: float, progress: Progress
) -> list[Prediction]:
    """Do the idle work before the first question, and return its predictions and answers; write them if it was finished in time."""
    if path.exists():
        return [Prediction(**each) for each in json.loads(path.read_text(encoding="utf-8"))]
    finished = _predict(base, most, ends, progress)
    answers = {
        question: found
        for question, own in base.answers.most_used()
        if (found := base.answers.stored(question, own)) is not None
    }
    made = [_prediction(each, answers.get(each.question)) for each in base.predictions.predicted.latest(_ALL)]
    if finished:
        write_atomically(path, [json.dumps([asdict(each) for each in made], indent=2).encode()])
    return made


def _prediction(made: PredictedQuestion, answer: CachedAnswer | None) -> Prediction:
    if answer is None:
        return Prediction(made.question, made.origin, made.dropped, None)
    documents = sorted({Path(source.document).name for source in answer.sources})
    return Prediction(made.question, made.origin, made.dropped, answer.text, documents)


def _predict(base: KnowledgeBase, most: int, ends: float, progress: Progress) -> bool:
    """Do idle work until so many questions are predicted and those that were kept are answered, or nothing is left to do.

    Returns False if the time `ends` came first.
    """
    late = False

    def until(kind: str, done: int, total: int) -> None:
        nonlocal late
        made, waiting = _predicted(base), base.answers.pending(1, ("predicted", "prefilled"))
        late = time.monotonic() >= ends
        if late or (kind in _PREDICTING and made >= most and not waiting):
            raise BackgroundStopped  # before the next round
        progress(f"{made} of {most} predicted; {kind}", done, total)

    base.idle(until)
    return not late


def _predicted(base: KnowledgeBase) -> int:
    """Return how many questions were predicted, dropped ones included."""
    return len(base.predictions.predicted.latest(_ALL))


def _origins(base: KnowledgeBase) -> dict[str, str]:
    """Return the origin of each predicted question."""
    return {each.question: each.origin for each in base.predictions.predicted.latest(_ALL)}


def _asked(base: KnowledgeBase, arm: Arm, question: Question, log: PredictionLog) -> PredictionOutcome:
    """Return the outcome of a question; ask it if the log lacks it."""
    outcome = log.get((arm, question.id))
    if outcome is None:
        answer = base.ask(question.text, cache="off" if arm == "unscreened" else "use")
        if arm in ("computed", "prefix") and answer.plan.cache_hit is not None:
            answer = base.ask(question.text, cache="refresh")  # an earlier question reads the same
        outcome = _outcome(arm, question, answer, _origins(base))
        log.add(outcome)
    return outcome


def _outcome(arm: Arm, question: Question, answer: Answer, origins: Mapping[str, str]) -> PredictionOutcome:
    hit = answer.plan.cache_hit
    chunks = [span for span in answer.plan.spans if span.kind == "chunk"]
    tokens = sum(span.tokens for span in chunks)
    exact = sum(span.tokens for span in chunks if span.origin == "exact")
    return PredictionOutcome(
        arm,
        question.id,
        answer.text,
        None if hit is None else origins.get(hit.question, "asked"),
        "" if hit is None else hit.question,
        all(span.origin != "fresh" for span in chunks),
        exact / tokens if tokens else 1.0,
        answer.timing.total_s,
        contains(answer.text, question),
    )


def _figures(
    asked: Sequence[Question],
    outcomes: Sequence[PredictionOutcome],
    predictions: Sequence[Prediction],
    base: KnowledgeBase,
    left: Funnel,
    unscreened: Callable[[str], str],
    prompt: Callable[[str], Chunks],
) -> tuple[Figures, list[Served]]:
    cosines = [each.cosine for each in left.passages]
    by_arm = {arm: {each.question: each for each in outcomes if each.arm == arm} for arm in ARMS}
    computed = {id_: each.text for id_, each in by_arm["computed"].items()}
    status, spent = base.idle_status(), base.background_budget.totals()
    threshold = base.config.answers.answer_threshold
    origins = [
        each.origin or "" for each in by_arm["predicted"].values() if each.origin not in (None, "asked")
    ]
    own, rows = list[SystemFigures](), list[SystemFigures]()
    served: list[Served] = []
    if asked:
        encode = base.encoder.encode
        derived = Derivation(
            asked, by_arm["prefix"], computed, predictions, encode, threshold, unscreened, prompt
        )
        rows, served = derived.systems(spent)
        own = [
            executed(_NAMES[arm], asked, by_arm[arm], computed, spent if arm == "predicted" else {})
            for arm in _NAMES
        ]
    return Figures(
        len(asked),
        left,
        (*own, *rows),
        {origin: origins.count(origin) for origin in dict.fromkeys(origins)},
        {kind: each.seconds for kind, each in spent.items()},
        {kind: each.flops for kind, each in spent.items()},
        base.predictions.predicted.totals().predicted,
        status.dropped,
        status.summaries_dropped,
        statistics.median(cosines),
        max(cosines),
    ), served
