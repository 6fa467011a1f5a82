"""What the papers saw, one file for each claim: what runs here to see it, and what the numbers then say."""

from collections.abc import Mapping

from papers import cacheclip_parts, chunk_size, crowding, fragments, fusionrag_parts, heads, neighbours
from papers.claim import Claim

CLAIMS: Mapping[str, Claim] = {
    module.CLAIM.name: module.CLAIM
    for module in (fragments, heads, crowding, neighbours, cacheclip_parts, fusionrag_parts, chunk_size)
}
"""By name, in the order of the page."""
