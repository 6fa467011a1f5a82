"""Computing ahead of being asked: a question's answer, or its KV alone, by the same path that a request takes.

Knows nothing of when, or of why a question is worth it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

from kvweave.answers.records import Circumstances
from kvweave.config import DEFAULT_NEW_TOKENS, GenerationConfig, within_context
from kvweave.core import Answer, TokenizedPrompt
from kvweave.decode.settings import ClusteredKV
from kvweave.engine.corpus import ListedCorpus
from kvweave.engine.pipeline import Parts, Question, answer, assembled
from kvweave.engine.repeats import Repeats
from kvweave.recipes.absent import absent_chunks
from kvweave.recipes.methods import recipe_named
from kvweave.recipes.offline import lacking, prepare_chunks
from kvweave.recipes.recipe import Recipe, remember, run
from kvweave.recipes.request import PrefillRequest
from kvweave.recipes.workshop import Ids, Workshop
from kvweave.store.keys import digest_tokens


@dataclass(frozen=True, slots=True)
class Ahead:
    """Computes for questions under the circumstances that they have in the bank.

    `parts` gives what a request passes through, opened when first needed; `repeats` has no outlook, since no user asks;
    `system` is the knowledge base's instruction; `decoded_from` says how the KV is held for a budget that the
    circumstances name.
    """

    parts: Callable[[], Parts]
    repeats: Repeats
    system: str
    decoded_from: Callable[[float | None], ClusteredKV | None]

    def answer(self, text: str, circumstances: Circumstances) -> Answer:
        """Answer a question anew; the answer is kept in the bank, its KV in the store, as a request's would be."""
        pieces = answer(self.parts(), self.repeats, self._question(text, circumstances))
        while True:
            try:
                next(pieces)
            except StopIteration as finished:
                whole: Answer = finished.value.answer
                return whole

    def prefill(self, text: str, circumstances: Circumstances) -> None:
        """Store the KV that a question would be answered from, as far as it is not there."""
        question = self._question(text, circumstances)
        prompt = assembled(self.parts(), question)
        absent = self._absent(question.recipe, prompt)
        if absent:
            self._store_kv(question.recipe, prompt, absent)

    def restore(self, text: str, circumstances: Circumstances) -> bool:
        """The same if it fits without evicting anything; whether anything was computed (PerCache §4.3.3)."""
        question = self._question(text, circumstances)
        prompt = assembled(self.parts(), question)
        absent = self._absent(question.recipe, prompt)
        store = self.parts().store
        if not absent or self._room(question.recipe, absent) > store.limit_bytes - store.used_bytes:
            return False
        self._store_kv(question.recipe, prompt, absent)
        return True

    def _question(self, text: str, circumstances: Circumstances) -> Question:
        parts = self.parts()
        return Question(
            text=text,
            vector=cache(lambda: parts.encoder.encode([text])[0]),
            circumstances=circumstances,
            recipe=recipe_named(circumstances.recipe, None, circumstances.auxiliary),
            ratio=circumstances.ratio,
            coverage=circumstances.coverage,
            top_k=circumstances.top_k,
            system=self.system,
            generation=GenerationConfig(max_new_tokens=circumstances.max_new_tokens),
            max_new_tokens=within_context(
                circumstances.max_new_tokens, DEFAULT_NEW_TOKENS, parts.adapter.geometry.context_tokens
            ),
            drop_chunks=circumstances.drop_chunks,
            kv=self.decoded_from(circumstances.kv_budget),
        )

    def _absent(self, recipe: Recipe, prompt: TokenizedPrompt) -> list[Ids]:
        """The chunks of the prompt that no stored KV can stand for."""
        parts = self.parts()
        request = PrefillRequest(parts.adapter, parts.store, prompt, recipe.budget(None, None))
        return [prompt.ids(prompt.spans[number]) for number in absent_chunks(recipe, request)]

    def _room(self, recipe: Recipe, absent: Sequence[Ids]) -> int:
        """Bytes that storing them takes: what the recipe prepares of a chunk, else what it remembers."""
        takes = lacking(self._shop(), [(digest_tokens(ids), len(ids)) for ids in absent], recipe)
        adapter = self.parts().adapter
        return sum(
            takes.get(place, recipe.prepare.bytes(adapter, len(ids))) for place, ids in enumerate(absent)
        )

    def _shop(self) -> Workshop:
        parts = self.parts()
        template = parts.adapter.template
        corpus = ListedCorpus(parts.shelf, parts.bank, parts.encoder, template)
        return Workshop(parts.adapter, parts.store, template.prefix_ids(self.system), corpus)

    def _store_kv(self, recipe: Recipe, prompt: TokenizedPrompt, absent: Sequence[Ids]) -> None:
        """What the recipe prepares of chunks of a prompt, and what it remembers of a request."""
        parts = self.parts()
        prepare_chunks(self._shop(), absent, recipe)
        if "chunk" in recipe.match.remembers:
            remember(run(recipe, parts.adapter, parts.store, prompt))
