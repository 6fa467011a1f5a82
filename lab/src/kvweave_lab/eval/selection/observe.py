"""One prompt seen twice: under full attention with its answer decoded, and over stale KV.

Keeps what the two passes attended to and the KV they left; compares nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvweave.kvstore.chunk_store import ChunkStore
from kvweave.models.adapter import Adapter
from kvweave.models.attention import AttentionHook
from kvweave.models.fused_cache import FusedCache, PlacedSpan
from kvweave.models.hooks import AttentionProbe
from kvweave.recipes.recipe import Recipe, run
from kvweave.types import ChunkKV, TokenizedPrompt
from kvweave_lab.eval.selection.context import Context, context_of
from kvweave_lab.eval.watched import Watched


@dataclass(frozen=True, slots=True)
class Attended:
    """How much each layer's rows behind the context attend to its n tokens, averaged over heads and rows; (L, n).

    Attributes:
        question: rows of the user's question, softmax over the context alone (ProphetKV stage I).
        rows: all rows behind the context, template text included, softmax over the context alone.
        mass: rows of the user's question, softmax over all they see: the weights of ProphetKV eq. 1-6.
    """

    question: Tensor
    rows: Tensor
    mass: Tensor


@dataclass(frozen=True, slots=True)
class StaleView:
    """A prompt's question run over stale KV; `kv_cache` holds K,V of all its positions."""

    attended: Attended
    kv_cache: FusedCache


@dataclass(frozen=True, slots=True)
class FullView:
    """A prompt under full attention.

    Attributes:
        context: where its context lies.
        attended: by the rows behind the context.
        decoding: (L, n) by the decoded answer's tokens, softmax over the context alone.
        inflow: (n,) by all rows of the prompt at the first layer, softmax over all they see (KVShare's factor).
        canvas: K,V of all prompt positions.
        logits: (1, vocab) of the last prompt position.
        answer: token ids of the decoded answer.
    """

    context: Context
    attended: Attended
    decoding: Tensor
    inflow: Tensor
    kv_cache: FusedCache
    logits: Tensor
    answer: tuple[int, ...]


def observe_full(adapter: Adapter, prompt: TokenizedPrompt, max_new_tokens: int) -> FullView:
    """One ordinary prefill, a greedy answer of at most that many tokens, and one pass over the answer's rows.

    An answer that ends before it starts counts with its end token. Raises PromptTooLong.
    """
    adapter.check_length(prompt.tokens, max_new_tokens)
    context = context_of(prompt)
    probes = _QuestionProbes(prompt, context)
    every = AttentionProbe(torch.arange(prompt.tokens), layers={0})
    plan = adapter.rows(torch.arange(prompt.tokens))
    plan.hooks.extend([*probes.hooks, every])
    kv_cache = adapter.new_cache(prompt.tokens)
    logits = adapter.compute(kv_cache, prompt.token_ids, plan, capture=True)
    prefilled = adapter.captured(kv_cache, prompt.token_ids, 0, prompt.tokens)
    kv_cache.capture = None
    answer = _greedy(adapter, kv_cache, logits, max_new_tokens)
    return FullView(
        context=context,
        attended=probes.attended(),
        decoding=_decoding(adapter, prefilled, context, answer),
        inflow=every.weights[0, context.start : context.end].cpu(),
        kv_cache=kv_cache,
        logits=logits,
        answer=answer,
    )


def observe_stale(recipe: Recipe, adapter: Adapter, store: ChunkStore, prompt: TokenizedPrompt) -> StaleView:
    """The recipe's own match and place, nothing recomputed; what the store lacks is computed."""
    probes = _QuestionProbes(prompt, context_of(prompt))
    watched = replace(recipe, attend=Watched(recipe.attend, probes.hooks))
    result = run(watched, adapter, store, prompt, ratio=0.0)
    return StaleView(probes.attended(), result.kv_cache)


class _QuestionProbes:
    """The three probes that make an `Attended`."""

    def __init__(self, prompt: TokenizedPrompt, context: Context) -> None:
        bounds = context.start, context.end
        user = torch.arange(*prompt.user_rows)
        self._question = AttentionProbe(user, columns=bounds)
        self._rows = AttentionProbe(torch.arange(context.end, prompt.tokens), columns=bounds)
        self._mass = AttentionProbe(user)
        self._bounds = slice(*bounds)

    @property
    def hooks(self) -> list[AttentionHook]:
        return [self._question, self._rows, self._mass]

    def attended(self) -> Attended:
        question, rows, mass = (probe.weights.cpu() for probe in (self._question, self._rows, self._mass))
        return Attended(question, rows, mass[:, self._bounds])


def _greedy(adapter: Adapter, kv_cache: FusedCache, logits: Tensor, max_new_tokens: int) -> tuple[int, ...]:
    """The answer's token ids without its end token, unless that is all there is."""
    ends = adapter.model.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    answer = [int(logits.argmax(dim=-1))]
    while len(answer) < max_new_tokens and answer[0] not in ends:
        token = int(adapter.step(kv_cache, answer[-1]).argmax(dim=-1))
        if token in ends:
            break
        answer.append(token)
    return tuple(answer)


def _decoding(adapter: Adapter, prefilled: ChunkKV, context: Context, answer: Sequence[int]) -> Tensor:
    """What the answer's tokens attended to when they were decoded, (L, n), from one pass over all of them."""
    start, end = prefilled.tokens, prefilled.tokens + len(answer)
    rows = torch.arange(start, end)
    probe = AttentionProbe(rows, columns=(context.start, context.end))
    plan = adapter.rows(rows)
    plan.hooks.append(probe)
    kv_cache = adapter.new_cache(end, [PlacedSpan(prefilled, 0, 0)])
    adapter.compute(kv_cache, (*prefilled.token_ids, *answer), plan)
    return probe.weights.cpu()
