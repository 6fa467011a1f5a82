"""Questions to a knowledge base: checked, answered from the bank, or handed to the pipeline with what they need."""

import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import cache

from kvweave.answers.records import Circumstances, Vector
from kvweave.core import Prompt
from kvweave.engine.answer_stream import AnswerStream
from kvweave.engine.choices import Choices
from kvweave.engine.lazy_parts import LazyParts
from kvweave.engine.options import Options
from kvweave.engine.pipeline import Answered, Question, answer, found_for, prompt_for, repeat
from kvweave.engine.repeats import Repeats
from kvweave.engine.requests import Arrival
from kvweave.engine.terms import Terms
from kvweave.errors import EmptyKnowledgeBase, InvalidRequest
from kvweave.knowledge.bank import Found
from kvweave.knowledge.shelf import Shelf


@dataclass(frozen=True, slots=True)
class Questions:
    """Answers what is asked of the knowledge base `name`, whose documents `shelf` lists.

    `parts` are loaded only for a question that `repeats` has no answer to.
    """

    name: str
    shelf: Shelf
    parts: LazyParts
    repeats: Repeats
    choices: Choices
    terms: Terms

    def stream(self, text: str, options: Options, arrival: Arrival) -> AnswerStream:
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

    def found(self, text: str, top_k: int | None) -> list[Found]:
        """The chunks of that prompt, with where they are from; raises as `KnowledgeBase.prompt`."""
        text, top_k = self._checked(text, top_k)
        return found_for(self.parts.for_request(), text, top_k)

    def _repeated(
        self, text: str, vector: Callable[[], Vector], circumstances: Circumstances
    ) -> Generator[str, None, Answered] | None:
        """The answer to the same question, asked before; no model is touched, nor its libraries' weights."""
        if not self.terms.names_settled_model:
            return None
        began = time.perf_counter()
        banked = self.repeats.find(text, vector, circumstances)
        return repeat(self.repeats, text, vector, banked, began) if banked is not None else None

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
