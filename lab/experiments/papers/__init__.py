"""Claims of papers, one file each: how a claim is measured, and what the numbers say about it."""

from collections.abc import Mapping

from papers import cacheclip_parts, chunk_size, crowding, fragments, fusionrag_parts, heads, neighbours
from papers.claim import Claim

CLAIMS: Mapping[str, Claim] = {
    module.CLAIM.name: module.CLAIM
    for module in (fragments, heads, crowding, neighbours, cacheclip_parts, fusionrag_parts, chunk_size)
}
"""Claims by name, in the order of the page."""
