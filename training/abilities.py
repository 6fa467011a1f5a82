"""What the model learns to do besides answering: ask about notes, sum them up, go on in the style of earlier questions."""

import random

from kvweave.evaluation.draft import Question
from training.documents import Document

ASK = "Which question do these notes answer?"
SUM_UP = "What is the key content of these notes?"
ASK_LIKE = "Earlier questions: {earlier} Which question could be next?"

_SHARE = 0.12
_MOST_FACTS = 6


def questions(rng: random.Random, document: Document) -> list[Question]:
    """Some of the three kinds of request that this document can answer."""
    requests: list[Question] = []
    asked = [question for question in document.questions if not question.task.startswith("common")]
    if asked and rng.random() < _SHARE * 2:
        requests.append(Question("ask", ASK, (), rng.choice(asked).text))
    if document.facts and len(document.facts) <= _MOST_FACTS and rng.random() < _SHARE * 4:
        requests.append(Question("sum_up", SUM_UP, (), " ".join(_in_order(document))))
    by_task: dict[str, list[Question]] = {}
    for question in asked:
        by_task.setdefault(question.task, []).append(question)
    alike = [group for group in by_task.values() if len(group) >= 2]
    if alike and rng.random() < _SHARE * 2:
        first, *others = rng.sample(group := rng.choice(alike), min(3, len(group)))
        earlier = " ".join(question.text for question in others)
        requests.append(Question("ask_like", ASK_LIKE.format(earlier=earlier), (), first.text))
    return requests


def _in_order(document: Document) -> list[str]:
    text = " ".join(document.chunks)
    return sorted(document.facts, key=text.find)
