"""A user with notes, a tokenizer of words, what a session costs, and a count of computed rows."""

import hashlib
from contextlib import contextmanager

import numpy as np

from kvweave_lab.eval.personas.costs import Costs
from kvweave_lab.eval.personas.users import Note, Question, User

NOTES = tuple(
    Note(f"note-{number}.txt", text)
    for number, text in enumerate(
        (
            "The code of Ann is 12.",
            "The code of Ben is 34.",
            "The cat of Cleo is red.",
            "The dog of Dan is old.",
            "The hat of Eve is new.",
            "The car of Finn is far.",
        )
    )
)


ANN, BEN = "What is the code of Ann?", "What is the code of Ben?"


USER = User(
    "tester",
    "email",
    NOTES,
    (
        Question(ANN, ("12",), "ann"),
        Question(BEN, ("34",), "ben"),
        Question("Which code has Ann?", ("12",), "ann"),
    ),
)


class Words:
    """Embeds texts by their words, so that questions with common words are near."""

    name, dimensions = "words", 16

    def encode(self, texts):
        vectors = np.full((len(texts), self.dimensions), 1e-3, dtype=np.float32)
        for row, text in zip(vectors, texts, strict=True):
            for word in text.lower().split():
                row[hashlib.md5(word.encode()).digest()[0] % self.dimensions] += 1
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


@contextmanager
def rows_of_passes(adapter):
    """Collect the number of rows of each call of the model."""
    rows = []

    def note(module, given, named):
        rows.append(named["input_ids"].shape[1])

    with adapter.model.register_forward_pre_hook(note, with_kwargs=True):
        yield rows


COSTS = Costs(
    rows=(10, 100),
    stored=(0, 100),
    prefill_s=((1.0, 2.0), (10.0, 11.0)),
    selecting=(10, 20),
    behind=(50, 100),
    select_s=((0.5, 1.5), (1.0, 3.0)),
    contexts=(100, 200),
    decode_s=(0.1, 0.2),
    checked=(2, 6),
    check_s=((0.3, 0.4), (0.7, 0.8)),
    projected_s={"KV": (0.2, 2.0), "QKV": (0.4, 4.0)},
    embed_s=0.01,
    match_s=0.02,
    retrieve_s=0.03,
    find_kv_s=0.04,
    load_s_per_byte=1e-6,
    spread=1.1,
)
