"""Documents to try kvweave on, with questions whose answers stand in them.

`DOCUMENTS` are in the simple language of the shipped reference model. `NATURAL_DOCUMENTS` are for any model that understands English.
"""

import tomllib
from dataclasses import dataclass
from pathlib import Path

DOCUMENTS = Path(__file__).parent / "documents"
CHUNK_TOKENS = 80  # a length that the reference model was trained on
TOP_K = 4

NATURAL_DOCUMENTS = Path(__file__).parent / "natural"
NATURAL_CHUNK_TOKENS = 320  # TOP_K of them are a prompt whose full prefill a person waits for


@dataclass(frozen=True, slots=True)
class SampleQuestion:
    """A question about the sample documents, its right answer, and the task of the evaluation that it is an example of."""

    text: str
    answer: str
    kind: str


def sample_questions() -> list[SampleQuestion]:
    """Return all questions about `DOCUMENTS`, in the order of the file."""
    return _questions("questions.toml")


def natural_questions() -> list[SampleQuestion]:
    """Return all questions about `NATURAL_DOCUMENTS`. The answers are the words that a right answer holds."""
    return _questions("natural.toml")


def _questions(file_name: str) -> list[SampleQuestion]:
    with (Path(__file__).parent / file_name).open("rb") as file:
        return [SampleQuestion(**question) for question in tomllib.load(file)["question"]]
