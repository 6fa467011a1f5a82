"""ProphetKV: recompute the tokens that the question attends to."""

from kvweave.recipes.recipe import Recipe
from kvweave.recipes.select import QuestionAttention, TopScores


def prophetkv() -> Recipe:
    """Run the question over stale KV, recompute the tokens it attends to, run it again.

    Paper: ProphetKV (arXiv 2602.02579) §4 (two stages; eq. 7 fuses the layers).
    Idea: the question's own attention over reused KV shows what the answer will depend on, if every layer counts:
        single layers miss tokens that others attend to.
    Parameters: ratio 0.2.
    Differs from the paper: fresh chunks are computed in both stages; keys are stored before rotation.
    Relations: `fusionrag` uses the last layer alone, with a softmax for each chunk; `cacheblend` selects by how far KV is off and
        not by what the question needs.
    """
    return Recipe("prophetkv", select=TopScores(QuestionAttention()), ratio=0.2)
