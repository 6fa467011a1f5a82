"""Training rows of one long text each, whose questions need evidence from long before.

The texts are those of `kvweave_lab.eval.long_texts`, from the train split. The model learns to end every answer, although
the text continues after it, as in a conversation.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvweave.models.prompt import SEPARATOR
from kvweave_lab.eval.long_texts import LONG_TASKS, Reply, TextWriter
from kvweave_lab.eval.world import TRAIN, World
from training.documents import training_haystack
from training.rows import COUNTED, LANGUAGE_SHARE, LANGUAGE_WEIGHT, RowMaker, Rows
from training.shape import Shape

FAR_WEIGHT, NEAR_WEIGHT = 1.5, 0.5


@dataclass(frozen=True, slots=True)
class LongShape(Shape):
    """Rows of long texts with `context` tokens, about `prompt` of them before the first turn.

    The attributes of documents are unused.
    """

    prompt: int = 256


def of_length(tokens: int) -> LongShape:
    """Return the shape of texts with this many tokens."""
    return LongShape(tokens, 0, (0, 0), (0, 0), sparse=0.0, easy=0.0)


class LongRowMaker(RowMaker):
    """Makes rows of documents, and of long texts for a LongShape."""

    def write_row(self, rows: Rows, row: int, shape: Shape) -> None:
        """Write one row of the shape into `rows`."""
        if not isinstance(shape, LongShape):
            super().write_row(rows, row, shape)
            return
        task = self.rng.choice(list(LONG_TASKS))
        writer = TextWriter(self.template, training_haystack(), TRAIN, self.rng)
        script = LONG_TASKS[task](World(self.rng, TRAIN))
        ids, _, replies = writer.write(script, shape.prompt, shape.context)
        rows.ids[row] = torch.tensor(ids[: shape.context])
        rows.segments[row] = 0
        drawn = torch.rand(shape.context, generator=torch.Generator().manual_seed(self.rng.getrandbits(32)))
        rows.weights[row, 1:] = (drawn[1:] < LANGUAGE_SHARE) * LANGUAGE_WEIGHT
        rows.tokens += shape.context
        for reply in replies:
            if reply.end < shape.context:
                self._set_weights(rows, row, reply, ids, COUNTED.index(task))

    def _set_weights(self, rows: Rows, row: int, reply: Reply, ids: Sequence[int], task: int) -> None:
        rows.weights[row, reply.start : reply.end] = FAR_WEIGHT if reply.is_far else NEAR_WEIGHT
        if reply.is_far:
            rows.tasks[row, reply.value_start : reply.end] = task
        separator = self.template.tokenize(SEPARATOR)
        if tuple(ids[reply.end : reply.end + len(separator)]) == separator:
            rows.ends[row, reply.end] = True
            rows.weights[row, reply.end] = 1.0
