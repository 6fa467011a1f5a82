"""Training rows that are one long text each: what a turn asks for was said long before.

The texts are those of `kvweave_lab.eval.longtext`, from the train split. An answer's end is learned where it ends,
though the text goes on there, as it does in a conversation.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvweave.models.prompt import SEPARATOR
from kvweave_lab.eval.longtext import LONG_TASKS
from kvweave_lab.eval.longtext.telling import Reply, Teller
from kvweave_lab.eval.splits import TRAIN
from kvweave_lab.eval.world import World
from training.documents import training_haystack
from training.rows import COUNTED, LANGUAGE_SHARE, LANGUAGE_WEIGHT, RowMaker, Rows
from training.shape import Shape

FAR_WEIGHT, NEAR_WEIGHT = 1.5, 0.5


@dataclass(frozen=True, slots=True)
class LongShape(Shape):
    """Rows of long texts: `context` tokens, of which about `prompt` stand before the first turn; what is said of documents is void."""

    prompt: int = 256


def of_length(tokens: int) -> LongShape:
    """The shape of texts of so many tokens."""
    return LongShape(tokens, 0, (0, 0), (0, 0), sparse=0.0, easy=0.0)


class LongRowMaker(RowMaker):
    """Makes rows of documents as ever, and of long texts where the shape asks for them."""

    def write_row(self, made: Rows, row: int, shape: Shape) -> None:
        """Write one row of the shape into `made`."""
        if not isinstance(shape, LongShape):
            super().write_row(made, row, shape)
            return
        task = self.rng.choice(list(LONG_TASKS))
        teller = Teller(self.template, training_haystack(), TRAIN, self.rng)
        script = LONG_TASKS[task](World(self.rng, TRAIN))
        ids, _, replies = teller.tell(script, shape.prompt, shape.context)
        made.ids[row] = torch.tensor(ids[: shape.context])
        made.segments[row] = 0
        picked = torch.rand(shape.context, generator=torch.Generator().manual_seed(self.rng.getrandbits(32)))
        made.weights[row, 1:] = (picked[1:] < LANGUAGE_SHARE) * LANGUAGE_WEIGHT
        made.tokens += shape.context
        for reply in replies:
            if reply.end < shape.context:
                self._weigh(made, row, reply, ids, COUNTED.index(task))

    def _weigh(self, made: Rows, row: int, reply: Reply, ids: Sequence[int], task: int) -> None:
        made.weights[row, reply.start : reply.end] = FAR_WEIGHT if reply.far else NEAR_WEIGHT
        if reply.far:
            made.tasks[row, reply.judged : reply.end] = task
        separator = self.template.text_ids(SEPARATOR)
        if tuple(ids[reply.end : reply.end + len(separator)]) == separator:
            made.ends[row, reply.end] = True
            made.weights[row, reply.end] = 1.0
