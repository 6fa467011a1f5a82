"""What is stored of a chunk behind other chunks, with what was noted about each version."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvweave.core import Making
from kvweave.recipes.chunk_attention import NotedAttention, attention_making, noted_attention
from kvweave.recipes.request import PrefillRequest


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
