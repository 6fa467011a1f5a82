"""Runs recipes on prompts of the natural benchmark and compares them with full attention on the same prompt.

What recipes share is computed once: full attention's answer per prompt, and chunk KV over all prompts and runs that share
stores. A recipe's answer is generated from the first token on that full attention would not choose. Knows no method by name
but full attention and reuse.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, groupby, islice, takewhile, zip_longest
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from kvweave.answering.generation import Decoded
from kvweave.errors import InvalidRequest
from kvweave.kvstore.kv_store import KVStore
from kvweave.kvstore.memory_store import MemoryStore
from kvweave.models.adapter import Adapter
from kvweave.models.chat_template import ANSWER_LEAD
from kvweave.models.fused_cache import FusedCache
from kvweave.recipes.context import ChunkList, Ids
from kvweave.recipes.features import FeatureExtractor
from kvweave.recipes.methods import recipe_named
from kvweave.recipes.prepare import Prepare
from kvweave.recipes.recipe import Recipe, run
from kvweave.recipes.request import PrefillResult
from kvweave.types import TokenizedPrompt
from kvweave_lab.eval.metrics import METRICS
from kvweave_lab.eval.natural.outcomes import NO_CONTEXT_LABEL, NaturalLog, NaturalOutcome
from kvweave_lab.eval.natural.prompts import NaturalPrompt, no_context
from kvweave_lab.eval.outcomes import FULL, Label
from kvweave_lab.eval.preparation import PromptStore, prepare_prompt, simulates_requests
from kvweave_lab.eval.replies import generate_together
from kvweave_lab.eval.runner import Candidate
from kvweave_lab.statistics import kl_divergence

BATCH: Final = 12
"""Candidates whose answers are generated together; the KV of so many prompts is in memory at once."""

_ISOLATED: Final = "isolated"


class _Forced(NamedTuple):
    """The reply that a candidate begins with full attention's answer, up to the first token that it would not choose.

    Attributes:
        start: KV cache, token ids and the logits (1, vocab) after the common tokens.
        common: these tokens.
        kl: KL(full attention ‖ candidate) per token of full attention's answer and its end.
        agreed: share of these tokens that the candidate chooses too, each after full attention's before it.
        margins: how far the candidate's likeliest token is before the next one, in nats, at each common token and the one after.
    """

    start: tuple[FusedCache, Sequence[int], Tensor]
    common: tuple[int, ...]
    kl: float
    agreed: float
    margins: tuple[float, ...]


class _Measured(NamedTuple):
    """What a candidate's pass over a prompt gives.

    Attributes:
        label: the candidate's.
        logits: at each token of the reference answer (T, vocab).
        rows: computed context tokens.
        ttft_s: time to the first token.
        full_ttft_s: full attention's, shortly before.
        took_s: the time of all passes.
        forced: for the generated answer; None without answers.
    """

    label: Label
    logits: Tensor
    rows: int
    ttft_s: float
    full_ttft_s: float
    took_s: float
    forced: _Forced | None = None


class _Reply(NamedTuple):
    """Full attention's answer, and its logits (n, vocab) at each of the answer's tokens and, where it ended, at its end."""

    decoded: Decoded
    logits: Tensor


class _Truth(NamedTuple):
    """Full attention's logits at the reference answer (T, vocab), that answer's token ids, and its own answer if wanted."""

    logits: Tensor
    reference: tuple[int, ...]
    reply: _Reply | None


class NaturalRunner:
    """Runs candidates on prompts.

    Args:
        adapter: the model.
        corpus: all chunks, for preparations that look at other chunks.
        log: where outcomes are looked up first and written to.
        system: the prompts' instruction.
        answers: most tokens of a generated answer; 0 generates none.
        rounded: the model with other weights, by the name under which its full attention has its outcomes.
        open_store: opens the store of a group of preparations, whose name it is given; the caller closes it.

    `prepared_s` is the time that preparing chunks has taken.
    """

    def __init__(
        self,
        adapter: Adapter,
        corpus: ChunkList,
        log: NaturalLog,
        *,
        system: str | None = None,
        answers: int = 0,
        rounded: Mapping[str, Adapter] | None = None,
        open_store: Callable[[str], KVStore] = lambda group: MemoryStore(),
    ) -> None:
        self._adapter, self._corpus, self._log = adapter, corpus, log
        self._system, self._answers, self._open_store = system, answers, open_store
        self._full = Candidate(recipe_named(FULL), 1.0)
        self._rounded = rounded or {}
        self._shared: dict[str, KVStore] = {}
        self._ready: list[tuple[Prepare, tuple[FeatureExtractor, ...], KVStore]] = []
        self.prepared_s = 0.0

    def outcomes(self, prompt: NaturalPrompt, candidates: Sequence[Candidate]) -> Iterator[NaturalOutcome]:
        """Yield full attention's outcomes, with and without context, and every candidate's; compute what the log lacks.

        Raises InvalidRequest if the chunks of a prompt do not fit a store.
        """
        missing = self.missing(prompt, candidates)
        if missing:
            self._compute(prompt, missing)
        for label in self._wanted(candidates):
            found = self._log.get((prompt.name, label))
            assert found is not None
            yield found

    def missing(
        self, prompt: NaturalPrompt, candidates: Sequence[Candidate]
    ) -> dict[Label, Candidate | None]:
        """Return what `outcomes` would have to compute, by label; None is full attention of another kind."""
        wanted = self._wanted(candidates)
        return {label: each for label, each in wanted.items() if self._log.get((prompt.name, label)) is None}

    def _wanted(self, candidates: Sequence[Candidate]) -> dict[Label, Candidate | None]:
        wanted: dict[Label, Candidate | None] = {self._full.label: self._full, NO_CONTEXT_LABEL: None}
        wanted |= {(name, None, None): None for name in self._rounded}
        return wanted | {each.label: each for each in candidates if each.recipe.name != FULL}

    def _compute(self, prompt: NaturalPrompt, missing: Mapping[Label, Candidate | None]) -> None:
        """Add what is missing to the log; full attention is computed in any case, since others are compared with it."""
        try:
            began = time.monotonic()
            stores = {
                label: MemoryStore() if candidate is None else self._store(candidate.recipe, prompt)
                for label, candidate in missing.items()
                if label != self._full.label
            }
            self.prepared_s += time.monotonic() - began
            full, truth = self._truth(prompt)
            if self._full.label in missing:
                self._log.add(_outcome(prompt, full, truth, truth.reply and truth.reply.decoded))
            labels, full_ttft_s = list(stores), full.ttft_s
            for start in range(0, len(labels), BATCH):
                if start:
                    full_ttft_s = self._run(self._full, prompt.tokens, MemoryStore()).timing.ttft_s
                measured = [
                    self._measured(label, missing[label], prompt, stores[label], truth, full_ttft_s)
                    for label in labels[start : start + BATCH]
                ]
                self._add(prompt, measured, truth)
        finally:
            self._ready.clear()

    def _truth(self, prompt: NaturalPrompt) -> tuple[_Measured, _Truth]:
        """Return full attention's measurements, and what others are compared with."""
        began = time.monotonic()
        reference = reference_ids(self._adapter, prompt)
        result = self._run(self._full, prompt.tokens, MemoryStore())
        logits = forced_logits(self._adapter, result, reference)
        reply = self._reply(result, prompt.tokens) if self._answers else None
        rows, ttft_s = _computed_tokens(result), result.timing.ttft_s
        took_s = time.monotonic() - began
        return _Measured(self._full.label, logits, rows, ttft_s, ttft_s, took_s), _Truth(
            logits, reference, reply
        )

    def _reply(self, result: PrefillResult, prompt: TokenizedPrompt) -> _Reply:
        """Generate full attention's answer from a cache that may hold other tokens behind the prompt."""
        result.kv_cache.truncate_appended(prompt.tokens)
        start = (result.kv_cache, prompt.token_ids, result.logits)
        (decoded,) = generate_together(self._adapter, [start], self._answers, prompt.reply)
        result.kv_cache.truncate_appended(prompt.tokens)
        return _Reply(decoded, forced_logits(self._adapter, result, _with_end(decoded)))

    def _measured(
        self,
        label: Label,
        candidate: Candidate | None,
        prompt: NaturalPrompt,
        store: KVStore,
        truth: _Truth,
        full_ttft_s: float,
    ) -> _Measured:
        """Run a candidate; None is full attention without context, or with other weights."""
        began = time.monotonic()
        tokens, adapter = prompt.tokens, self._adapter_of(label)
        if label == NO_CONTEXT_LABEL:
            tokens = no_context(adapter, prompt.question, self._system)
        result = self._run(candidate or self._full, tokens, store, adapter)
        logits = forced_logits(adapter, result, truth.reference)
        forced = _forced(adapter, result, tokens, truth.reply) if truth.reply is not None else None
        took_s = time.monotonic() - began
        return _Measured(
            label, logits, _computed_tokens(result), result.timing.ttft_s, full_ttft_s, took_s, forced
        )

    def _adapter_of(self, label: Label) -> Adapter:
        return self._rounded.get(label[0], self._adapter)

    def _add(self, prompt: NaturalPrompt, measured: Sequence[_Measured], truth: _Truth) -> None:
        """Generate the rest of the answers together, and log the outcomes."""
        replies: Sequence[Decoded | None] = [None] * len(measured)
        if truth.reply is not None:
            replies = [
                reply
                for adapter, together in groupby(measured, lambda each: self._adapter_of(each.label))
                for reply in self._replies(adapter, [each.forced for each in together if each.forced], prompt)
            ]
        for each, reply in zip(measured, replies, strict=True):
            self._log.add(_outcome(prompt, each, truth, reply))

    def _replies(
        self, adapter: Adapter, forced: Sequence[_Forced], prompt: NaturalPrompt
    ) -> Sequence[Decoded]:
        return generate_together(
            adapter,
            [each.start for each in forced],
            self._answers,
            prompt.tokens.reply,
            [each.common for each in forced],
        )

    def _run(
        self, candidate: Candidate, prompt: TokenizedPrompt, store: KVStore, adapter: Adapter | None = None
    ) -> PrefillResult:
        return run(
            candidate.recipe,
            adapter or self._adapter,
            store,
            prompt,
            ratio=candidate.ratio,
            coverage=candidate.coverage,
        )

    def _store(self, recipe: Recipe, prompt: NaturalPrompt) -> KVStore:
        """Return a store with what the recipe prepares and extracts of the prompt's chunks.

        Entries that depend on nothing but the library are kept for the next prompts and runs. Simulated requests depend on the
        prompt's other chunks and may leave exact KV, so that their entries are for this prompt and these recipes only.
        """
        extractors = recipe.select.extractors
        for prepare, extracted, store in self._ready:
            if (prepare, extracted) == (recipe.prepare, extractors):
                return store
        group = self._group(recipe.prepare, prompt)
        if group not in self._shared:
            self._shared[group] = self._open_store(group)
        store = self._shared[group]
        if simulates_requests(recipe):
            store = PromptStore(store)
            others = self._other_chunks(prompt)
            prepare_prompt(self._adapter, store, prompt.tokens, recipe, self._corpus, others)
        else:
            prepare_prompt(self._adapter, store, prompt.tokens, recipe, self._corpus)
            self._read(store, recipe, prompt.tokens)
        self._ready.append((recipe.prepare, extractors, store))
        return store

    def _read(self, store: KVStore, recipe: Recipe, prompt: TokenizedPrompt) -> None:
        """Read the chunks' KV, so that the first candidate does not wait for the disk where the next ones do not.

        Raises InvalidRequest if a chunk's KV is not there: it was evicted to make room for another one's.
        """
        prefix = prompt.ids(prompt.spans[0])
        for ids in (prompt.ids(span) for span in prompt.spans if span.kind == "chunk"):
            provenances = recipe.prepare.provenances(self._adapter, prefix, len(ids))
            found = [store.get(self._adapter.fingerprint, ids, each) for each in provenances]
            if found and found[0] is None:
                raise InvalidRequest(
                    f"the KV of one prompt's chunks does not fit the {store.limit_bytes / 1e9:.3g} GB that prepared KV may"
                    " take; raise --kv-limit"
                )

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


def _forced(adapter: Adapter, result: PrefillResult, prompt: TokenizedPrompt, reply: _Reply) -> _Forced:
    """Follow full attention's answer in one pass, up to the first token that the candidate would not choose."""
    result.kv_cache.truncate_appended(prompt.tokens)  # the reference answer
    logits = forced_logits(adapter, result, _with_end(reply.decoded))
    ids = reply.decoded.ids
    common = _common(logits.argmax(-1).tolist(), ids)
    result.kv_cache.truncate_appended(prompt.tokens + common)
    last = min(common, len(logits) - 1)
    after = logits[last : last + 1].clone()  # not the rest of the logits
    likeliest = logits[: last + 1].float().topk(2).values
    return _Forced(
        (result.kv_cache, prompt.token_ids, after),
        tuple(ids[:common]),
        kl_divergence(reply.logits, logits) / len(logits),
        float((reply.logits.argmax(-1) == logits.argmax(-1)).double().mean()),
        tuple(round(each, 4) for each in (likeliest[:, 0] - likeliest[:, 1]).tolist()),
    )


def _computed_tokens(result: PrefillResult) -> int:
    chunks = (span for span in result.plan.spans if span.kind == "chunk")
    return sum(span.tokens if span.origin == "fresh" else span.recomputed_tokens for span in chunks)


def _with_end(decoded: Decoded) -> tuple[int, ...]:
    """Return the tokens of an answer and, if it ended, one more for its end, whose id does not matter."""
    return (*decoded.ids, 0) if decoded.finish_reason == "stop" else tuple(decoded.ids)


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the number of first tokens that are the same."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _outcome(
    prompt: NaturalPrompt, measured: _Measured, truth: _Truth, reply: Decoded | None
) -> NaturalOutcome:
    recipe, ratio, coverage = measured.label
    question, right, logits = prompt.question, truth.logits, measured.logits
    wanted = (
        right[:1].argmax(-1) if not truth.reference else torch.tensor(truth.reference, device=right.device)
    )
    likely = logits.double().log_softmax(-1).gather(1, wanted[:, None])
    answered = {}
    if reply is not None and truth.reply is not None:
        answered = _answered(reply, truth.reply.decoded, measured.forced, question.answers)
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
        first_kl=kl_divergence(right[0], logits[0]),
        kl=kl_divergence(right, logits) / len(right),
        same_first=bool(right[0].argmax() == logits[0].argmax()),
        rows=measured.rows,
        ttft_s=measured.ttft_s,
        full_ttft_s=measured.full_ttft_s,
        took_s=measured.took_s + (reply.seconds if reply is not None and measured.forced else 0.0),
        **answered,
    )


def _answered(
    reply: Decoded, full: Decoded, forced: _Forced | None, references: Sequence[str]
) -> dict[str, Any]:
    """Return the fields of an outcome about its answer; full attention's own has no `forced`."""
    text = reply.text.strip()
    same_tokens = _common(reply.ids, full.ids)
    return {
        "answer": text,
        "answer_kl": forced.kl if forced is not None else 0.0,
        "agreed": forced.agreed if forced is not None else 1.0,
        "margins": forced.margins if forced is not None else (),
        "answer_tokens": reply.tokens,
        "same_tokens": same_tokens,
        "same_answer": same_tokens == reply.tokens == full.tokens
        and reply.finish_reason == full.finish_reason,
        **(_scores(text, references) if references else {}),
    }


def _scores(text: str, references: Iterable[str]) -> dict[str, float]:
    wanted = tuple(references)
    return {
        "f1": METRICS["f1_first_line"](text, wanted),
        "contains": METRICS["string_match_part"](text, wanted),
    }
