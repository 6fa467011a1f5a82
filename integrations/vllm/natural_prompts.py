"""Prompts over natural documents, for the measuring scripts: questions, and the chunks that a search by words finds for each.

Documents and questions are those of the lab's natural benchmark. The search needs no embedding model, which the environment of
vLLM does not have.
"""

import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from kvweave.text import content_stems
from kvweave_lab.eval.natural.questions import shipped_set
from kvweave_lab.real_models import MODELS, open_prepared

CHUNK_TOKENS = 256
COLUMNS = 4096


@dataclass(frozen=True)
class NaturalCorpus:
    """Documents cut into chunks of CHUNK_TOKENS tokens, and questions to them in an order that no property of theirs decides."""

    documents: tuple[tuple[str, ...], ...]
    questions: tuple[str, ...]

    @classmethod
    def first(cls, tokenizer: Any, documents: int, seed: int = 0) -> Self:
        """Return the first documents of the set and the questions that need no other one."""
        content = shipped_set()
        names = sorted(content.documents)[:documents]
        asked = [
            each.text
            for each in content.questions
            if each.evidence and all(evidence.doc in names for evidence in each.evidence)
        ]
        random.Random(seed).shuffle(asked)
        return cls(tuple(cut(tokenizer, content.documents[name]) for name in names), tuple(asked))

    @cached_property
    def chunks(self) -> tuple[str, ...]:
        """The chunks of all documents, in order."""
        return tuple(chunk for document in self.documents for chunk in document)

    @cached_property
    def _vectors(self) -> npt.NDArray[np.float32]:
        return word_vectors(self.chunks)

    def found(self, question: str, count: int) -> tuple[int, ...]:
        """Return the numbers of the best chunks for a question, the best first."""
        scores = self._vectors @ word_vectors([question])[0]
        return tuple(int(number) for number in np.argsort(-scores, kind="stable")[:count])


def model_folder(name: str) -> str:
    """Return the folder of a model that `make real` has prepared, by its name; any other name or folder is returned as it is."""
    return str(open_prepared(MODELS[name])) if name in MODELS else name


def cut(tokenizer: Any, text: str) -> tuple[str, ...]:
    """Return a text in pieces that take at most CHUNK_TOKENS tokens with the separator that a prompt puts after each."""
    ids, size = tokenizer(text, add_special_tokens=False)["input_ids"], CHUNK_TOKENS - 2
    return tuple(tokenizer.decode(ids[start : start + size]) for start in range(0, len(ids), size))


def word_vectors(texts: Sequence[str]) -> npt.NDArray[np.float32]:
    """Return unit vectors (n, COLUMNS) of the words of texts, each hashed to a column; texts that share words are near."""
    vectors = np.full((len(texts), COLUMNS), 1e-6, dtype=np.float32)
    for row, text in zip(vectors, texts, strict=True):
        for word in content_stems([text]):
            row[zlib.crc32(word.encode()) % COLUMNS] += 1
    unit: npt.NDArray[np.float32] = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return unit
