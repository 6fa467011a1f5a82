"""Measures the most that 60 predictions could serve: a reader predicts, whose answers are right.

    .venv/bin/python lab/experiments/reader_predictions.py --output lab/results/reader_predictions.json

`reader_questions.jsonl` has six questions to each of the documents of `kvweave eval prediction --split test`. Each has two other wordings, a
right answer and the words of the document that it stands in. The author had read the documents and none of the set's questions.
Afterwards it was judged by reading which of the set's questions ask for the same (`asked_by`), and which for another part of the same
statement (`turned`); an answer that is served is right if the question is in the first list.

The questions are stored as kvweave stores predicted ones, with the passages that a search finds for them, and are looked up with its own
code. Beside that: two measures that need no judgement, and what predictions would meet that are drawn evenly from the documents.
"""

import json
import math
import re
import statistics
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from experiment import (
    add_model,
    argument_parser,
    command_of,
    environment,
    rounded,
    run_script,
    write_result,
)
from kvweave.answer_cache.matching import ENGLISH
from kvweave.answer_cache.records import Vector
from kvweave.answering.cached_answers import CachedAnswers, provenance
from kvweave.config import AnswersConfig, read_config
from kvweave.knowledge_base import KnowledgeBase
from kvweave.options import AskOptions
from kvweave_lab.eval.natural.questions import Question, QuestionSet, shipped_set
from kvweave_lab.eval.prediction.run import Request, choose
from kvweave_lab.eval.prediction.systems import contains
from kvweave_lab.statistics import wilson_interval

PREDICTIONS: Final = Path(__file__).with_name("reader_questions.jsonl")
DOCUMENTS, CHUNK_TOKENS, TOP_K = 10, 160, 5
TARGET: Final = 0.15
COSINES: Final = (0.85, 0.8, 0.75, 0.7, 0.65, 0.6)
SETTINGS: Final = AskOptions("reuse", TOP_K)
_FEWEST_WORDS: Final = 4  # of a sentence

Cosines = NDArray[np.float32]
"""(questions, stored wordings)."""


@dataclass(frozen=True, slots=True)
class Predicted:
    """A predicted question about `doc`: its other wordings, its answer, which stands in `quote`, and the ids of those that ask it."""

    doc: str
    question: str
    others: Sequence[str]
    answer: str
    quote: str
    asked_by: Sequence[str]
    turned: Sequence[str]

    @property
    def wordings(self) -> tuple[str, ...]:
        return (self.question, *self.others)


def read_predictions() -> list[Predicted]:
    """Return the reader's questions."""
    return [Predicted(**json.loads(line)) for line in PREDICTIONS.read_text("utf-8").splitlines()]


@dataclass(frozen=True, slots=True)
class Served:
    """A question of the set, the stored one whose answer it got, whether that asks the same, and whether the answer has the right words."""

    question: str
    served_by: str
    right: bool
    contains: bool


def served_by(question: Question, text: str, by_text: dict[str, Predicted]) -> Served:
    """Return the outcome for a question that is answered from the stored question with these words."""
    each = by_text[text]
    return Served(question.id, text, question.id in each.asked_by, contains(each.answer, question))


class ReadersBase(KnowledgeBase):
    """A knowledge base in which a reader's questions are stored."""

    def store_answers(self, predicted: Sequence[Predicted], wordings: int) -> None:
        """Store so many wordings of each question, with its answer, in place of all that is stored."""
        self.answers.clear()
        index, documents = self._components.index, self._state.documents
        texts = [(text, each.answer) for each in predicted for text in each.wordings[:wordings]]
        vectors = self.encoder.encode([text for text, _ in texts])
        with self.answers.transaction():
            for (text, answer), vector in zip(texts, vectors, strict=True):
                found = index.search(text, vector, TOP_K, documents.visible_versions())
                self.answers.put(
                    text, vector, SETTINGS, answer, [], provenance(found, self.answers.epoch), asked=False
                )

    def cached(self) -> CachedAnswers:
        """Return the answer cache as requests see it."""
        documents, threshold = self._state.documents, self.config.answers.answer_threshold
        return CachedAnswers(self.answers, documents, lambda: self._components.index, threshold)


def served(
    asked: Sequence[Question], vectors: Sequence[Vector], cached: CachedAnswers, by_text: dict[str, Predicted]
) -> list[Served]:
    """Return which questions get a stored answer."""
    found = [
        (question, cached.find(question.text, lambda vector=vector: vector, SETTINGS))  # type: ignore[misc]
        for question, vector in zip(asked, vectors, strict=True)
    ]
    return [served_by(question, answer.question, by_text) for question, answer in found if answer is not None]


def nearest(
    asked: Sequence[Question],
    cosines: Cosines,
    texts: Sequence[str],
    by_text: dict[str, Predicted],
    threshold: float,
) -> list[Served]:
    """Return the nearest stored question of each question within τ, the rule of PerCache and others."""
    best = cosines.argmax(axis=1)
    return [
        served_by(question, texts[place], by_text)
        for question, place, row in zip(asked, best, cosines, strict=True)
        if row[place] >= threshold
    ]


def right_pairs(
    asked: Sequence[Question], cosines: Cosines, texts: Sequence[str], predicted: Sequence[Predicted]
) -> dict[str, Any]:
    """Return of each question that was predicted, with the wording that is most like it, the cosine and what the matcher says."""
    said: Counter[str] = Counter()
    found = []
    threshold = AnswersConfig().answer_threshold
    for question, row in zip(asked, cosines, strict=True):
        own = [text for each in predicted if question.id in each.asked_by for text in each.wordings]
        if not own:
            continue
        values = {text: float(row[texts.index(text)]) for text in own}
        compared = [ENGLISH.compare(question.text, text, values[text], threshold) for text in own]
        order = ("same", "near", "different")
        said[min((each.sameness for each in compared), key=order.index)] += 1
        found.append(max(values.values()))
    return {
        "matcher_says": dict(said),
        "median_cosine": statistics.median(found),
        "within_threshold": sum(each >= threshold for each in found),
    }


def share(count: int, of: int) -> dict[str, Any]:
    """Return a count with its share and Wilson's 95 % interval."""
    estimate = wilson_interval(count, of)
    return {"count": count, "share": estimate.value, "share_interval": [estimate.low, estimate.high]}


def row(found: Sequence[Served], of: int) -> dict[str, Any]:
    right = sum(each.right for each in found)
    return {
        "right": share(right, of),
        "wrong": share(len(found) - right, of),
        "right_words": share(sum(each.contains for each in found), of),
        "served": [asdict(each) for each in found],
    }


def sentences(text: str) -> Iterator[tuple[int, int]]:
    """Yield the places of a text's sentences, of at least _FEWEST_WORDS words; a line ends one."""
    for found in re.finditer(r"[^\n]+?(?:[.!?](?=\s)|$)", text, re.MULTILINE):
        if len(found[0].split()) >= _FEWEST_WORDS:
            yield found.span()


def drawn_evenly(content: QuestionSet, names: Sequence[str], asked: Sequence[Question]) -> dict[str, Any]:
    """Return how many questions of people would meet predictions about evenly drawn sentences, if each asked what people ask of its sentence.

    A question of the set is met where a sentence with any part of its evidence is drawn: at most that is served.
    """
    places = [(name, *span) for name in names for span in sentences(content.documents[name])]
    hits = [sum(rests_on(question, *place) for place in places) for question in asked]

    def met(draws: int) -> float:
        missed = (math.comb(len(places) - each, draws) / math.comb(len(places), draws) for each in hits)
        return 1 - statistics.fmean(missed)

    return {
        "sentences": len(places),
        "share_met": met(60),
        "draws_for_target": next(n for n in range(1, len(places)) if met(n) >= TARGET),
    }


def measured(base: ReadersBase, content: QuestionSet, predicted: Sequence[Predicted]) -> dict[str, Any]:
    """Return all figures; the documents are in the knowledge base."""
    names, asked = choose(content, Request(DOCUMENTS, len(predicted), "test"))
    by_id = {each.id: each for each in asked}
    for each in predicted:
        assert content.documents[each.doc].count(each.quote) == 1, each.quote
        assert {*each.asked_by, *each.turned} <= by_id.keys(), each.question
    expected = {id_ for each in predicted for id_ in each.asked_by}
    turned = {id_ for each in predicted for id_ in each.turned} - expected
    same_answer = {
        question.id
        for question in asked
        for each in predicted
        if each.doc in {one.doc for one in question.evidence} and contains(each.answer, question)
    }
    quotes = [
        (each.doc, content.documents[each.doc].index(each.quote), len(each.quote)) for each in predicted
    ]
    overlap = {
        question.id
        for question in asked
        if any(rests_on(question, doc, start, start + length) for doc, start, length in quotes)
    }
    by_text = {text: each for each in predicted for text in each.wordings}
    vectors = base.encoder.encode([each.text for each in asked])
    rows = []
    for wordings in (1, len(predicted[0].wordings)):
        base.store_answers(predicted, wordings)
        texts = [text for each in predicted for text in each.wordings[:wordings]]
        cosines = vectors @ base.encoder.encode(texts).T
        found = {"at once": served(asked, vectors, base.cached(), by_text)}
        for least in COSINES:
            found[f"cosine {least:.2f}"] = nearest(asked, cosines, texts, by_text, least)
        rows += [{"stored": len(texts), "way": name, **row(each, len(asked))} for name, each in found.items()]
    kinds = dict.fromkeys(each.kind for each in asked)
    return {
        "questions": len(asked),
        "predictions": len(predicted),
        "expected": share(len(expected), len(asked)),
        "turned": share(len(turned), len(asked)),
        "predictions_asked": sum(bool(each.asked_by) for each in predicted),
        "same_answer_in_the_document": share(len(same_answer), len(asked)),
        "evidence_overlaps": share(len(overlap), len(asked)),
        "either": share(len(same_answer | overlap), len(asked)),
        "expected_without_either": sorted(expected - same_answer - overlap),
        "expected_by_kind": {
            kind: [
                sum(each.kind == kind and each.id in expected for each in asked),
                sum(each.kind == kind for each in asked),
            ]
            for kind in kinds
        },
        "right_pairs": right_pairs(asked, cosines, texts, predicted),
        "drawn_evenly": drawn_evenly(content, names, asked),
        "rows": rows,
    }


def rests_on(question: Question, doc: str, start: int, end: int) -> bool:
    """Return whether any of a question's evidence stands in this part of a document."""
    return any(one.doc == doc and start < one.end and one.start < end for one in question.evidence)


def main() -> None:
    """Store the reader's questions, look the set's up, and write the result."""
    parser = argument_parser(__doc__)
    add_model(parser)
    options = parser.parse_args()
    content = shipped_set()
    predicted = read_predictions()
    names, _ = choose(content, Request(DOCUMENTS, len(predicted), "test"))
    with tempfile.TemporaryDirectory() as folder:
        files = Path(folder) / "documents"
        files.mkdir()
        for name in names:
            (files / name).write_text(content.documents[name], encoding="utf-8")
        config = read_config(Path(folder) / "home", model=options.model, chunk_tokens=CHUNK_TOKENS)
        with ReadersBase("documents", config) as base:
            base.add(files, wait=False)
            found = measured(base, content, predicted)
    write_result({**environment(command_of(options)), **rounded(found)}, options.output)


if __name__ == "__main__":
    run_script(main)
