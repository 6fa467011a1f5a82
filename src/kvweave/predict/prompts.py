"""The prompts for question prediction, as the reference model was trained on them, or as instructions.

The notes precede the request as chunks precede a question.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol


class PromptSet(Protocol):
    """The three requests, in a form that one kind of model understands."""

    @property
    def questions_per_reply(self) -> int:
        """The most questions in one reply."""
        ...

    @property
    def earlier_questions(self) -> int:
        """The most earlier questions in a request."""
        ...

    @property
    def max_parts(self) -> int | None:
        """The most parts of the summary in front of a request; None for as many as fit."""
        ...

    @property
    def batch_tokens(self) -> int | None:
        """The most tokens of chunks to summarise at once; None for a share of the model's context."""
        ...

    def summarise(self) -> str:
        """Return the request for the key content of the notes."""
        ...

    def predict_from_documents(self, count: int) -> str:
        """Return the request for `count` questions that the notes answer."""
        ...

    def predict_from_history(self, earlier: Sequence[str], count: int) -> str:
        """Return the request for `count` questions that may follow these earlier ones."""
        ...


@dataclass(frozen=True, slots=True)
class ReferencePrompts:
    """The reference model's requests, word for word as in its training (`models/reference/README.md`)."""

    questions_per_reply: int = 1
    earlier_questions: int = 2
    max_parts: int | None = 1
    batch_tokens: int | None = 256  # it was trained on a handful of facts at once

    def summarise(self) -> str:
        """Return the request it was trained on."""
        return "What is the key content of these notes?"

    def predict_from_documents(self, count: int) -> str:
        """Return the request it was trained on, which is for one question."""
        return "Which question do these notes answer?"

    def predict_from_history(self, earlier: Sequence[str], count: int) -> str:
        """Return the request it was trained on, which is for one question."""
        return f"Earlier questions: {' '.join(earlier)} Which question could be next?"


@dataclass(frozen=True, slots=True)
class InstructPrompts:
    """Requests for models that follow instructions. They ask for what PerCache's do (§4.1.2, App. B.3), in our words."""

    questions_per_reply: int = 5
    earlier_questions: int = 10
    max_parts: int | None = None
    batch_tokens: int | None = None

    def summarise(self) -> str:
        """Ask for names, topics, dates and numbers."""
        return (
            "What do these notes say? Give the key facts in short sentences of their own: who and what they are about, "
            "what happened or is planned, and every date, time, place, number and amount. Leave out everything else "
            "and add nothing."
        )

    def predict_from_documents(self, count: int) -> str:
        """Ask for general and detailed questions."""
        return (
            f"Which {count} questions is the owner of these notes most likely to ask about them? Mix general questions "
            "with questions for a single detail. Each must be complete by itself, name what it is about, and be "
            f"answered by the notes. {_FORM}"
        )

    def predict_from_history(self, earlier: Sequence[str], count: int) -> str:
        """Ask for questions in the style of the earlier ones."""
        asked = "\n".join(f"- {question}" for question in earlier)
        return (
            f"The owner of these notes has asked before:\n{asked}\nWhich {count} questions will the same person ask "
            "next? Keep to the wording, tone and interests of the earlier questions, repeat none of them, and ask only "
            f"what the notes answer. {_FORM}"
        )


_FORM: Final = "Write one question per line and nothing else."


def prompts_for(model: str) -> PromptSet:
    """Return the prompts for the model of this name: its own for the reference model, instructions for all others."""
    return ReferencePrompts() if model == "reference" else InstructPrompts()
