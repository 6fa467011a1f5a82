"""Compares budgets with a reply: what each keeps of it, on KV that no request has left."""

import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
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
from kvweave.recipes.methods import recipe_named
from kvweave.recipes.offline import copy_prepared, prepare_chunks
from kvweave.recipes.recipe import run
from kvweave.recipes.request import PrefillResult
from kvweave.state.calibration_results import Measured, Trial, summarised
from kvweave.state.components import ListedCorpus, RequestContext
from kvweave.state.knowledge_base_state import KnowledgeBaseState
from kvweave.types import TokenizedPrompt


@dataclass(frozen=True, slots=True)
class Reply:
    """Full attention's greedy reply to a prompt.

    `ids` are its tokens, cut at the most that are compared; `after` is the token that it would choose next, such as the end.
    """

    ids: tuple[int, ...]
    after: int

    @staticmethod
    def of(adapter: Adapter, store: KVStore, prompt: TokenizedPrompt, options: AskOptions) -> "Reply":
        """Prefill and decode as a request does."""
        result = run(recipe_named("full"), adapter, store, prompt)
        room = max(1, adapter.geometry.context_tokens - prompt.tokens)
        most = min(options.max_new_tokens(adapter.geometry.context_tokens), room)
        ids = tuple(generate_all(result, options.generation, most).ids)
        return Reply(ids, _chosen(adapter, result, prompt, ids)[-1])


def _chosen(
    adapter: Adapter, result: PrefillResult, prompt: TokenizedPrompt, reply: Sequence[int]
) -> list[int]:
    """Return the likeliest token before each token of a reply and after it, each behind the reply's own tokens before it."""
    logits = result.logits
    if reply:  # else the model ends it at once
        result.kv_cache.truncate_appended(prompt.tokens)
        logits = torch.cat([logits, adapter.verify_draft(result.kv_cache, reply)])
    chosen: list[int] = logits.argmax(-1).tolist()
    return chosen


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
    KV that its requests have left counts in one. What `config` leaves open is tried; it names the least share that must be kept.
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

    def trials(self, measured: Sequence[Mapping[str, Measured]]) -> list[Trial]:
        """Return what the measured questions say of each candidate, the cheapest first."""
        return [
            summarised(
                each.recipe.name,
                each.recipe.ratio,
                each.offline_passes,
                each.prior,
                [one[each.key] for one in measured if each.key in one],
                self._least.calibrate_tokens,
            )
            for each in self.candidates
        ]

    def alive(self, measured: Sequence[Mapping[str, Measured]]) -> list[Candidate]:
        """Return the candidates that another question may decide about: none once the cheapest left is sure to keep enough."""
        trials = self.trials(measured)
        left = [each for each in trials if each.decided is not False]
        if left and left[0].decided:
            return []
        return [each for each, trial in zip(self.candidates, trials, strict=True) if trial.decided is None]

    def compare(
        self, context: RequestContext, candidate: Candidate, prompt: TokenizedPrompt, full: Reply
    ) -> Measured:
        """Measure a candidate on one question beside full attention's reply; raises StoreFull if a chunk's KV was not stored."""
        adapter, spans = context.adapter, [each for each in prompt.spans if each.kind == "chunk"]
        chunks = [prompt.ids(span) for span in spans if span.tokens]
        corpus = ListedCorpus(context.documents, context.index, context.encoder, adapter.template)
        ctx = PrepareContext(adapter, self.store, prompt.ids(prompt.spans[0]), corpus)
        copy_prepared(self._state.store, ctx, chunks, candidate.recipe)
        prepare_chunks(ctx, chunks, candidate.recipe)
        with counted_rows(adapter) as counted:
            result = run(candidate.recipe, adapter, self.store, prompt)
        if any(each.origin == "fresh" for each in result.plan.spans if each.kind == "chunk"):
            # Computed as by full attention: that shows nothing of the budget, for or against it.
            raise StoreFull(
                f"{self._folder} has no room for the KV of one question's chunks by {candidate.recipe.name}, so calibration "
                "measures nothing; free space on the disk, or raise the limit with `kvweave cache limit`"
            )
        wanted = (*full.ids, full.after)
        same = [a == b for a, b in zip(_chosen(adapter, result, prompt, full.ids), wanted, strict=True)]
        stored = sum(candidate.stored_bytes(adapter, len(ids)) for ids in chunks)
        return Measured(
            sum(same) / len(same),
            same[0],
            all(same),
            counted[0] / (adapter.geometry.layers * prompt.tokens),
            stored / max(1, sum(map(len, chunks))),
        )

    def close(self) -> None:
        """Delete the KV of trials; closing twice is fine."""
        if self._scratch is not None:
            self._scratch.close()
            self._scratch = None
            shutil.rmtree(self._folder, ignore_errors=True)
