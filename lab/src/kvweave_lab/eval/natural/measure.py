"""Runs recipes on prompts of the natural benchmark and compares them with full attention on the same prompt.

What recipes share is computed once: full attention's answer per prompt, and chunk KV over all prompts as long as it fits the
memory that it may take. Knows no method by name but full attention and reuse.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice, zip_longest
from typing import Final, NamedTuple

import torch
from torch import Tensor

from kvweave.kvstore.memory_store import MemoryStore
from kvweave.models.adapter import Adapter
from kvweave.models.chat_template import ANSWER_LEAD
from kvweave.recipes.context import ChunkList, Ids
from kvweave.recipes.features import FeatureExtractor
from kvweave.recipes.methods import recipe_named
from kvweave.recipes.prepare import Prepare
from kvweave.recipes.recipe import Recipe, run
from kvweave.recipes.request import PrefillResult
from kvweave.types import TokenizedPrompt
from kvweave_lab.eval.metrics import METRICS
from kvweave_lab.eval.natural.outcomes import NO_CONTEXT_LABEL, NaturalLog, NaturalOutcome
from kvweave_lab.eval.natural.prompts import MAX_NEW_TOKENS, NaturalPrompt, no_context
from kvweave_lab.eval.outcomes import FULL, Label
from kvweave_lab.eval.preparation import prepare_prompt, simulates_requests
from kvweave_lab.eval.replies import generate_together
from kvweave_lab.eval.runner import Candidate
from kvweave_lab.statistics import kl_divergence

KV_BYTES: Final = 4_000_000_000
"""Chunk KV that stays in memory for the next prompts; when it takes more, all of it is dropped."""

_ISOLATED: Final = "isolated"


class _Answer(NamedTuple):
    """The logits at each token of the reference answer (T, vocab), the generated text, and the computed context tokens."""

    logits: Tensor
    text: str | None
    rows: int


class _Truth(NamedTuple):
    """Full attention's answer, and the token ids of the reference answer."""

    answer: _Answer
    reference: tuple[int, ...]


class NaturalRunner:
    """Runs candidates on prompts.

    Args:
        adapter: the model.
        corpus: all chunks, for preparations that look at other chunks.
        log: where outcomes are looked up first and written to.
        system: the prompts' instruction.
        answers: whether answers are generated too.
        kv_bytes: the most memory that chunk KV takes between two prompts.
    """

    def __init__(
        self,
        adapter: Adapter,
        corpus: ChunkList,
        log: NaturalLog,
        *,
        system: str | None = None,
        answers: bool = False,
        kv_bytes: int = KV_BYTES,
    ) -> None:
        self._adapter, self._corpus, self._log = adapter, corpus, log
        self._system, self._answers, self._kv_bytes = system, answers, kv_bytes
        self._full = Candidate(recipe_named(FULL), 1.0)
        self.shared: dict[str, MemoryStore] = {}
        self._simulated: list[tuple[Prepare, tuple[FeatureExtractor, ...], MemoryStore]] = []

    def outcomes(self, prompt: NaturalPrompt, candidates: Sequence[Candidate]) -> Iterator[NaturalOutcome]:
        """Yield full attention's outcome, the one without context, and every candidate's; compute what the log lacks."""
        wanted = {self._full.label: self._full, NO_CONTEXT_LABEL: None}
        wanted |= {each.label: each for each in candidates if each.recipe.name != FULL}
        missing = {label for label in wanted if self._log.get((prompt.name, label)) is None}
        if missing:
            self._compute(prompt, wanted, missing)
        for label in wanted:
            found = self._log.get((prompt.name, label))
            assert found is not None
            yield found

    def _compute(
        self, prompt: NaturalPrompt, wanted: dict[Label, Candidate | None], missing: set[Label]
    ) -> None:
        """Add what is missing to the log; full attention is computed again if others are compared with it."""
        began = time.monotonic()
        reference = reference_ids(self._adapter, prompt)
        answer = self._answer(self._full, prompt.tokens, MemoryStore(), reference)
        truth = _Truth(answer, reference)
        try:
            for label, candidate in wanted.items():
                if label not in missing:
                    continue
                if candidate is not self._full:
                    began = time.monotonic()
                    answer = self._candidate_answer(candidate, prompt, reference)
                outcome = _outcome(prompt, label, answer, truth)
                self._log.add(replace(outcome, took_s=time.monotonic() - began))
        finally:
            self._simulated.clear()
            if sum(store.used_bytes for store in self.shared.values()) > self._kv_bytes:
                self.shared.clear()

    def _candidate_answer(
        self, candidate: Candidate | None, prompt: NaturalPrompt, reference: Sequence[int]
    ) -> _Answer:
        """Return the answer of a candidate; None is full attention without context."""
        if candidate is None:
            alone = no_context(self._adapter, prompt.question, self._system)
            return self._answer(self._full, alone, MemoryStore(), reference)
        store = self._store(candidate.recipe, prompt)
        return self._answer(candidate, prompt.tokens, store, reference)

    def _answer(
        self, candidate: Candidate, prompt: TokenizedPrompt, store: MemoryStore, reference: Sequence[int]
    ) -> _Answer:
        result = run(
            candidate.recipe,
            self._adapter,
            store,
            prompt,
            ratio=candidate.ratio,
            coverage=candidate.coverage,
        )
        logits = forced_logits(self._adapter, result, reference)
        return _Answer(logits, self._text(result, prompt), _computed_tokens(result))

    def _text(self, result: PrefillResult, prompt: TokenizedPrompt) -> str | None:
        if not self._answers:
            return None
        result.kv_cache.truncate_appended(prompt.tokens)  # the reference answer
        start = (result.kv_cache, prompt.token_ids, result.logits)
        (reply,) = generate_together(self._adapter, [start], MAX_NEW_TOKENS, prompt.reply)
        return reply.text.strip()

    def _store(self, recipe: Recipe, prompt: NaturalPrompt) -> MemoryStore:
        """Return a store with what the recipe prepares and extracts of the prompt's chunks.

        Entries that depend on nothing but the library are kept for the next prompts. Simulated requests depend on the
        prompt's other chunks and may leave exact KV, so that their entries are for this prompt and these recipes only.
        """
        shared = self.shared.setdefault(self._group(recipe.prepare, prompt), MemoryStore())
        if not simulates_requests(recipe):
            prepare_prompt(self._adapter, shared, prompt.tokens, recipe, self._corpus)
            return shared
        extractors = recipe.select.extractors
        for prepare, extracted, store in self._simulated:
            if (prepare, extracted) == (recipe.prepare, extractors):
                return store
        store = MemoryStore(shared)
        others = self._other_chunks(prompt)
        prepare_prompt(self._adapter, store, prompt.tokens, recipe, self._corpus, others)
        self._simulated.append((recipe.prepare, extractors, store))
        return store

    def _group(self, prepare: Prepare, prompt: NaturalPrompt) -> str:
        """Name the preparations that may share a store: those that leave isolated KV in the same storage.

        A recipe uses isolated KV as exact where its chunk comes first, and must not find that of another preparation.
        """
        prefix = prompt.tokens.ids(prompt.tokens.spans[0])
        kinds = [each.kind for each in prepare.provenances(self._adapter, prefix, 1)]
        isolated = any(kind.startswith(_ISOLATED) for kind in kinds)
        return f"{_ISOLATED} {prepare.storage}" if isolated else repr(prepare)

    def _other_chunks(self, prompt: NaturalPrompt) -> list[Ids]:
        """Return as many other chunks as the prompt has: the nearest of each of its chunks, then the second of each, …"""
        own = [prompt.tokens.ids(span) for span in prompt.tokens.spans if span.kind == "chunk"]
        ranked = chain.from_iterable(zip_longest(*(self._corpus.similar(ids, len(own)) for ids in own)))
        others = dict.fromkeys(ids for ids in ranked if ids is not None and ids not in own)
        return list(islice(others, len(own)))


def reference_ids(adapter: Adapter, prompt: NaturalPrompt) -> tuple[int, ...]:
    """Return the token ids of the reference answer, its first spelling, as they follow the prompt.

    Empty for a question without an answer: full attention's most likely first token is then the reference.
    """
    if not prompt.question.answers:
        return ()
    answer, tokens, template = prompt.question.answers[0], prompt.tokens, adapter.template
    if not template.decode(tokens.token_ids[tokens.user_rows[1] :]).endswith(ANSWER_LEAD):
        return template.tokenize(answer)  # behind a chat template
    lead = template.tokenize(ANSWER_LEAD)
    joined = template.tokenize(f"{ANSWER_LEAD} {answer}")
    return joined[len(lead) :] if joined[: len(lead)] == lead else template.tokenize(f" {answer}")


def forced_logits(adapter: Adapter, result: PrefillResult, reference: Sequence[int]) -> Tensor:
    """Return the logits at each token of a reference answer, (T, vocab), given the right tokens before it."""
    if len(reference) < 2:
        return result.logits
    return torch.cat([result.logits, adapter.verify_draft(result.kv_cache, reference[:-1])])


def _computed_tokens(result: PrefillResult) -> int:
    chunks = (span for span in result.plan.spans if span.kind == "chunk")
    return sum(span.tokens if span.origin == "fresh" else span.recomputed_tokens for span in chunks)


def _outcome(prompt: NaturalPrompt, label: Label, answer: _Answer, truth: _Truth) -> NaturalOutcome:
    recipe, ratio, coverage = label
    question, right = prompt.question, truth.answer.logits
    wanted = (
        right[:1].argmax(-1) if not truth.reference else torch.tensor(truth.reference, device=right.device)
    )
    likely = answer.logits.double().log_softmax(-1).gather(1, wanted[:, None])
    scored = _scores(answer.text, question.answers) if answer.text is not None and question.answers else {}
    return NaturalOutcome(
        prompt=prompt.name,
        question=question.id,
        kind=question.kind,
        context_tokens=prompt.context_tokens,
        chunk_tokens=sum(span.tokens for span in prompt.tokens.spans if span.kind == "chunk"),
        evidence=prompt.evidence,
        recipe=recipe,
        ratio=ratio,
        coverage=coverage,
        nll=-float(likely.mean()),
        first_kl=kl_divergence(right[0], answer.logits[0]),
        kl=kl_divergence(right, answer.logits) / len(right),
        same_first=bool(right[0].argmax() == answer.logits[0].argmax()),
        rows=answer.rows,
        answer=answer.text,
        **scored,
    )


def _scores(text: str, references: Iterable[str]) -> dict[str, float]:
    wanted = tuple(references)
    return {
        "f1": METRICS["f1_first_line"](text, wanted),
        "contains": METRICS["string_match_part"](text, wanted),
    }
