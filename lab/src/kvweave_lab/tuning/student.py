"""An auxiliary model under training: its attention as something to differentiate, its loss, and its state on disk.

Plain PyTorch through the unmodified model, with the library's own eager attention. Knows nothing of steps or files.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from kvweave.models.adapter import Adapter
from kvweave.models.attention import ATTENTION_NAME
from kvweave.recipes.auxiliary import Auxiliary
from kvweave_lab.tuning.examples import Example


@dataclass(frozen=True, slots=True)
class Lesson:
    """An example in the auxiliary's tokens: one pass for each of C chunks, prefix ++ chunk ++ question.

    `ids` (C, T) are padded behind the question, where no row looks. `chunks` and `asked` say where in its pass each
    chunk stands, and the words that the user asked. `wanted` (N,) is the distribution over all chunks' tokens to come
    near to.
    """

    ids: Tensor
    chunks: tuple[slice, ...]
    asked: tuple[slice, ...]
    wanted: Tensor


def lesson(auxiliary: Auxiliary, example: Example) -> Lesson:
    """The passes by which `Auxiliary.attention` scores the example's chunks, without stored KV."""
    prefix = auxiliary.prefix.token_ids
    question, words = auxiliary.question(example.question)
    first, end, _ = words.indices(len(question))
    read = [auxiliary.tokens(text) for text in example.chunks]
    passes = [torch.tensor((*prefix, *ids, *question)) for ids, _ in read]
    behind = [len(prefix) + len(ids) for ids, _ in read]
    return Lesson(
        torch.nn.utils.rnn.pad_sequence(passes, batch_first=True),
        tuple(slice(len(prefix), edge) for edge in behind),
        tuple(slice(edge + first, edge + end) for edge in behind),
        example.wanted([offsets for _, offsets in read]),
    )


@contextmanager
def differentiable(adapter: Adapter) -> Iterator[None]:
    """For the length of training, the model attends by the library's eager function, which shows its weights."""
    adapter.model.set_attn_implementation("eager")
    try:
        yield
    finally:
        adapter.model.set_attn_implementation(ATTENTION_NAME)


def foreseen(adapter: Adapter, given: Lesson) -> Tensor:
    """Last-layer attention from the question to the chunks' tokens, all passes together made to sum to 1, (N,)."""
    out = adapter.model(
        input_ids=given.ids.to(adapter.geometry.device),
        use_cache=False,
        output_attentions=True,
        logits_to_keep=1,
    )
    weights = out.attentions[-1]  # (C, H, T, T)
    scores = [
        weights[number, :, rows, columns].mean(dim=(0, 1))
        for number, (rows, columns) in enumerate(zip(given.asked, given.chunks, strict=True))
    ]
    together = torch.cat(scores)
    return together / together.sum()


def loss(adapter: Adapter, given: Lesson) -> Tensor:
    """KL(primary ‖ auxiliary) over the auxiliary's context tokens, in nats."""
    seen, wanted = foreseen(adapter, given), given.wanted.to(adapter.geometry.device)
    floor = 1e-9
    return (wanted * (wanted.clamp_min(floor).log() - seen.clamp_min(floor).log())).sum()
