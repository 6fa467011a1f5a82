"""Questions to a knowledge base: checked, answered from the bank, or handed to the pipeline with what they need."""

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from kvweave.answer_cache.records import AnswerSettings, Vector
from kvweave.engine.background import ActiveRequest
from kvweave.engine.cached_answers import CachedAnswers
from kvweave.engine.components import Components
from kvweave.engine.pipeline import Answered, Question, answer, found_for, prompt_for, repeat
from kvweave.engine.settings import Choices, KBMetadata, Options
from kvweave.errors import EmptyKnowledgeBase, InvalidRequest
from kvweave.index.documents import DocumentTable
from kvweave.index.vector_index import FoundChunk
from kvweave.types import Answer, ExplainedToken, Plan, Prompt, TokenOrigin

_BROKEN = "\ufffd"  # what the bytes of an unfinished character decode to
_WINDOW_TOKENS = 8  # a tokenizer that looks at what stands before looks no further back


def explain(answered: Answered, tokenizer: Any) -> tuple[ExplainedToken, ...]:
    """One entry per prompt token, in order; the texts one after the other are the prompt's."""
    ids = answered.prompt.token_ids
    recomputed = frozenset(answered.selected.tolist())
    origins = _origins(answered.answer.plan, recomputed)
    return tuple(map(ExplainedToken, ids, _texts(ids, tokenizer), origins))


def _origins(plan: Plan, recomputed: frozenset[int]) -> Iterator[TokenOrigin]:
    for span in plan.spans:
        for position in range(span.start, span.end):
            yield "recomputed" if position in recomputed else span.origin


def _texts(ids: Sequence[int], tokenizer: Any) -> Iterator[str]:
    """What each token adds to the decoded text; what one leaves unfinished comes with the one that finishes it."""
    done = 0  # tokens whose text is out
    for end in range(1, len(ids) + 1):
        start = max(0, done - _WINDOW_TOKENS)
        before, now = _decode(ids[start:done], tokenizer), _decode(ids[start:end], tokenizer)
        unfinished = now.endswith(_BROKEN) and end < len(ids) and end - done < _WINDOW_TOKENS
        if unfinished or not now.startswith(before):
            yield "" if unfinished else _decode(ids[done:end], tokenizer)
        else:
            yield now[len(before) :]
        if not unfinished:
            done = end


def _decode(ids: Sequence[int], tokenizer: Any) -> str:
    text = tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return str(text)


class AnswerStream:
    """The pieces of an answer, as an iterator; `answer` and `explain` are there once it is exhausted.

    `arrival` is the request's, over with the iteration; `tokenizer` is None where no model is needed.
    """

    def __init__(
        self, pieces: Generator[str, None, Answered], tokenizer: Any, arrival: ActiveRequest
    ) -> None:
        self._pieces = pieces
        self._tokenizer = tokenizer
        self._arrival = arrival
        self._answered: Answered | None = None

    def __iter__(self) -> Iterator[str]:
        try:
            finished: Answered | None = yield from self._pieces
        finally:
            self._arrival.leave()
        # A second iteration finds nothing more and takes nothing away.
        self._answered = finished or self._answered

    @property
    def answer(self) -> Answer:
        """The whole answer; raises InvalidRequest while pieces are still to come."""
        return self._finished.answer

    def explain(self) -> tuple[ExplainedToken, ...]:
        """Every token of the prompt with where its KV came from; raises as `answer` does."""
        return explain(self._finished, self._tokenizer)

    @property
    def _finished(self) -> Answered:
        if self._answered is None:
            raise InvalidRequest("the answer is not finished: iterate over the stream to its end first")
        return self._answered


@dataclass(frozen=True, slots=True)
class Questions:
    """Answers what is asked of the knowledge base `name`, whose documents `shelf` lists.

    `parts` are loaded only for a question that `repeats` has no answer to.
    """

    name: str
    shelf: DocumentTable
    parts: Components
    repeats: CachedAnswers
    choices: Choices
    terms: KBMetadata

    def stream(self, text: str, options: Options, arrival: ActiveRequest) -> AnswerStream:
        """Answer piece by piece what came with `arrival`, which is over with the last piece; raises as `KnowledgeBase.stream`."""
        text, top_k = self._checked(text, options.top_k)
        recipe = self.choices.recipe(options.recipe, options.prepare)
        recipe.budget(options.ratio, options.coverage)  # refused before the model is loaded
        system = self.terms.system
        circumstances = self.choices.circumstances(recipe, options, top_k)
        vector = cache(lambda: self.parts.encoder.encode([text])[0])
        if circumstances is not None and options.bank == "serve":
            repeated = self._repeated(text, vector, circumstances)
            if repeated is not None:
                return AnswerStream(repeated, None, arrival)
        parts = self.parts.for_request()
        parts.encoder.load()  # its loading is not the first question's time
        asked = Question(
            text=text,
            vector=vector,
            circumstances=circumstances,
            recipe=recipe,
            ratio=options.ratio,
            coverage=options.coverage,
            top_k=top_k,
            system=system,
            generation=self.choices.generation,
            max_new_tokens=self.choices.max_new_tokens(parts.adapter.geometry.context_tokens),
            drop_chunks=options.drop_chunks,
            kv=self.choices.kv,
            drafts=options.bank == "serve" and self.choices.kv is None,
        )
        return AnswerStream(answer(parts, self.repeats, asked), parts.adapter.tokenizer, arrival)

    def prompt(self, text: str, top_k: int | None) -> Prompt:
        """What a question would be answered from, and nothing computed; raises as `KnowledgeBase.prompt`."""
        text, top_k = self._checked(text, top_k)
        return prompt_for(self.parts.for_request(), text, top_k, self.terms.system)

    def found(self, text: str, top_k: int | None) -> list[FoundChunk]:
        """The chunks of that prompt, with where they are from; raises as `KnowledgeBase.prompt`."""
        text, top_k = self._checked(text, top_k)
        return found_for(self.parts.for_request(), text, top_k)

    def _repeated(
        self, text: str, vector: Callable[[], Vector], circumstances: AnswerSettings
    ) -> Generator[str, None, Answered] | None:
        """The answer to the same question, asked before; no model is touched, nor its libraries' weights."""
        if not self.terms.names_settled_model:
            return None
        began = time.perf_counter()
        cache_hit = self.repeats.find(text, vector, circumstances)
        return repeat(self.repeats, text, vector, cache_hit, began) if cache_hit is not None else None

    def _checked(self, text: str, top_k: int | None) -> tuple[str, int]:
        """A question and a number of chunks that can be answered from what there is."""
        if not text.strip():
            raise InvalidRequest("the question is empty")
        top_k = self.choices.top_k(top_k)
        documents = self.shelf.list()
        if not documents:
            raise EmptyKnowledgeBase(
                f"knowledge base {self.name!r} holds no documents; add some with `kvweave add PATH`"
            )
        # A terminal may hand over broken bytes.
        whole = text.encode("utf-8", "replace").decode("utf-8")
        return whole, min(top_k, sum(document.chunks for document in documents))
