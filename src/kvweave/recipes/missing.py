"""Which chunks of a prompt no stored KV can stand for, by the catalogue alone: nothing is read, no look-up counted."""

from kvweave.recipes.recipe import Recipe
from kvweave.recipes.request import PrefillRequest


def absent_chunks(recipe: Recipe, request: PrefillRequest) -> list[int]:
    """The numbers of those spans of the prompt, in order."""
    spans = request.prompt.spans
    chunks = [number for number, span in enumerate(spans) if span.kind == "chunk"]
    by_path = "chunk" in recipe.match.remembers
    asked = [
        (number, provenance)
        for number, accepted in zip(chunks, recipe.prepare.accepted(request, chunks), strict=True)
        for provenance in (*([request.exact_provenance(number)] if by_path else []), *accepted)
    ]
    named = [(request.digests[number], provenance) for number, provenance in asked]
    held = request.store.has_many(request.adapter.fingerprint, named)
    there = {number for (number, _), is_held in zip(asked, held, strict=True) if is_held}
    return [number for number in chunks if number not in there]
