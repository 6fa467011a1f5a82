"""Compares a model with weights in fewer bits with the model as a knowledge base has it, on the same prompts.

A part of calibration that is done when it is asked for: it loads the model once more. The knowledge base keeps its weights,
since its stored KV and answers are of them.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from kvweave.engine.answering.settings import AskOptions
from kvweave.engine.background.greedy_reply import Reply
from kvweave.engine.state import Progress
from kvweave.engine.verdicts import WeightsTrial, interval
from kvweave.errors import InvalidRequest
from kvweave.kvstore.memory_store import MemoryStore
from kvweave.models.adapter import Adapter
from kvweave.models.precision import BITS
from kvweave.recipes.methods import recipe_named
from kvweave.types import TokenizedPrompt

_FULL: Final = "full"


def check_fewer(wanted: Sequence[str], own: str) -> None:
    """Raise InvalidRequest for bits of weights that are unknown, or not fewer than a knowledge base's own."""
    fewer = BITS[BITS.index(own) + 1 :] if own in BITS else ()
    for bits in wanted:
        if bits not in fewer:
            choice = f"try {' or '.join(fewer)}" if fewer else "there are no fewer to try"
            raise InvalidRequest(f"--try-weights {bits}: this knowledge base has {own} weights; {choice}")


def weights_trials(
    adapter: Adapter,
    load: Callable[[str], Adapter],
    prompts: Sequence[TokenizedPrompt],
    options: AskOptions,
    bits: Sequence[str],
    losses: tuple[int, int],
    progress: Progress,
) -> Iterator[WeightsTrial]:
    """Yield for each number of bits what the model keeps of its replies to the prompts, by full attention and greedily.

    Args:
        adapter: the model as the knowledge base has it.
        load: loads the same model with a number of bits; each is let go before the next.
        prompts: of the questions.
        options: how replies are decoded.
        bits: in the order to try.
        losses: how many first tokens and answers may differ.
        progress: told after each reply.

    Raises as `load`.
    """

    def replies(model: Adapter, stage: str) -> list[Reply]:
        found = []
        for done, prompt in enumerate(prompts, 1):
            found.append(Reply.of(model, MemoryStore(), recipe_named(_FULL), prompt, options))
            progress(stage, done, len(prompts))
        return found

    expected, count = replies(adapter, "answering with own weights"), len(prompts)
    for each in bits:
        pairs = list(zip(expected, replies(load(each), f"answering with {each} weights"), strict=True))
        first = sum(own.first_token == other.first_token for own, other in pairs)
        answers = sum(own.text == other.text for own, other in pairs)
        keeps = count - first <= losses[0] and count - answers <= losses[1]
        yield WeightsTrial(
            each, count, first, answers, interval(first, count), interval(answers, count), keeps
        )
