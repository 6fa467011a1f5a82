"""Compares budgets with a reply: what each keeps of it, on KV that is prepared for the comparison alone."""

import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kvweave.answering.generation import generate_all
from kvweave.config import Config
from kvweave.errors import StoreFull
from kvweave.kvstore.chunk_store import ChunkStore
from kvweave.kvstore.kv_store import KVStore
from kvweave.models.adapter import Adapter
from kvweave.models.attention import attention_modules
from kvweave.options import AskOptions
from kvweave.recipes.candidates import Candidate, candidates
from kvweave.recipes.context import PrepareContext
from kvweave.recipes.offline import prepare_chunks
from kvweave.recipes.recipe import Recipe, run
from kvweave.results import Plan
from kvweave.state.calibration_results import Measured, Trial, allowed_losses, summarised
from kvweave.state.components import ListedCorpus, RequestContext
from kvweave.state.knowledge_base_state import KnowledgeBaseState
from kvweave.types import TokenizedPrompt


@dataclass(frozen=True, slots=True)
class Reply:
    """A greedy reply, and the tokens that ran through the model for its prompt, as a share of the prompt's."""

    plan: Plan
    first_token: int
    ids: tuple[int, ...]
    text: tuple[str, str]
    passes: float

    @staticmethod
    def of(
        adapter: Adapter,
        store: KVStore,
        recipe: Recipe,
        prompt: TokenizedPrompt,
        options: AskOptions,
        drafts: Sequence[tuple[int, ...]] = (),
    ) -> "Reply":
        """Prefill and decode as a request does; `drafts` are verified in few passes and change nothing."""
        with counted_rows(adapter) as counted:
            result = run(recipe, adapter, store, prompt)
        most = min(
            options.max_new_tokens(adapter.geometry.context_tokens),
            max(1, adapter.geometry.context_tokens - prompt.tokens),
        )
        decoded = generate_all(result, prompt, options.generation, most, drafts)
        rows = counted[0] / (adapter.geometry.layers * prompt.tokens)
        text = decoded.reasoning, decoded.text.strip()
        return Reply(result.plan, int(result.logits.argmax()), tuple(decoded.ids), text, rows)


@contextmanager
def counted_rows(adapter: Adapter) -> Iterator[list[int]]:
    """Count the rows that go through each attention layer in this context and thread, in a list of one number.

    A layer that a selecting pass stops in, after its keys and values, does not count.
    """
    counted, thread = [0], threading.get_ident()

    def count(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if threading.get_ident() == thread:
            hidden = next(each for each in (*args, *kwargs.values()) if isinstance(each, Tensor))
            counted[0] += hidden.shape[-2]

    handles = [
        module.register_forward_hook(count, with_kwargs=True)
        for module in attention_modules(adapter.model).values()
    ]
    try:
        yield counted
    finally:
        for handle in handles:
            handle.remove()


class BudgetTrials:
    """The budgets that may be chosen under some settings, from the cheapest; close it.

    KV goes into a store of its own, which is deleted with it. So nothing of the knowledge base's KV is evicted for a trial, and no
    KV that its requests have left counts in one. What `config` leaves open is tried; it names the least shares that must be kept.
    """

    def __init__(self, state: KnowledgeBaseState, config: Config) -> None:
        self._state, self._least = state, config.calibration
        self._folder = state.trials
        self._scratch: ChunkStore | None = None
        self.candidates = candidates(config.prepare, config.store.storage, config.model.auxiliary)

    @property
    def store(self) -> ChunkStore:
        """The store of trials, empty when first needed."""
        if self._scratch is None:
            shutil.rmtree(self._folder, ignore_errors=True)  # a killed process may have left it
            self._scratch = ChunkStore(self._folder, limit_bytes=self._state.store.limit_bytes)
        return self._scratch

    def trials(self, measured: Sequence[Mapping[str, Measured]], questions: int) -> list[Trial]:
        """Return the measured trials of the candidates; `questions` is the number of questions measured in the end."""
        least = self._least
        losses = (
            allowed_losses(questions, least.calibrate_first_tokens),
            allowed_losses(questions, least.calibrate_answers),
        )
        return [
            summarised(
                each.recipe.name,
                each.recipe.ratio,
                each.offline_passes,
                [one[each.key] for one in measured if each.key in one],
                losses,
            )
            for each in self.candidates
        ]

    def alive(self, measured: Sequence[Mapping[str, Measured]], questions: int) -> list[Candidate]:
        """Return the candidates that have not lost too much yet."""
        trials = self.trials(measured, questions)
        return [each for each, trial in zip(self.candidates, trials, strict=True) if trial.keeps]

    def compare(
        self,
        context: RequestContext,
        candidate: Candidate,
        prompt: TokenizedPrompt,
        options: AskOptions,
        full: Reply,
    ) -> Measured:
        """Measure a candidate on one question beside full attention's reply; raises StoreFull if a chunk's KV was not stored."""
        adapter, spans = context.adapter, [each for each in prompt.spans if each.kind == "chunk"]
        chunks = [prompt.ids(span) for span in spans if span.tokens]
        corpus = ListedCorpus(context.documents, context.index, context.encoder, adapter.template)
        ctx = PrepareContext(adapter, self.store, prompt.ids(prompt.spans[0]), corpus)
        prepare_chunks(ctx, chunks, candidate.recipe)
        reply = Reply.of(adapter, self.store, candidate.recipe, prompt, options, [full.ids])
        if any(each.origin == "fresh" for each in reply.plan.spans if each.kind == "chunk"):
            # Computed as by full attention: that shows nothing of the budget, for or against it.
            raise StoreFull(
                f"{self._folder} has no room for the KV of one question's chunks by {candidate.recipe.name}, so calibration "
                "measures nothing; free space on the disk, or raise the limit with `kvweave cache limit`"
            )
        stored = sum(candidate.stored_bytes(adapter, len(ids)) for ids in chunks)
        return Measured(
            reply.first_token == full.first_token,
            reply.text == full.text,
            reply.passes,
            stored / max(1, sum(map(len, chunks))),
        )

    def close(self) -> None:
        """Delete the KV of trials; closing twice is fine."""
        if self._scratch is not None:
            self._scratch.close()
            self._scratch = None
            shutil.rmtree(self._folder, ignore_errors=True)
