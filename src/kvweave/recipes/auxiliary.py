"""A small second model that reads the chunks beside the one that answers, to tell where a question looks (CacheClip).

Its KV of a chunk is made at indexing time and stored as a note about the chunk. Knows nothing of what is made of the
attention.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import ClassVar, Self

import torch
from torch import Tensor

from kvweave.kvstore.keys import digest_tokens
from kvweave.models.adapter import Adapter
from kvweave.models.fused_cache import PlacedSpan
from kvweave.models.hooks import AttentionProbe
from kvweave.models.loading import AUXILIARY_NAME, load_model
from kvweave.ops.scores import Offsets
from kvweave.recipes.context import Ids, PrepareContext
from kvweave.recipes.entries import StoreEntry
from kvweave.recipes.prepare import feature_bytes, kv_bytes
from kvweave.types import ChunkFeature, ChunkKV, KVProvenance, Prompt


class Auxiliary:
    """An auxiliary model with the KV of its system prefix, which every chunk is read behind (CacheClip §3.1).

    The prefix is its template's default instruction, whatever the user's is: it is the one that it was trained
    behind, and one reading of a chunk then serves all prompts.
    """

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter
        self.prefix = adapter.encode(adapter.template.prefix_ids(None))

    def tokens(self, text: str) -> tuple[Ids, Offsets]:
        """A chunk's ids and their characters in text and separator; of one that there is no room for, its beginning."""
        ids = self.adapter.template.chunk_ids(text)
        room = self.adapter.geometry.context_tokens - self.prefix.tokens
        return ids[:room], self.adapter.template.align(ids, text)[:room]

    def read(self, text: str) -> tuple[ChunkKV, Offsets]:
        """KV of a chunk's `tokens` behind the prefix, and their characters."""
        ids, offsets = self.tokens(text)
        return self.adapter.encode(ids, self.prefix), offsets

    def attention(self, chunks: Sequence[ChunkKV], question: str) -> list[Tensor]:
        """How much a question attends in the last layer to the tokens of each chunk, (S,) each, float32.

        Every chunk is looked at in a pass of its own, prefix ++ chunk ++ question, of which only the question is
        computed; all passes are one call of the model. Weights of the question's own words, the template's around
        it left out, averaged over rows and heads. Their softmax runs over all that a row sees in its pass.
        """
        ids, asked = self.question(question)
        probes, passes = [], []
        for chunk in chunks:
            before = (*self.prefix.token_ids, *chunk.token_ids)
            rows = torch.arange(len(before), len(before) + len(ids))
            probe = AttentionProbe(rows[asked], layers={self.adapter.geometry.layers - 1})
            plan = self.adapter.rows(rows)
            plan.hooks.append(probe)
            spans = [PlacedSpan(self.prefix, 0, 0), PlacedSpan(chunk, self.prefix.tokens, self.prefix.tokens)]
            passes.append((self.adapter.new_cache(len(before) + len(ids), spans), (*before, *ids), plan))
            probes.append(probe)
        self.adapter.compute_packed(passes)
        inside = [slice(self.prefix.tokens, self.prefix.tokens + chunk.tokens) for chunk in chunks]
        return [probe.weights[0, own].cpu() for probe, own in zip(probes, inside, strict=True)]

    def question(self, question: str) -> tuple[tuple[int, ...], slice]:
        """Ids of what follows the chunks, and where in them the user's words stand; everything where there are none."""
        prompt = self.adapter.template.render(Prompt(question))
        span, (start, end) = prompt.spans[-1], prompt.user_rows
        return prompt.ids(span), slice(start - span.start, end - span.start) if end > start else slice(None)


@cache
def auxiliary_named(name: str | None) -> Auxiliary:
    """The model of this name, as `load_model` takes it, ready to read; None is the one that ships with kvweave.

    Loaded once per process, when it is first needed, and on the CPU wherever the model that answers is (CacheClip §3.6):
    a folder that is written again is read anew by the next process.
    """
    return Auxiliary(load_model(name or AUXILIARY_NAME, device="cpu"))


@dataclass(frozen=True, slots=True)
class Reading:
    """A chunk as both models have it: the auxiliary's KV (S′ tokens), and the characters of both models' tokens.

    Characters are counted in the chunk's text and the separator behind it, `characters` in all.
    """

    kv: ChunkKV
    auxiliary_offsets: Offsets
    offsets: Offsets
    characters: int

    @classmethod
    def of(cls, feature: ChunkFeature) -> Self:
        """From what was stored."""
        kv = ChunkKV(tuple(feature.tensors["auxiliary_ids"].tolist()), feature.tensors["auxiliary_kv"])
        seen, offsets = feature.tensors["auxiliary_offsets"].tolist(), feature.tensors["offsets"].tolist()
        return cls(kv, seen, offsets, max([1, *(end for _, end in (*seen, *offsets))]))


@dataclass(frozen=True, slots=True)
class AuxiliaryExtractor:
    """What the auxiliary model of this name (None: the shipped one) keeps of every chunk.

    A note with `auxiliary_kv` (L, 2, G, S′, D), `auxiliary_ids` (S′,), `auxiliary_offsets` (S′, 2) and `offsets` (S, 2).
    """

    name: str | None = None

    together: ClassVar[bool] = False

    def provenance(self, adapter: Adapter, prefix: Ids, chunk_tokens: int) -> KVProvenance:
        """Named by the auxiliary's digest, so that another one, or the same one trained further, finds nothing."""
        auxiliary = auxiliary_named(self.name)
        kind = f"auxiliary-{auxiliary.adapter.fingerprint.digest}"
        return KVProvenance(kind, (digest_tokens(auxiliary.prefix.token_ids),), exact=False)

    def make(self, ctx: PrepareContext, chunks: Sequence[Ids]) -> Iterator[StoreEntry]:
        """Chunk by chunk."""
        for chunk in chunks:
            provenance = self.provenance(ctx.adapter, ctx.prefix, len(chunk))
            yield StoreEntry(self.feature(ctx.adapter, chunk), provenance, (digest_tokens(chunk),))

    def bytes(self, adapter: Adapter, chunk_tokens: int) -> int:
        """The auxiliary's KV, as if it cut a text into as many tokens, and characters and ids of both models' tokens."""
        return kv_bytes(auxiliary_named(self.name).adapter, chunk_tokens) + feature_bytes(chunk_tokens, 6)

    def feature(self, adapter: Adapter, chunk: Ids) -> ChunkFeature:
        """One pass of the auxiliary model over the chunk's text; `adapter` is the model that answers."""
        auxiliary = auxiliary_named(self.name)
        text = adapter.template.chunk_text(chunk)
        offsets = adapter.template.align(chunk, text)
        kv, seen = auxiliary.read(text)
        return ChunkFeature(
            tuple(chunk),
            {
                "auxiliary_kv": kv.kv,
                "auxiliary_ids": torch.tensor(kv.token_ids, dtype=torch.int64),
                "auxiliary_offsets": torch.tensor(seen, dtype=torch.int32),
                "offsets": torch.tensor(offsets, dtype=torch.int32),
            },
        )
