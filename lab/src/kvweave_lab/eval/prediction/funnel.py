"""How many of the set's questions are left after each stage between a prediction and a served answer.

A question of the set counts as *predicted* if a kept prediction has one of the set's answers to it, from its document. That is an upper
bound by words: of a reader's predictions 37 of 115 questions had one, and 33 were asked by it (lab/docs/answer-cache.md). Nothing is
computed for the set's questions themselves, except that the judge scores the pairs which the guard lets pass.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from kvweave.answering.cached_answers import CachedAnswers
from kvweave.config import default_home
from kvweave.knowledge_base import KnowledgeBase
from kvweave.recipes.methods import recipe_named
from kvweave.recipes.names import AUTO
from kvweave.recipes.prepare import NotPrepared
from kvweave.state.judge import Judge, JudgeFit, JudgeFits
from kvweave.state.knowledge_base_state import Progress, no_progress
from kvweave_lab.eval.natural.questions import Question
from kvweave_lab.eval.prediction.systems import Chunks, Prediction, Prefixes, contains
from kvweave_lab.eval.question_judging import BOUNDS

COSINES: Final = (0.6, 0.7, 0.85)


@dataclass(frozen=True, slots=True)
class Passage:
    """How far a question of the set comes.

    Attributes:
        question: its id.
        predicted: a kept prediction whose answer is right; empty without one.
        nearest: the prediction whose vector is nearest, dropped ones included, and `cosine` how near.
        matched: the stored question that the matcher takes for the same or the guard lets pass; empty without one.
        sure: whether it is served without a judge.
        right: whether its answer is one of the set's.
        held: whether the best passages for the question hold that answer.
        score: the judge's, of a pair that it was asked about.
        published: whether the answer of `nearest`, which PerCache gives, is right; None below its threshold.
        ready: share of the chunks' tokens whose KV the predicted prompts left, in PerCache.
    """

    question: str
    predicted: str
    nearest: str
    cosine: float
    matched: str = ""
    sure: bool = False
    right: bool = False
    held: bool = False
    score: float | None = None
    published: bool | None = None
    ready: float = 0.0

    def is_served(self, least: float | None) -> bool:
        """Return whether kvweave serves the stored answer where its judge must give at least this score, None without a judge."""
        return self.sure or (least is not None and self.score is not None and self.score >= least)


@dataclass(frozen=True, slots=True)
class ServedRow:
    """What a system serves: its name, the questions with a right and with a wrong answer, the share whose KV was all ready."""

    system: str
    right: int
    wrong: int
    ready: float


@dataclass(frozen=True, slots=True)
class Funnel:
    """The stages: how many of the set's `questions` are left, and how many of these have the right answer.

    Attributes:
        predicted: with a kept prediction that has the right answer.
        within: with a prediction within each cosine, dropped ones included.
        matched: with a stored question that the matcher or the guard lets pass, `held` those whose passages hold its answer.
        auc: of the judge on the pairs that ship; None if it was not needed.
        rows: what is served: nothing, PerCache as published, kvweave under each bound on errors.
        passages: all questions.
    """

    questions: int
    predicted: int
    within: dict[str, int]
    matched: int
    matched_right: int
    held: int
    held_right: int
    auc: float | None
    rows: tuple[ServedRow, ...]
    passages: tuple[Passage, ...]


def funnel(
    base: KnowledgeBase,
    asked: Sequence[Question],
    predictions: Sequence[Prediction],
    unscreened: Callable[[str], str],
    prompt: Callable[[str], Chunks],
    progress: Progress = no_progress,
) -> Funnel:
    """Return the funnel of a knowledge base that has predicted and was not asked anything yet.

    `unscreened` returns the answer to a prediction that was dropped, `prompt` the chunks that a question is answered from. The judge is
    fitted only if a pair comes to it, and the fit is kept in the usual home folder.
    """
    own, threshold = base.answers.most_used(), base.config.answers.answer_threshold
    index, options = base.components.index, own[0][1] if own else None
    cached = CachedAnswers(base.answers, base.state.documents, lambda: index, threshold, error_bound=1.0)
    judge = Judge(base.adapter, default_home())
    vectors = base.encoder.encode([each.question for each in predictions]) if predictions else None
    left, fits = Prefixes(prompt(each.question) for each in predictions), list[JudgeFit]()

    def passage(question: Question) -> Passage:
        (vector,) = base.encoder.encode([question.text])
        cosines = [] if vectors is None else list(map(float, vectors @ vector))
        cosine = max(cosines, default=0.0)
        nearest = predictions[cosines.index(cosine)] if cosines else None
        published = None
        if nearest is not None and cosine >= threshold:
            text = unscreened(nearest.question) if nearest.answer is None else nearest.answer
            published = contains(text, question)
        docs = {Path(evidence.doc).name for evidence in question.evidence}
        made = Passage(
            question.id,
            next((each.question for each in predictions if _is_right(each, question, docs)), ""),
            nearest.question if nearest else "",
            cosine,
            published=published,
            ready=left.found(prompt(question.text)) if published is None else 1.0,
        )
        if options is None:
            return made
        stored = cached.find(question.text, lambda: vector, options)
        if stored is not None:
            right = contains(stored.text, question)
            return replace(made, matched=stored.question, sure=True, right=right, held=True)
        near = base.answers.near(question.text, lambda: vector, options)
        if near is None:
            return made
        if not fits:
            fits.append(judge.fit(progress))
        held = cached.near(question.text, lambda: vector, options, fits[0]) is not None
        score = judge.score(near.question, question.text) if held else None
        right = contains(near.text, question)
        return replace(made, matched=near.question, right=right, held=held, score=score)

    found = []
    for number, question in enumerate(asked):
        progress("funnel", number, len(asked))
        found.append(passage(question))
    progress("funnel", len(asked), len(asked))
    if fits:  # for the questions that are asked afterwards
        JudgeFits(base.config.home).put(base.adapter.fingerprint.digest, fits[0])
    return _funnel(found, fits[0] if fits else None, _is_prepared(base))


def _is_prepared(base: KnowledgeBase) -> bool:
    """Return whether all chunks have KV that the recipe reuses at any place."""
    name = base.config.recipe
    anywhere = name == AUTO or not isinstance(recipe_named(name).prepare, NotPrepared)
    return anywhere and base.missing_kv() == 0


def _is_right(prediction: Prediction, question: Question, docs: set[str]) -> bool:
    """Return whether a kept prediction has one of the set's answers, found in one of these documents."""
    answer = prediction.answer
    return answer is not None and contains(answer, question) and not docs.isdisjoint(prediction.documents)


def _funnel(found: Sequence[Passage], fit: JudgeFit | None, prepared: bool) -> Funnel:
    matched, held = ([each for each in found if getattr(each, name)] for name in ("matched", "held"))
    published = [each.published for each in found if each.published is not None]
    ready = sum(each.ready == 1 for each in found) / len(found)
    rows = [
        ServedRow("nothing predicted", 0, 0, 0.0),
        ServedRow("PerCache as published", published.count(True), published.count(False), ready),
    ]
    for bound in BOUNDS:
        least = None if fit is None else fit.threshold(bound)
        served = [each.right for each in found if each.is_served(least)]
        rows.append(
            ServedRow(
                f"kvweave {bound:g}", served.count(True), served.count(False), 1.0 if prepared else ready
            )
        )
    return Funnel(
        len(found),
        sum(bool(each.predicted) for each in found),
        {f"{least:g}": sum(each.cosine >= least for each in found) for least in COSINES},
        len(matched),
        sum(each.right for each in matched),
        len(held),
        sum(each.right for each in held),
        None if fit is None or not fit.pairs else fit.auc,
        tuple(rows),
        tuple(found),
    )
