"""The prompts for question prediction: as the reference model was trained on them, as instructions, or as worked examples.

The notes precede the request as chunks precede a question.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Request:
    """What the model is asked for, after the notes.

    Attributes:
        text: stands where a question would.
        system: stands before the notes; None for the knowledge base's own instruction.
        plain: whether system, notes and text follow each other as they are, and the reply is one line: a text for a base
            model to continue, which never stops by itself.
        lead: how the reply begins; part of the text already.
        max_tokens: of the reply; None for as many as an answer may have.
    """

    text: str
    system: str | None = None
    plain: bool = False
    lead: str = ""
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class PromptSet(ABC):
    """The requests, in a form that one kind of model understands.

    Attributes:
        questions_per_reply: the most questions in one reply.
        earlier_questions: the most earlier questions in a request.
        max_parts: the most parts of the summary in front of a request; None for as many as fit.
        batch_tokens: the most tokens of chunks to summarise, or to predict from, at once.
    """

    questions_per_reply: int = 1
    earlier_questions: int = 3
    max_parts: int | None = 1
    batch_tokens: int = 512

    def summarise(self) -> Request | None:
        """Return the request for the key content of the notes; None to predict from the notes themselves."""
        return None

    @abstractmethod
    def predict_from_documents(self, count: int, draw: int = 0) -> Request:
        """Return the request for `count` questions that the notes answer, the one number `draw` about the same notes."""

    def ask_for(self, answer: str, opening: str) -> Request | None:
        """Return the request for the question, with this opening, that words of the notes answer; None if the model chooses."""
        return None

    @abstractmethod
    def predict_from_history(self, earlier: Sequence[str], count: int) -> Request:
        """Return the request for `count` questions that may follow these earlier ones."""


@dataclass(frozen=True, slots=True)
class ReferencePrompts(PromptSet):
    """The reference model's requests, word for word as in its training (`models/reference/README.md`)."""

    earlier_questions: int = 2
    batch_tokens: int = 256  # it was trained on a handful of facts at once

    def summarise(self) -> Request:
        return Request("What is the key content of these notes?")

    def predict_from_documents(self, count: int, draw: int = 0) -> Request:
        return Request("Which question do these notes answer?")

    def predict_from_history(self, earlier: Sequence[str], count: int) -> Request:
        return Request(f"Earlier questions: {' '.join(earlier)} Which question could be next?")


@dataclass(frozen=True, slots=True)
class InstructPrompts(PromptSet):
    """Requests for models that follow instructions, in their chat template. They ask for what PerCache's do (§4.1.2, App. B.3).

    A request is about one passage and names how its questions begin, in every round otherwise: left alone, small models ask for what
    the first sentence says.
    """

    questions_per_reply: int = 5
    earlier_questions: int = 10
    batch_tokens: int = 320

    def predict_from_documents(self, count: int, draw: int = 0) -> Request:
        kinds = [KINDS[(draw * count + number) % len(KINDS)] for number in range(count)]
        return Request(
            f"Write {count} questions that the owner of these notes may ask about them later. Begin one with each of these words: "
            f"{', '.join(kinds)}. {_FORM}",
            _ASKING,
            max_tokens=_TOKENS_PER_QUESTION * count,
        )

    def predict_from_history(self, earlier: Sequence[str], count: int) -> Request:
        asked = "\n".join(f"- {question}" for question in earlier)
        return Request(
            f"The owner of these notes has asked before:\n{asked}\nWrite {count} questions that the same person will ask next, about other "
            f"facts. Keep to the wording, tone and interests of the earlier questions, and repeat none of them. {_FORM}",
            _ASKING,
            max_tokens=_TOKENS_PER_QUESTION * count,
        )


@dataclass(frozen=True, slots=True)
class FewShotPrompts(PromptSet):
    """Worked examples for base models, which continue a text and follow no instruction.

    Left to choose what to ask, small models repeat the questions of the examples. Given an answer and the first word, they write
    its question. Asked for a summary, they copy or invent.
    """

    def predict_from_documents(self, count: int, draw: int = 0) -> Request:
        return self.ask_for("it", "What")

    def predict_from_history(self, earlier: Sequence[str], count: int) -> Request:
        return self.ask_for("it", "What")

    def ask_for(self, answer: str, opening: str) -> Request:
        shown = "".join(
            f"Notes: {notes}\nAnswer: {said}\nQuestion: {question}\n\n"
            for notes, said, question in ASKED_EXAMPLES
        )
        text = f"\nAnswer: {answer}\nQuestion: {opening}"
        return Request(text, f"{shown}Notes: ", plain=True, lead=opening, max_tokens=40)


ASKED_EXAMPLES: Final = (
    (
        "Marta took over the ferry office in May. Tickets for the crossing cost four crowns then, and five since the new boat"
        " came.",
        "five crowns",
        "How much does a ticket for the crossing cost since the new boat came?",
    ),
    (
        "The lamp on the north pier was repaired by Osgood's for 240 crowns. The firm came a second time on 3 June.",
        "3 June",
        "When did Osgood's come to the north pier a second time?",
    ),
    (
        "Two kilns stand in the yard. The older one is fired with birch. Mrs Brandt unloads them every Friday and counts the"
        " broken pots.",
        "Mrs Brandt",
        "Who unloads the kilns in the yard and counts the broken pots?",
    ),
    (
        "Dear Pelle, the choir meets at the Corn Hall this week, because the school has no heating. Bring nine chairs.",
        "Corn Hall",
        "Which hall does the choir meet at this week?",
    ),
)
"""Notes, words of them, and the question that those answer."""

KINDS: Final = (
    *("Who", "When", "How much or how many", "Why", "What"),
    *("What happens if", "What changed", "Where", "Which", "How"),
)
"""How questions begin that an instruct model is asked for."""

_TOKENS_PER_QUESTION: Final = 40
_ASKING: Final = "You read notes and write the questions that people later ask about them."
_FORM: Final = (
    "Each question asks for one fact that the notes state, and names the person, place or thing that it is about, so that it can be "
    "understood without the notes. Write one question per line and nothing else."
)


def prompts_for(model: str, *, chat: bool) -> PromptSet:
    """Return the prompts for the model of this name: its own for the reference model; else by whether it has a chat template."""
    if model == "reference":
        return ReferencePrompts()
    return InstructPrompts() if chat else FewShotPrompts()
