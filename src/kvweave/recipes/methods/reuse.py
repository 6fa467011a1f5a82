"""Full reuse of isolated chunks."""

from kvweave.recipes.match import MatchPathThenChunk
from kvweave.recipes.recipe import Recipe


def reuse() -> Recipe:
    """Chunks prefilled behind the system prefix, moved to where they stand, none recomputed.

    Paper: FusionRAG §3.1 eq. 5-6 (its Full Reuse); TurboRAG, PromptCache.
    Idea: one attention sink at the front of the prompt, none per chunk; the rest is moved as it is.
    Parameters: none.
    Differs from the paper: KV that was made behind exactly the same text is preferred where there is any;
        the first chunk of a prompt therefore always counts as exact.
    Relations: cheapest of all; cannot repair tokens that needed another chunk to be understood, which the
        selective recipes do.
    Measured: see the methods page; time in docs/ttft.md.
    """
    return Recipe("reuse", match=MatchPathThenChunk())
