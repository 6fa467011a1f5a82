"""Sample documents and questions in the language of the shipped reference model."""

import tomllib
from dataclasses import dataclass
from pathlib import Path

DOCUMENTS = Path(__file__).parent / "documents"
CHUNK_TOKENS = 80  # a length that the reference model was trained on
TOP_K = 4


@dataclass(frozen=True, slots=True)
class SampleQuestion:
    """A question about the sample documents, its right answer, and the task of the evaluation that it is an example of."""

    text: str
    answer: str
    kind: str


def sample_questions() -> list[SampleQuestion]:
    """Return all sample questions, in the order of the file."""
    with (Path(__file__).parent / "questions.toml").open("rb") as file:
        return [SampleQuestion(**question) for question in tomllib.load(file)["question"]]
