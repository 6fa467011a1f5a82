"""Baselines: full attention, exact reuse of whole paths, and reuse without recomputation."""

from kvweave.recipes.match import MatchExactPath, MatchNothing
from kvweave.recipes.prepare import NotPrepared
from kvweave.recipes.recipe import Recipe


def full() -> Recipe:
    """Ordinary prefill of the whole prompt.

    Paper: none; every paper's baseline.
    Idea: compute every row. The reference for quality and the denominator of every speed-up.
    Parameters: none; a ratio changes nothing.
    Differs from the paper: nothing to differ from.
    Relations: every recipe equals it at ratio 1.
    """
    return Recipe("full", prepare=NotPrepared(), match=MatchNothing(), ratio=1.0)


def prefix() -> Recipe:
    """Reuse only what was computed after exactly the same earlier text; store what is computed.

    Paper: RAGCache (arXiv 2404.12457), its knowledge tree; PerCache (arXiv 2601.11553) §4.1.1.
    Idea: a node is one chunk's KV after one exact path of earlier chunks, so its rows equal full attention's.
    Parameters: none.
    Differs from the paper: nodes are keyed by a digest of their path instead of linked, persist on disk, and
        stay usable when a parent was evicted. Chunks are tokenized on their own, so ids cannot differ at
        boundaries and no tokens need to be dropped (PerCache App. B.2 needs that).
    Relations: exact, unlike every position-independent recipe, but of no use when the order changes.
    """
    return Recipe("prefix", prepare=NotPrepared(), match=MatchExactPath())


def reuse() -> Recipe:
    """Chunks prefilled after the system prefix, moved to their positions, none recomputed.

    Paper: FusionRAG (arXiv 2601.12904) §3.1 eq. 5-6, its Full Reuse; TurboRAG (arXiv 2410.07590), Prompt Cache (arXiv
        2311.04934).
    Idea: one attention sink at the front of the prompt, none per chunk; the rest is moved unchanged.
    Parameters: none.
    Differs from the paper: KV computed after exactly the same text is preferred where there is any;
        the first chunk of a prompt therefore always counts as exact.
    Relations: cheapest of all. Unlike the selective recipes it cannot repair tokens whose meaning depends on another
        chunk.
    """
    return Recipe("reuse")
