"""What is stored of a chunk behind other chunks, with what was noted about each version."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvweave.models.adapter import Adapter
from kvweave.recipes.chunk_features import Record
from kvweave.recipes.context import Ids, Workshop
from kvweave.recipes.prepare import Isolated, Prepare, Prepared
from kvweave.recipes.simulated_requests import NotedAttention, Rehearsed, attention_making, noted_attention
from kvweave.recipes.state import PrefillRequest
from kvweave.types import Making


@dataclass(frozen=True, slots=True)
class Version:
    """Exact KV of a chunk: how it was made, the digests of the chunks before it then, and its attention then."""

    making: Making
    behind: tuple[str, ...]
    attention: NotedAttention


def stored_versions(request: PrefillRequest, spans: Sequence[int]) -> list[list[Version]]:
    """For each of some chunks of a prompt what is stored behind the same system prefix and other chunks.

    Those without a note are left out. Reads the notes, and no KV.
    """
    ids = [request.prompt.ids(request.prompt.spans[number]) for number in spans]
    listed = request.store.versions(request.adapter.fingerprint, ids)
    wanted = [
        (number, making)
        for number, made in enumerate(listed)
        for making in made
        if making.exact and chunks_behind(request, making)
    ]
    notes = request.store.find_notes(
        request.adapter.fingerprint, [(ids[number], attention_making(making)) for number, making in wanted]
    )
    found: list[list[Version]] = [[] for _ in ids]
    for (number, making), note in zip(wanted, notes, strict=True):
        behind = chunks_behind(request, making)
        attention = noted_attention(note, len(behind))
        if attention is not None:
            found[number].append(Version(making, behind, attention))
    return found


def chunks_behind(request: PrefillRequest, making: Making) -> tuple[str, ...]:
    """Digests of the chunks that KV made so stood behind; none if it did not stand behind this prompt's prefix."""
    prefix = request.prefix_context
    return making.context[len(prefix) :] if making.context[: len(prefix)] == prefix else ()


@dataclass(frozen=True, slots=True)
class Observed(Prepare):
    """Exact KV behind other chunks, at most `most` versions of each; the isolated one is the version behind none.

    In a prompt, a version v of a chunk is worth the more the more of its attention went to chunks that stand before it
    here as well: with E the chunks before it here, E(v) those before it when v was made, and a(v, p) the share of
    attention that its tokens paid to chunk p then,

        value(v) = Σ a(v, p) over p in E(v) ∩ E  −  Σ a(v, p) over p in E(v) without E

    which is 0 for the isolated one. The best version is taken; in a tie the one whose context's digests come first.
    """

    most: int = 5
    rehearsals: int = 3

    def makings(self, adapter: Adapter, prefix: Ids, chunk_tokens: int) -> tuple[Making, ...]:
        """The isolated one: it is known before any other."""
        return Isolated().makings(adapter, prefix, chunk_tokens)

    def make(self, shop: Workshop, chunk: Ids) -> Prepared:
        """As Isolated."""
        return Isolated().make(shop, chunk)

    @property
    def records(self) -> tuple[Record, ...]:
        """Rehearsals that keep their KV."""
        return (Rehearsed(self.rehearsals, most_versions=self.most),)

    @property
    def most_versions(self) -> int | None:
        """Of each chunk."""
        return self.most

    def accepted(self, request: PrefillRequest, spans: Sequence[int]) -> list[tuple[Making, ...]]:
        """All versions behind this prompt's system prefix, the best first; one query for them, one for their notes."""
        isolated = Isolated().accepted(request, spans)
        found = []
        for number, alone, versions in zip(spans, isolated, stored_versions(request, spans), strict=True):
            here = frozenset(request.chunks_before(number))
            valued = [(_value(version, here), version.making) for version in versions]
            valued += [(0.0, making) for making in alone]
            valued.sort(key=lambda each: (-each[0], each[1].context))
            found.append(tuple(making for _, making in valued))
        return found


def _value(version: Version, here: frozenset[str]) -> float:
    paid = zip(version.behind, version.attention.inter.mean(dim=1).tolist(), strict=True)
    return math.fsum(share if chunk in here else -share for chunk, share in paid)
