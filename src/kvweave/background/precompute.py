"""Computes the answers and the KV of stored questions, for background work."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

from kvweave.answer_cache.records import Vector
from kvweave.answering.answer_stream import Answered
from kvweave.answering.cached_answers import CachedAnswers
from kvweave.answering.kb_question import KBQuestion, tokenized_prompt_for
from kvweave.answering.pipeline import respond
from kvweave.answering.settings import Settings
from kvweave.kvstore.keys import digest_tokens
from kvweave.models.adapter import Adapter
from kvweave.options import AskOptions
from kvweave.recipes.context import Ids, PrepareContext
from kvweave.recipes.match import missing_chunks
from kvweave.recipes.offline import missing_bytes, prepare_chunks
from kvweave.recipes.recipe import Recipe, remember, run
from kvweave.recipes.request import PrefillRequest
from kvweave.remote.model import as_engine
from kvweave.results import Answer
from kvweave.state.components import ListedCorpus, RequestContext
from kvweave.types import TokenizedPrompt


@dataclass(frozen=True, slots=True)
class Precomputer:
    """Computes answers and KV for questions, under the options that they have in the answer cache.

    `context` loads the parts of a request when first called. `cached` records no questions, since no user asks.
    `waited_s` gives the seconds that this run has yielded to requests so far.
    """

    context: Callable[[], RequestContext]
    cached: CachedAnswers
    settings: Settings
    system: str
    waited_s: Callable[[], float] = lambda: 0.0

    def answer(
        self, question: str, options: AskOptions, accepts: Callable[[Answer], bool] = lambda answer: True
    ) -> Answer:
        """Compute a question's answer again; store it and its KV as a request's would be.

        An answer that `accepts` refuses is returned and not stored: no request ever gets it.
        """
        before_s = self.waited_s()
        cached = replace(self.cached, waited_s=lambda: self.waited_s() - before_s, accepts=accepts)
        context, options = self.context(), replace(options, system=self.system, cache="refresh")
        recipe, kv = self.settings.recipe_of(options), self.settings.offload(options.kv_budget)
        asked = KBQuestion(options, recipe, kv, context, cached, question, self._vector(question))
        *_, whole = respond(context.model, context.store, asked)
        assert isinstance(whole, Answered)  # the last event
        return whole.answer

    def prefill(self, question: str, options: AskOptions) -> None:
        """Store the KV that a question would be answered from and the store lacks."""
        recipe, prompt, missing = self._missing(question, options)
        if missing:
            self._store_kv(recipe, prompt, missing)

    def restore(self, question: str, options: AskOptions) -> bool:
        """Do the same if it fits without evicting anything; return whether it did (PerCache §4.3.3)."""
        recipe, prompt, missing = self._missing(question, options)
        store = self.context().store
        if not missing or self._bytes(recipe, missing) > store.limit_bytes - store.used_bytes:
            return False
        self._store_kv(recipe, prompt, missing)
        return True

    def _vector(self, question: str) -> Callable[[], Vector]:
        return cache(lambda: self.context().encoder.encode([question])[0])

    def _missing(self, question: str, options: AskOptions) -> tuple[Recipe, TokenizedPrompt, list[Ids]]:
        """Return a question's recipe, its prompt, and the chunks in it that no stored KV fits."""
        context, options = self.context(), replace(options, system=self.system)
        prompt = tokenized_prompt_for(context, question, self._vector(question)(), options)
        recipe = self.settings.recipe_of(options)
        request = PrefillRequest(
            as_engine(context.preparing_model), context.store, prompt, recipe.budget(None, None)
        )
        missing = missing_chunks(request, recipe.match, recipe.prepare)
        return recipe, prompt, [prompt.ids(prompt.spans[span]) for span in missing]

    def _bytes(self, recipe: Recipe, missing: Sequence[Ids]) -> int:
        """Return the bytes that storing chunks takes: what the recipe prepares of each, else what it remembers."""
        context = self.context()
        wanted = [(digest_tokens(ids), len(ids)) for ids in missing]
        sizes = missing_bytes(prepare_context(context, self.system), wanted, recipe)
        return sum(
            sizes.get(number, recipe.prepare.bytes(as_engine(context.preparing_model), len(ids)))
            for number, ids in enumerate(missing)
        )

    def _store_kv(self, recipe: Recipe, prompt: TokenizedPrompt, missing: Sequence[Ids]) -> None:
        """Store what the recipe prepares of these chunks, and what it remembers of a request for the prompt."""
        context = self.context()
        prepare_chunks(prepare_context(context, self.system), missing, recipe)
        if "chunk" in recipe.match.stored_kinds and isinstance(context.model, Adapter):
            remember(run(recipe, context.model, context.store, prompt))


def prepare_context(context: RequestContext, system: str) -> PrepareContext:
    """Return the context in which chunks are prepared: all listed chunks, and the system prefix of a request."""
    model = context.preparing_model
    template = model.template
    corpus = ListedCorpus(context.documents, context.index, context.encoder, template)
    return PrepareContext(as_engine(model), context.store, template.prefix_ids(system), corpus)
