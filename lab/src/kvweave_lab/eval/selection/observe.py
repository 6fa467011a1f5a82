"""One prompt observed twice, under full attention and over stale KV, and how its KV differs token by token.

The views hold what the two passes attended to, and the KV that they computed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvweave.answering.generation import end_tokens
from kvweave.errors import InvalidRequest
from kvweave.kvstore.kv_store import KVStore
from kvweave.models.adapter import Adapter
from kvweave.models.fused_cache import FusedCache, PlacedSpan
from kvweave.models.hooks import AttentionHook, AttentionProbe
from kvweave.recipes.recipe import Recipe, run
from kvweave.recipes.select import LayerVotes, voting_layers
from kvweave.types import ChunkKV, TokenizedPrompt
from kvweave_lab.eval.runner import HookedAttend
from kvweave_lab.scores import kv_deviation, residual_norms


@dataclass(frozen=True, slots=True)
class Context:
    """The n tokens of a prompt's chunks; separators belong to the chunk before them.

    Attributes:
        start: prompt position of the first; chunks follow each other without gaps.
        end: prompt position after the last.
        chunk: (n,) number of each token's chunk.
        offset: (n,) tokens before it in its chunk.
        lengths: (chunks,) tokens of each chunk.
    """

    start: int
    end: int
    chunk: Tensor
    offset: Tensor
    lengths: Tensor

    @property
    def tokens(self) -> int:
        """The number of tokens, n."""
        return self.end - self.start

    @property
    def depth(self) -> Tensor:
        """(n,) each token's place in its chunk, above 0 and below 1."""
        return (self.offset + 0.5) / self.lengths[self.chunk]


@dataclass(frozen=True, slots=True)
class Attended:
    """How much each layer's rows after the context attend to its n tokens, averaged over heads and rows; (L, n).

    Attributes:
        question: rows of the user's question, softmax over the context alone (ProphetKV stage I).
        rows: all rows after the context, template text included, softmax over the context alone.
        mass: rows of the user's question, softmax over all that they see: the weights of ProphetKV eq. 1-6.
        layers: the layers that see the whole context from these rows; selections use them alone (`recipes/select.py`).
            Where none does, windows are lifted for `question` and `rows`.
    """

    question: Tensor
    rows: Tensor
    mass: Tensor
    layers: tuple[int, ...]

    def fused(self, weights: Tensor) -> Tensor:
        """Return the mean of weights (L, n) over the layers that see the whole context, (n,)."""
        return weights[list(self.layers)].mean(0)


@dataclass(frozen=True, slots=True)
class FullView:
    """A prompt under full attention.

    Attributes:
        context: its chunks' tokens.
        attended: by the rows after the context.
        decoding: (L, n) by the decoded answer's tokens, softmax over the context alone.
        decoded: (n,) its mean over the layers that see the whole context from these tokens.
        inflow: (n,) by all rows of the prompt at the first layer, softmax over all that they see (KVShare's factor).
        kv_cache: K,V of all prompt positions.
        logits: (1, vocab) of the last prompt position.
        answer: token ids of the decoded answer.
    """

    context: Context
    attended: Attended
    decoding: Tensor
    decoded: Tensor
    inflow: Tensor
    kv_cache: FusedCache
    logits: Tensor
    answer: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StaleView:
    """A prompt's question over stale KV; `kv_cache` holds K,V of all positions."""

    attended: Attended
    kv_cache: FusedCache


def observe_full(adapter: Adapter, prompt: TokenizedPrompt, max_new_tokens: int) -> FullView:
    """Run an ordinary prefill, decode a greedy answer of at most `max_new_tokens`, and run its rows once more.

    An empty answer counts with its end token. Raises PromptTooLong.
    """
    adapter.check_length(prompt.tokens, max_new_tokens)
    context = context_of(prompt)
    probes = _QuestionProbes(adapter, prompt, context)
    every = AttentionProbe(torch.arange(prompt.tokens), layers={0})
    plan = adapter.rows(torch.arange(prompt.tokens))
    plan.hooks.extend([*probes.hooks, every])
    kv_cache = adapter.new_cache(prompt.tokens)
    logits = adapter.compute(kv_cache, prompt.token_ids, plan, capture=True)
    prefilled = adapter.extract_chunk_kv(kv_cache, prompt.token_ids, 0, prompt.tokens)
    kv_cache.capture = None
    answer = _greedy(adapter, kv_cache, logits, max_new_tokens)
    votes = voting_layers(adapter.geometry, context.start, prompt.tokens + len(answer) - 1)
    decoding = _decoding(adapter, prefilled, context, answer, votes)
    return FullView(
        context=context,
        attended=probes.attended(),
        decoding=decoding,
        decoded=decoding[list(votes.layers)].mean(0),
        inflow=every.weights[0, context.start : context.end].cpu(),
        kv_cache=kv_cache,
        logits=logits,
        answer=answer,
    )


def observe_stale(recipe: Recipe, adapter: Adapter, store: KVStore, prompt: TokenizedPrompt) -> StaleView:
    """Run the recipe's own match and place with nothing recomputed; chunks that the store lacks are computed."""
    probes = _QuestionProbes(adapter, prompt, context_of(prompt))
    probed = replace(recipe, attend=HookedAttend(recipe.attend, probes.hooks))
    result = run(probed, adapter, store, prompt, ratio=0.0)
    return StaleView(probes.attended(), result.kv_cache)


def context_of(prompt: TokenizedPrompt) -> Context:
    """Return the context of a prompt; raises InvalidRequest if it has none."""
    spans = [span for span in prompt.spans if span.kind == "chunk"]
    if not any(span.tokens for span in spans):
        raise InvalidRequest("a sample without chunks has no context to select from; leave it out")
    lengths = torch.tensor([span.tokens for span in spans])
    return Context(
        start=spans[0].start,
        end=spans[-1].end,
        chunk=torch.arange(len(spans)).repeat_interleave(lengths),
        offset=torch.cat([torch.arange(span.tokens) for span in spans]),
        lengths=lengths,
    )


@dataclass(frozen=True, slots=True)
class Differences:
    """The error of stale KV by layer and token; every tensor (L, n) on the CPU, n the context's tokens.

    Attributes:
        keys: squared deviation of the keys (FusionRAG eq. 7).
        values: squared deviation of the values (FusionRAG eq. 7).
        size: squared length of full attention's keys and values together, of which deviations are a share.
        shift: the values' deviation as a sum of absolute differences (KVShare's norm).
        residual: what a token that stays stale adds to the loss (ProphetKV eq. 5).
        stale_values: length of the stale values, ‖V′‖₂.
    """

    keys: Tensor
    values: Tensor
    size: Tensor
    shift: Tensor
    residual: Tensor
    stale_values: Tensor


def differences(full: FullView, stale: StaleView) -> Differences:
    """Compare the two views of one prompt; converts one layer's KV at a time to float32."""
    context = full.context
    by_layer = []
    for layer in range(len(full.kv_cache.layers)):
        keys, values = _context_kv(full.kv_cache, layer, context.start, context.end)  # each (G, n, D)
        old_keys, old_values = _context_kv(stale.kv_cache, layer, context.start, context.end)
        weights, old_weights = (view.attended.mass[layer].to(keys.device) for view in (full, stale))
        by_layer.append(
            (
                kv_deviation(keys, old_keys),
                kv_deviation(values, old_values),
                kv_deviation(keys, torch.zeros_like(keys)) + kv_deviation(values, torch.zeros_like(values)),
                (values.float() - old_values.float()).abs().sum(dim=(0, 2)),
                residual_norms(weights, values, old_weights, old_values),
                kv_deviation(old_values, torch.zeros_like(values)).sqrt(),
            )
        )
    return Differences(*(torch.stack(parts).cpu() for parts in zip(*by_layer, strict=True)))


class _QuestionProbes:
    """The three probes of an `Attended`."""

    def __init__(self, adapter: Adapter, prompt: TokenizedPrompt, context: Context) -> None:
        bounds = context.start, context.end
        user = torch.arange(*prompt.user_rows)
        self._votes = voting_layers(adapter.geometry, context.start, prompt.user_rows[1] - 1)
        lifted = self._votes.lift_windows
        self._question = AttentionProbe(user, columns=bounds, lift_windows=lifted)
        after = torch.arange(context.end, prompt.tokens)
        self._rows = AttentionProbe(after, columns=bounds, lift_windows=lifted)
        self._mass = AttentionProbe(user)
        self._bounds = slice(*bounds)

    @property
    def hooks(self) -> list[AttentionHook]:
        return [self._question, self._rows, self._mass]

    def attended(self) -> Attended:
        question, rows, mass = (probe.weights.cpu() for probe in (self._question, self._rows, self._mass))
        return Attended(question, rows, mass[:, self._bounds], self._votes.layers)


def _greedy(adapter: Adapter, kv_cache: FusedCache, logits: Tensor, max_new_tokens: int) -> tuple[int, ...]:
    """Return the answer's token ids without its end token, or that token alone for an empty answer."""
    ends = end_tokens(adapter)
    answer = [int(logits.argmax(dim=-1))]
    while len(answer) < max_new_tokens and answer[0] not in ends:
        token = int(adapter.step(kv_cache, answer[-1]).argmax(dim=-1))
        if token in ends:
            break
        answer.append(token)
    return tuple(answer)


def _decoding(
    adapter: Adapter, prefilled: ChunkKV, context: Context, answer: Sequence[int], votes: LayerVotes
) -> Tensor:
    """Return the attention of the answer's tokens when they are decoded, (L, n), from one pass over all of them."""
    start, end = prefilled.tokens, prefilled.tokens + len(answer)
    rows = torch.arange(start, end)
    probe = AttentionProbe(rows, columns=(context.start, context.end), lift_windows=votes.lift_windows)
    plan = adapter.rows(rows)
    plan.hooks.append(probe)
    kv_cache = adapter.new_cache(end, [PlacedSpan(prefilled, 0, 0)])
    adapter.compute(kv_cache, (*prefilled.token_ids, *answer), plan)
    return probe.weights.cpu()


def _context_kv(kv_cache: FusedCache, layer: int, start: int, end: int) -> tuple[Tensor, Tensor]:
    own = kv_cache.layers[layer]
    return own.keys[0, :, start:end], own.values[0, :, start:end]
