"""Requests to a server: a chat, a text to continue, a chat over the caller's documents, or a chat over a knowledge base.

Those without a knowledge base become a PlainPrompt or a DocumentPrompt, which `pipeline.respond` answers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from kvweave.answering.kb_question import Asked
from kvweave.answering.settings import Settings
from kvweave.errors import InvalidRequest
from kvweave.kvstore.kv_store import KVStore
from kvweave.kvstore.tiers.leases import Lease
from kvweave.models.prompt import chat_in_blocks, text_in_blocks
from kvweave.options import AskKeywords, AskOptions
from kvweave.recipes.match import MatchNothing
from kvweave.recipes.names import AUTO
from kvweave.recipes.recipe import Recipe
from kvweave.recipes.snapshots import uses_exact_prefixes_alone
from kvweave.remote.model import AnyModel
from kvweave.results import Answer, ExplainedToken, Source
from kvweave.types import Message, Prompt, TokenizedPrompt

PREFIX: Final = "prefix"
"""The recipe of requests without documents, which can reuse only exact prefixes."""


@dataclass(frozen=True, slots=True)
class CallerDocument:
    """A chunk that the caller has retrieved: its name, which answers show, and its text."""

    id: str
    text: str


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """What a client asks for.

    Attributes:
        messages: of the chat, in order; the last one is answered.
        text: instead of messages, documents and kb, a text to continue as it is.
        documents: chunks that the caller has retrieved, in the order of the prompt.
        kb: instead of documents, the knowledge base that holds them; the last message is the question.
        options: how it is answered; read only.
    """

    messages: tuple[Message, ...] = ()
    text: str | None = None
    documents: tuple[CallerDocument, ...] = ()
    kb: str | None = None
    options: AskKeywords = field(default_factory=AskKeywords, hash=False)

    def __post_init__(self) -> None:
        if self.text is None and not self.messages:
            raise InvalidRequest("there are no messages; give at least one")
        if self.documents and self.kb:
            raise InvalidRequest("both documents and kb are given; give one of them")


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of a request.

    Attributes:
        answer: the answer with its sources, plan and timing.
        text: its joined pieces: `answer.text` with the white space around it.
        prompt_tokens: length of the prompt; 0 for an answer from the answer cache.
        cached_tokens: tokens of the prompt whose stored KV was used, so that they were not computed.
        completion_tokens: length of the reply, including thoughts.
        explain: returns every token of the prompt with the origin of its KV.
        full_prefill_s: estimated seconds for computing the complete prompt on the idle machine; None without an estimate.
    """

    answer: Answer
    text: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    explain: Callable[[], tuple[ExplainedToken, ...]]
    full_prefill_s: float | None = None

    @property
    def cache(self) -> Literal["answer", "kv", "miss"]:
        """The kind of reuse: `answer` from the answer cache, `kv` for stored KV, or `miss`."""
        if self.answer.plan.cache_hit is not None:
            return "answer"
        return "kv" if self.cached_tokens else "miss"


@dataclass(frozen=True, slots=True)
class Turns:
    """The parts of a chat: the instructions at its start, the earlier messages, and the user's last message."""

    instruction: str
    earlier: tuple[Message, ...]
    question: str

    @staticmethod
    def of(messages: Sequence[Message]) -> "Turns":
        """Return the parts of a chat. Raises InvalidRequest if the last message is not the user's."""
        count = next((n for n, message in enumerate(messages) if message.role != "system"), len(messages))
        rest = messages[count:]
        if not rest or rest[-1].role != "user":
            raise InvalidRequest(
                "the last message is not the user's; end the messages with the question to the documents"
            )
        instruction = "\n\n".join(text for _, text in messages[:count])
        return Turns(instruction, tuple(rest[:-1]), rest[-1].text)


@dataclass(slots=True)
class PlainPrompt(Asked):
    """A chat, or a text to continue, without documents. Its answer is not stored, since it belongs to its chat."""

    model: AnyModel
    request: CompletionRequest

    def assemble(self, store: KVStore, lease: Lease, most: int) -> TokenizedPrompt:
        template, request = self.model.template, self.request
        if request.text is not None:
            prompt = text_in_blocks(template, request.text)
        else:
            prompt = chat_in_blocks(template, request.messages, think=self.options.generation.think)
        self.model.check_length(prompt.tokens, most)
        return prompt


@dataclass(slots=True)
class DocumentPrompt(Asked):
    """A question with its own documents; `answered` is called after the answer."""

    model: AnyModel
    turns: Turns
    documents: tuple[CallerDocument, ...]
    answered: Callable[["DocumentPrompt", Answer], None]

    def assemble(self, store: KVStore, lease: Lease, most: int) -> TokenizedPrompt:
        """Return a prompt of the documents in order, the earlier messages and the question."""
        texts, options = tuple(document.text for document in self.documents), self.options
        prompt = self.model.template.render(
            Prompt(
                self.turns.question,
                texts,
                options.system,
                think=options.generation.think,
                earlier=self.turns.earlier,
            )
        )
        self.model.check_length(prompt.tokens, most)
        self.sources = tuple(Source(each.id, 0, len(each.text), each.text, 0.0) for each in self.documents)
        return prompt

    def keep(self, answer: Answer) -> None:
        """Keep no answer: kvweave does not learn when the caller's documents change."""
        self.answered(self, answer)


def plain_options(settings: Settings, given: AskKeywords) -> AskOptions:
    """Return the options of a request without documents.

    Raises InvalidRequest if the request names a recipe that reuses more than exact prefixes.
    """
    recipe = None if given.get("recipe") == AUTO else given.get("recipe")
    if recipe is not None and not _plain(settings.recipe(recipe)):
        raise InvalidRequest(
            f"recipe {recipe} reuses chunks, and the request has neither documents nor kb; leave it out"
        )
    named = recipe or (settings.config.recipe if _plain(settings.recipe()) else PREFIX)
    return settings.options(
        recipe=named, kv_budget=given.get("kv_budget"), cache="off", generation=given.get("generation")
    )


def _plain(recipe: Recipe) -> bool:
    """Return whether a recipe reuses exact prefixes or nothing."""
    return uses_exact_prefixes_alone(recipe) or isinstance(recipe.match, MatchNothing)
