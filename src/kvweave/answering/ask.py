"""Handles a question before and after the model.

It completes the options, tries the answer cache, and optionally checks the answer. Importing the code that runs models takes
much longer than a cache look-up, so it is imported only if the cache has no answer.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Final, Unpack

from kvweave.answer_cache.evidence import is_answerable, is_non_answer, is_supported
from kvweave.answer_cache.records import CachedAnswer, Vector
from kvweave.answering.answer_stream import Answered, Events
from kvweave.answering.cached_answers import CachedAnswers
from kvweave.answering.settings import Settings
from kvweave.errors import EmptyKnowledgeBase, InvalidRequest
from kvweave.options import AskKeywords, AskOptions
from kvweave.results import Piece, Prefill
from kvweave.state.components import Components
from kvweave.state.metadata import KBMetadata
from kvweave.text import content_stems
from kvweave.types import NO_CONTEXT, Prompt, QuestionContext, TokenizedPrompt

if TYPE_CHECKING:
    from kvweave.index.search import FoundChunk
    from kvweave.state.judge import Judge


@dataclass(frozen=True, slots=True)
class Asker:
    """Answers questions to the knowledge base `name`.

    `components` loads a model only for a question that `cached` has no answer to.
    """

    name: str
    components: Components
    cached: CachedAnswers
    settings: Settings
    metadata: KBMetadata

    def events(
        self, question: str, question_context: QuestionContext = NO_CONTEXT, **given: Unpack[AskKeywords]
    ) -> Events:
        """Return the events of answering the question; the last event is the complete answer.

        `question_context` goes with the question. Raises as `KnowledgeBase.stream` does.
        """
        question = self.checked(question)
        options = self.settings.options(self.metadata.system, **given)
        if question_context.earlier or question_context.instruction:  # they may change the answer
            options = replace(options, cache="off")
        vector = cache(lambda: self.components.encoder.encode([question])[0])
        if options.cacheable and options.cache == "use":
            events = self._cached(question, vector, options)
            if events is not None:
                return self._checked_answer(events, question)

        from kvweave.answering.kb_question import KBQuestion
        from kvweave.answering.pipeline import check_supported, respond

        recipe, kv = self.settings.recipe_of(options), self.settings.offload(options.kv_budget)
        context = self.components.request_context()
        asked = KBQuestion(options, recipe, kv, context, self.cached, question, vector, question_context)
        check_supported(context.model, asked)
        context.encoder.load()  # else the first question's time would include loading it
        began, judge = time.perf_counter(), self._judge(options)
        if judge is not None:
            found = self.cached.judged(question, vector, options, judge)
            asked.judge_s = time.perf_counter() - began
            if found is not None:
                events = self._given(found, question, vector, began, asked.judge_s)
                return self._checked_answer(events, question)
        return self._checked_answer(respond(context.model, context.store, asked), question)

    def prompt(self, question: str, top_k: int | None) -> Prompt:
        """Return the prompt of the question, without computing it; raises as `KnowledgeBase.prompt`."""
        from kvweave.answering.kb_question import prompt_for

        question, most = self.checked(question), self.settings.top_k(top_k)
        return prompt_for(self.components.request_context(), question, most, self.metadata.system)

    def ranked(
        self, question: str, top_k: int | None, vector: Callable[[], Vector] | None = None
    ) -> "list[FoundChunk]":
        """Return the chunks of that prompt, best first; loads the embedding model alone. Raises as `KnowledgeBase.prompt`.

        `vector` gives the question's vector if the caller may have it already.
        """
        from kvweave.answering.kb_question import best_chunks

        question = self.checked(question)
        encoder = self.components.encoder
        self.metadata.check("embedding", encoder.name)  # another process may have filled it anew
        searched = encoder.encode([question])[0] if vector is None else vector()
        most = self.settings.top_k(top_k)
        return best_chunks(self.components.index, self.cached.documents, question, searched, most)

    def _cached(self, question: str, vector: Callable[[], Vector], options: AskOptions) -> Events | None:
        """Return the cached answer to the same question, if there is one; no model is loaded for it."""
        if not self.components.loads_recorded_model:
            return None
        began = time.perf_counter()
        found = self.cached.find(question, vector, options)
        return None if found is None else self._given(found, question, vector, began)

    def _judge(self, options: AskOptions) -> "Judge | None":
        """Return the judge of near questions if the settings and the options want it, and the model can judge."""
        wanted = options.cacheable and options.cache == "use" and self.cached.error_bound > 0
        return self.components.judge if wanted else None

    def _given(
        self,
        found: CachedAnswer,
        question: str,
        vector: Callable[[], Vector],
        began: float,
        judge_s: float = 0.0,
    ) -> Events:
        """Return the events of giving a cached answer."""
        whole = self.cached.answer(found, began, judge_s)

        def events() -> Events:
            yield Piece(whole.text)
            self.cached.record_hit(found, question, vector)
            yield Answered(whole, TokenizedPrompt((), (), (0, 0)), None)

        return events()

    def _checked_answer(self, events: Events, question: str) -> Events:
        """Return the events; with `check_answers`, hold the text back until the passages are found to support it."""
        return held_by_passages(events, question) if self.settings.config.answers.check_answers else events

    def checked(self, question: str) -> str:
        """Return a question as valid text; raises InvalidRequest for an empty one, EmptyKnowledgeBase without documents."""
        if not question.strip():
            raise InvalidRequest("the question is empty")
        if not self.cached.documents.count():
            raise EmptyKnowledgeBase(
                f"knowledge base {self.name!r} holds no documents; add some with `kvweave add PATH`"
            )
        # A terminal may hand over broken bytes.
        return question.encode("utf-8", "replace").decode("utf-8")


NOT_FOUND: Final = "The documents do not say."
_YES: Final = frozenset({"yes"})  # "no" is no content word anyway


def held_by_passages(events: Events, question: str) -> Events:
    """Yield an answer's events, its text held back until it is whole: the text, or NOT_FOUND in its place.

    The check goes by words and knows no meaning. It finds what is made up, and questions about names and numbers that are in
    no passage; an answer taken from the wrong passage passes.
    """
    held = []
    with closing(events):
        for event in events:
            if isinstance(event, Piece):
                held.append(event)
            elif isinstance(event, Prefill):
                yield event
            else:
                answer = event.answer
                if holds(question, answer.text, [source.text for source in answer.sources]):
                    yield from held
                    yield event._replace(answer=replace(answer, supported=True))
                else:
                    yield Piece(NOT_FOUND)
                    yield event._replace(answer=replace(answer, text=NOT_FOUND, supported=False))


def holds(question: str, answer: str, passages: Sequence[str]) -> bool:
    """Return whether passages hold the names and numbers of a question, and what an answer says beyond it.

    An answer that says nothing beyond its question, such as a bare "yes", passes.
    """
    if is_non_answer(answer) or not is_answerable(question, passages):
        return False
    beyond = content_stems([answer]) - content_stems([question]) - _YES
    return not beyond or is_supported(question, answer, passages)
