"""Chunk features: what is stored of a chunk beside its KV, for selectors and preparations to read.

Extractors compute features before any question; they are in `simulated_requests.py` and in the files of the
methods that read them. The attention of a version is recorded by the pass that computes its KV.
"""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from kvweave.models.engine import Engine
from kvweave.models.hooks import AttentionShares
from kvweave.recipes.context import Corpus, Ids, PrepareContext, StoreEntry
from kvweave.types import ChunkFeature, KVProvenance, TokenizedPrompt

_SHARES = "shares"

ENTRY_OVERHEAD_BYTES = 8192
"""A generous bound on an entry's header and token ids."""


class FeatureExtractor(Protocol):
    """Computes one feature per chunk, of several chunks at once because the feature may depend on the others.

    Inherit from it for its defaults.
    """

    @property
    def across_chunks(self) -> bool:
        """Whether a chunk's feature depends on which other chunks it is extracted with; by default not."""
        return False

    @abstractmethod
    def provenance(self, adapter: Engine, prefix: Ids, chunk_tokens: int) -> KVProvenance:
        """Return the provenance that the feature of a chunk of this length after a system prefix is stored under."""

    @abstractmethod
    def extract(self, ctx: PrepareContext, chunks: Sequence[Ids]) -> Iterator[StoreEntry]:
        """Yield the features of different chunks, and KV computed on the way that is worth storing; stores none of it.

        A chunk whose feature cannot be computed among the chunks of the corpus gets none, and is tried again when
        the corpus has changed.
        """

    def bytes(self, adapter: Engine, chunk_tokens: int) -> int:
        """Return about how many bytes of the store the entries of a chunk of this length take; by default a number per token."""
        return feature_bytes(chunk_tokens)


def placeholder(provenance: KVProvenance, corpus: Corpus) -> KVProvenance:
    """Return the provenance of the empty feature stored where none can be computed among a corpus' chunks."""
    return replace(provenance, kind=f"{provenance.kind}-unsaid", context=(*provenance.context, corpus.digest))


def feature_bytes(tokens: int, numbers: int = 1) -> int:
    """Return at most how many bytes a feature with `numbers` float32 numbers per token takes."""
    return 4 * tokens * numbers + ENTRY_OVERHEAD_BYTES


def attention_key(kv: KVProvenance) -> KVProvenance:
    """Return the provenance of the attention feature that belongs to KV of this provenance."""
    return replace(kv, kind="attention")


class AttentionRecorder:
    """Records, in a pass that computes whole chunks after exact rows, how each chunk's tokens attend.

    `hook` goes on the pass.

    Args:
        prompt: what the pass computes.
        chunks: the numbers of the chunks' spans; the pass computes all their rows.
    """

    def __init__(self, prompt: TokenizedPrompt, chunks: Sequence[int]) -> None:
        self._prompt = prompt
        spans = [prompt.spans[number] for number in chunks]
        self._rows = torch.cat([torch.arange(span.start, span.end) for span in spans])
        self.hook = AttentionShares(self._rows, [(span.start, span.end) for span in prompt.spans])

    def feature(self, number: int) -> ChunkFeature:
        """Return the attention of one of the chunks, as `attention_to_earlier` reads it; call it after the pass."""
        span = self._prompt.spans[number]
        inside = (self._rows >= span.start) & (self._rows < span.end)
        earlier = [n for n in range(1, number) if self._prompt.spans[n].tokens]
        shares = self.hook.shares.cpu()[inside][:, [0, *earlier, number]]  # (n, P + 2)
        return ChunkFeature(self._prompt.ids(span), {_SHARES: shares.T.contiguous()})


def attention_to_earlier(feature: ChunkFeature | None, earlier: int) -> Tensor | None:
    """Return the share of their attention that the n tokens of a version paid to each of P earlier chunks, (P, n).

    Averaged over layers and heads. None without a feature, or for one of another path than one of `earlier` chunks.
    """
    if feature is None or feature.tensors[_SHARES].shape[0] != earlier + 2:
        return None
    return feature.tensors[_SHARES][1:-1]  # the first is for the system prefix, the last for the chunk itself
