"""Compares budgets with a reply: what each keeps of it, on KV that is prepared for the comparison alone."""

import shutil
from collections.abc import Mapping, Sequence

from kvweave.answering.settings import AskOptions
from kvweave.background.greedy_reply import Reply
from kvweave.config import Config
from kvweave.errors import StoreFull
from kvweave.kvstore.chunk_store import ChunkStore
from kvweave.recipes.candidates import Candidate, candidates
from kvweave.recipes.context import PrepareContext
from kvweave.recipes.offline import prepare_chunks
from kvweave.state.calibration_results import Measured, Trial, allowed_losses, summarised
from kvweave.state.components import ListedCorpus, RequestContext
from kvweave.state.knowledge_base_state import CALIBRATION_FOLDER, KnowledgeBaseState
from kvweave.types import TokenizedPrompt


class BudgetTrials:
    """The budgets that may be chosen under some settings, from the cheapest; close it.

    KV goes into a store of its own, which is deleted with it. So nothing of the knowledge base's KV is evicted for a trial, and no
    KV that its requests have left counts in one.

    Args:
        state: the knowledge base's.
        config: the settings: what they leave open is tried, and they name the least shares that must be kept.
    """

    def __init__(self, state: KnowledgeBaseState, config: Config) -> None:
        self._state, self._least = state, config.calibration
        self._folder = state.database.path.parent / CALIBRATION_FOLDER
        self._scratch: ChunkStore | None = None
        self.candidates = candidates(config.prepare, config.store.storage, config.model.auxiliary)

    @property
    def store(self) -> ChunkStore:
        """The store of trials, empty when first needed."""
        if self._scratch is None:
            shutil.rmtree(self._folder, ignore_errors=True)  # a killed process may have left it
            self._scratch = ChunkStore(self._folder, limit_bytes=self._state.store.limit_bytes)
        return self._scratch

    def losses(self, questions: int) -> tuple[int, int]:
        """Return how many first tokens and how many answers of so many questions may be lost."""
        least = self._least
        return (
            allowed_losses(questions, least.calibrate_first_tokens),
            allowed_losses(questions, least.calibrate_answers),
        )

    def trials(self, measured: Sequence[Mapping[str, Measured]], questions: int) -> list[Trial]:
        """Return what each candidate has kept, where so many `questions` are measured in the end."""
        losses = self.losses(questions)
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

    def measure(
        self,
        context: RequestContext,
        alive: Sequence[Candidate],
        prompt: TokenizedPrompt,
        options: AskOptions,
        full: Reply,
    ) -> dict[str, Measured]:
        """Return what each budget keeps of the reply `full`, by its key; raises StoreFull if the disk is."""
        return {each.key: self._compare(context, each, prompt, options, full) for each in alive}

    def _compare(
        self,
        context: RequestContext,
        candidate: Candidate,
        prompt: TokenizedPrompt,
        options: AskOptions,
        full: Reply,
    ) -> Measured:
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
