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
        example: an earlier message and its reply, for a request with a system instruction to a chat model.
    """

    text: str
    system: str | None = None
    plain: bool = False
    lead: str = ""
    max_tokens: int | None = None
    example: tuple[str, str] | None = None


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

    A request is about one passage and names how its questions begin, in every round otherwise. A worked example stands before it: without
    one, a model of 0.5 billion parameters repeats the request.
    """

    questions_per_reply: int = 5
    earlier_questions: int = 10
    batch_tokens: int = 320

    def predict_from_documents(self, count: int, draw: int = 0) -> Request:
        return _by_kind(count, draw, "")

    def predict_from_history(self, earlier: Sequence[str], count: int) -> Request:
        asked = "\n".join(f"- {question}" for question in earlier)
        return _by_kind(
            count, 0, f"The same person has asked before:\n{asked}\nAsk what this person will ask next. "
        )


def _by_kind(count: int, draw: int, before: str) -> Request:
    """Return the request for `count` questions of the kinds of draw number `draw`; `before` stands before what is asked for."""
    names = list(KINDS)
    kinds = [names[(draw * count + number) % len(names)] for number in range(count)]
    asked = (
        f"Write {count} questions that these notes answer, one per line. Begin them with: {', '.join(kinds)}. Name the person, place or "
        "thing that each is about."
    )
    shown = (f"{_NOTES}\n\n{asked}", "\n".join(KINDS[kind] for kind in kinds))
    return Request(before + asked, _ASKING, max_tokens=_TOKENS_PER_QUESTION * count, example=shown)


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

_NOTES: Final = (
    "The lamp on the north pier was repaired by Osgood's of Skelt on 3 June, for 240 crowns, because the ferry could not find the pier in "
    "fog. It burns gas now, and no longer oil. If it goes out, the harbour office must be rung on 555."
)
KINDS: Final = {
    "Who": "Who repaired the lamp on the north pier?",
    "When": "When was the lamp on the north pier repaired?",
    "How much": "How much did the repair of the pier lamp cost?",
    "Why": "Why was the lamp on the north pier repaired?",
    "What": "What does the lamp on the north pier burn now?",
    "What happens if": "What happens if the lamp on the north pier goes out?",
    "What changed": "What changed about the fuel of the pier lamp?",
    "Where": "Where does Osgood's, the firm that repaired the pier lamp, come from?",
    "Which": "Which office must be rung when the pier lamp goes out?",
    "How": "How can the harbour office be reached when the pier lamp goes out?",
}
"""How questions begin that an instruct model is asked for, each with one about the notes of the worked example."""

_TOKENS_PER_QUESTION: Final = 40
_ASKING: Final = "You read notes and write the questions that people later ask about them."


def prompts_for(model: str, *, chat: bool) -> PromptSet:
    """Return the prompts for the model of this name: its own for the reference model; else by whether it has a chat template."""
    if model == "reference":
        return ReferencePrompts()
    return InstructPrompts() if chat else FewShotPrompts()
