"""ProphetKV: the question says which tokens matter."""

from kvweave.recipes.match import MatchPathThenChunk
from kvweave.recipes.recipe import Recipe
from kvweave.recipes.select import Highest, QuestionAttention


def prophetkv() -> Recipe:
    """Run the question over stale KV, recompute the tokens it attends to, run it again.

    Paper: ProphetKV §4 (two stages; eq. 7 fuses the layers).
    Idea: the question's own attention over reused KV already shows what the answer will rest on, if every layer is
        asked: single layers miss tokens that others look at.
    Parameters: ratio 0.2.
    Differs from the paper: fresh chunks are computed in both stages; keys are stored before rotation.
    Relations: `fusionrag` asks the last layer alone, without the other chunks; `cacheblend` asks how far KV is off and not
        what is needed.
    Measured: see the methods page.
    """
    return Recipe("prophetkv", match=MatchPathThenChunk(), select=Highest(QuestionAttention()), ratio=0.2)
