"""Requests besides questions that the model learns: ask about notes, summarize them, and ask a next question."""

import random

from kvweave_lab.eval.documents import Question
from training.documents import Document

ASK = "Which question do these notes answer?"
SUM_UP = "What is the key content of these notes?"
ASK_LIKE = "Earlier questions: {earlier} Which question could be next?"

NAMES = ("ask", "sum_up", "ask_like")

_ASK_SHARE, _SUM_UP_SHARE, _ASK_LIKE_SHARE = 0.24, 0.48, 0.24  # of documents that allow the request
_MAX_FACTS = 6


def questions(rng: random.Random, document: Document) -> list[Question]:
    """Return some of the three kinds of request, of those that the document allows."""
    requests: list[Question] = []
    usable = [question for question in document.questions if question.task != "commonwords"]
    if usable and rng.random() < _ASK_SHARE:
        requests.append(Question("ask", ASK, (), rng.choice(usable).text))
    if document.facts and len(document.facts) <= _MAX_FACTS and rng.random() < _SUM_UP_SHARE:
        requests.append(Question("sum_up", SUM_UP, (), " ".join(_facts_in_order(document))))
    by_task: dict[str, list[Question]] = {}
    for question in usable:
        by_task.setdefault(question.task, []).append(question)
    groups = [group for group in by_task.values() if len(group) >= 2]
    if groups and rng.random() < _ASK_LIKE_SHARE:
        first, *others = rng.sample(group := rng.choice(groups), min(3, len(group)))
        earlier = " ".join(question.text for question in others)
        requests.append(Question("ask_like", ASK_LIKE.format(earlier=earlier), (), first.text))
    return requests


def _facts_in_order(document: Document) -> list[str]:
    text = " ".join(document.chunks)
    return sorted(document.facts, key=text.find)
