"""Exact prefix reuse: the tree of paths."""

from kvweave.recipes.match import MatchExactPath
from kvweave.recipes.prepare import NotPrepared
from kvweave.recipes.recipe import Recipe


def prefix() -> Recipe:
    """Reuse only what was computed behind exactly the same earlier text; remember what is computed.

    Paper: RAGCache's knowledge tree; PerCache §4.1.1.
    Idea: a node is one chunk's KV under one exact path of earlier chunks, so its rows equal full attention's.
    Parameters: none.
    Differs from the paper: nodes are keyed by a digest of their path instead of linked, persist on disk, and
        stay usable when a parent was evicted. Chunks are tokenized on their own, so ids cannot differ at
        boundaries and no tokens need to be dropped (PerCache App. B.2 needs that).
    Relations: exact, unlike every position-independent recipe, but useless as soon as the order changes.
    Measured: see the methods page; time in docs/ttft.md.
    """
    return Recipe("prefix", prepare=NotPrepared(), match=MatchExactPath())
