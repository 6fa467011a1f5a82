"""A draft of an answer, checked by the model in one pass instead of being decoded token by token (speculative decoding).

An answer to a question that is near the one asked, and perhaps another, must not be given; but where the model would say the
same, it is there already. The draft's tokens are run as rows of one pass once decoding has come to its first one, and hold as
far as each is what decoding would have chosen. A draft that begins wrong costs nothing, one that goes wrong later the rows beyond.
"""

from collections.abc import Sequence

from torch import Tensor

from kvweave.core import Decoding
from kvweave.engine.holding import Holding
from kvweave.models.adapter import Adapter


def drafts_of(adapter: Adapter, text: str) -> list[tuple[int, ...]]:
    """Token ids of an earlier reply's text, with a space before it and without: replies are kept without."""
    return [adapter.template.text_ids(each) for each in (text, f" {text}")]


class Drafted:
    """KV of a text that grows, as `Holding`, with a draft of how it goes on. For greedy decoding, on a canvas.

    Args:
        adapter: the model.
        held: what holds the prompt.
        prompt_tokens: how many tokens that is.
        drafts: what the reply may be, without the token that ends it, the likeliest first: the first that begins as the reply
            does is checked.

    Attributes:
        foretold: how many of the draft's tokens the text has in the end, behind which nothing had to be decoded.
    """

    def __init__(
        self, adapter: Adapter, held: Holding, prompt_tokens: int, drafts: Sequence[Sequence[int]]
    ) -> None:
        self._adapter, self._held = adapter, held
        self._prompt_tokens = prompt_tokens
        self._drafts = list(map(list, drafts))
        self._checked: Tensor | None = None  # logits behind each token of the draft that is left, (k, vocab)
        self.foretold = 0

    def advance(self, token_ids: Sequence[int]) -> Tensor:
        """The logits (1, vocab) that follow `token_ids`, of which all but the last were asked about before."""
        said = list(token_ids[self._prompt_tokens :])
        self._drafts = [draft for draft in self._drafts if draft[: len(said)] == said]
        if not self._drafts:
            self._give_up(len(said))
        elif self._checked is None:
            self._check(self._drafts[0])
        if self._checked is None:
            return self._held.advance(token_ids)
        self.foretold = len(said)
        return self._checked[len(said) - 1][None]

    @property
    def cost(self) -> Decoding | None:
        """As `Holding`."""
        return self._held.cost

    def _check(self, draft: list[int]) -> None:
        """Run a draft behind the prompt, and no other one; none where decoding would change frequencies on the way."""
        self._drafts = []
        lengths = (self._prompt_tokens + 1, self._prompt_tokens + len(draft))
        if len({*map(self._adapter.rope_regime, lengths)}) == 1:
            self._drafts = [draft]
            self._checked = self._adapter.follow(self._held.canvas, draft)

    def _give_up(self, said: int) -> None:
        """Forget what a draft has left on the canvas from the reply's last token on."""
        if self._checked is not None:
            self._held.canvas.shrink(self._prompt_tokens + said - 1)
        self._checked = None
