"""What kvweave asks a model in order to predict: in the words that the reference model was trained on, or as instructions.

The notes stand in front of the request as chunks do in front of a question.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol


class PromptSet(Protocol):
    """The three requests that one kind of model understands."""

    @property
    def questions_per_reply(self) -> int:
        """How many questions one reply may hold."""
        ...

    @property
    def earlier_questions(self) -> int:
        """How many earlier questions a request may name."""
        ...

    @property
    def parts_at_once(self) -> int | None:
        """How many parts of the abstract may stand in front of a request; None for as many as fit."""
        ...

    @property
    def batch_tokens(self) -> int | None:
        """How many tokens of chunks are summed up at once; None for a share of the model's context."""
        ...

    def sum_up(self) -> str:
        """For the key content of the notes."""
        ...

    def from_knowledge(self, count: int) -> str:
        """For so many questions that the notes answer."""
        ...

    def from_history(self, earlier: Sequence[str], count: int) -> str:
        """For so many questions that may follow these earlier ones."""
        ...


@dataclass(frozen=True, slots=True)
class ReferencePrompts:
    """The reference model's own three requests, word for word as it learned them (`models/reference/README.md`)."""

    questions_per_reply: int = 1
    earlier_questions: int = 2
    parts_at_once: int | None = 1
    batch_tokens: int | None = 256  # it was trained on a handful of facts at once

    def sum_up(self) -> str:
        """As trained."""
        return "What is the key content of these notes?"

    def from_knowledge(self, count: int) -> str:
        """As trained; always for one."""
        return "Which question do these notes answer?"

    def from_history(self, earlier: Sequence[str], count: int) -> str:
        """As trained; always for one."""
        return f"Earlier questions: {' '.join(earlier)} Which question could be next?"


@dataclass(frozen=True, slots=True)
class InstructPrompts:
    """For models that follow instructions. What is asked for is PerCache's (§4.1.2, App. B.3), the words are ours."""

    questions_per_reply: int = 5
    earlier_questions: int = 10
    parts_at_once: int | None = None
    batch_tokens: int | None = None

    def sum_up(self) -> str:
        """Names, topics, dates, numbers."""
        return (
            "What do these notes say? Give the key facts in short sentences of their own: who and what they are about, "
            "what happened or is planned, and every date, time, place, number and amount. Leave out everything else "
            "and add nothing."
        )

    def from_knowledge(self, count: int) -> str:
        """General ones and detailed ones."""
        return (
            f"Which {count} questions is the owner of these notes most likely to ask about them? Mix general questions "
            "with questions for a single detail. Each must be complete by itself, name what it is about, and be "
            f"answered by the notes. {_FORM}"
        )

    def from_history(self, earlier: Sequence[str], count: int) -> str:
        """In the style of the earlier ones."""
        asked = "\n".join(f"- {question}" for question in earlier)
        return (
            f"The owner of these notes has asked before:\n{asked}\nWhich {count} questions will the same person ask "
            "next? Keep to the wording, tone and interests of the earlier questions, repeat none of them, and ask only "
            f"what the notes answer. {_FORM}"
        )


_FORM: Final = "Write one question per line and nothing else."


def wording_for(model: str) -> PromptSet:
    """What the model of this name understands: the shipped reference model its own words, all others instructions."""
    return ReferencePrompts() if model == "reference" else InstructPrompts()
