"""What the model learns to do besides answering: ask about notes, sum them up, go on in the style of earlier questions."""

import random

from kvweave_lab.eval.draft import Question
from training.documents import Document

ASK = "Which question do these notes answer?"
SUM_UP = "What is the key content of these notes?"
ASK_LIKE = "Earlier questions: {earlier} Which question could be next?"

NAMES = ("ask", "sum_up", "ask_like")

_ASKED, _SUMMED_UP, _ASKED_LIKE = 0.24, 0.48, 0.24  # how often, where the document can answer it
_MOST_FACTS = 6


def questions(rng: random.Random, document: Document) -> list[Question]:
    """Some of the three kinds of request that this document can answer."""
    requests: list[Question] = []
    asked = [question for question in document.questions if question.task != "commonwords"]
    if asked and rng.random() < _ASKED:
        requests.append(Question("ask", ASK, (), rng.choice(asked).text))
    if document.facts and len(document.facts) <= _MOST_FACTS and rng.random() < _SUMMED_UP:
        requests.append(Question("sum_up", SUM_UP, (), " ".join(_in_order(document))))
    by_task: dict[str, list[Question]] = {}
    for question in asked:
        by_task.setdefault(question.task, []).append(question)
    alike = [group for group in by_task.values() if len(group) >= 2]
    if alike and rng.random() < _ASKED_LIKE:
        first, *others = rng.sample(group := rng.choice(alike), min(3, len(group)))
        earlier = " ".join(question.text for question in others)
        requests.append(Question("ask_like", ASK_LIKE.format(earlier=earlier), (), first.text))
    return requests


def _in_order(document: Document) -> list[str]:
    text = " ".join(document.chunks)
    return sorted(document.facts, key=text.find)
