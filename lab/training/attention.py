"""Attention of training rows: a causal context, and questions about it with a mask.

Queries and results are (B, H, T, D), keys and values (B, G, T, D) of KV heads that several heads share. `mask` (B, Tq, T)
is added to the scores of the last Tq rows.
"""

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  torch's own name for it
from torch import Tensor

BLOCK = 384
"""Rows per block: small enough that their scores stay in a CPU's cache. Later keys are skipped."""


def fused_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Return attention by PyTorch's kernels: the context's rows without a mask, the others with it."""
    context = k.shape[2] - mask.shape[1]
    k, v = (part.repeat_interleave(q.shape[1] // part.shape[1], 1) for part in (k, v))
    first, keys, values = (part[:, :, :context] for part in (q, k, v))
    out = F.scaled_dot_product_attention(first, keys, values, is_causal=True)
    if context == k.shape[2]:
        return out
    questions = F.scaled_dot_product_attention(q[:, :, context:], k, v, mask[:, None])
    return torch.cat([out, questions], 2)


def blockwise_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Return the same attention, faster on a CPU with short rows, above all in the backward pass."""
    batch, heads, total, width = q.shape
    groups = k.shape[1]
    q = (q * width**-0.5).view(batch, groups, heads // groups, total, width).transpose(2, 3)
    out: Tensor = _blocks_forward(q.contiguous(), k.contiguous(), v.contiguous(), mask, BLOCK)[0]
    return out.transpose(2, 3).reshape(batch, heads, total, width)


# These are custom operators, since torch.compile would unroll the loop over blocks. Queries are (B, G, T, H / G, D), so
# that a block of them is a contiguous matrix; bmm takes twice as long with a transposed factor.


@torch.library.custom_op("training::attend_in_blocks", mutates_args=())
def _blocks_forward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Return the attention, shaped like q, and the weights of all blocks, flattened, for the backward pass."""
    out, weights = _blocks_shapes(q, k, v, mask, block)
    scratch = q.new_empty(block * q.shape[3] * q.shape[2])
    context = q.shape[2] - mask.shape[1]
    causal = mask.new_full((block, block), float("-inf")).triu(1)
    for row, group, start, end, at in _blocks(q, mask, block):
        to = weights[at].view(-1, end)
        scores = scratch[: to.numel()].view_as(to)
        torch.mm(q[row, group, start:end].flatten(0, 1), k[row, group, :end].t(), out=scores)
        by_head = scores.view(end - start, -1, end)
        if start < context:
            by_head[..., start:] += causal[: end - start, None, : end - start]
        else:
            by_head += mask[row, start - context : end - context, None, :end]
        torch.softmax(scores, -1, out=to)
        torch.mm(to, v[row, group, :end], out=out[row, group, start:end].flatten(0, 1))
    return out, weights


@_blocks_forward.register_fake
def _blocks_shapes(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, block: int) -> tuple[Tensor, Tensor]:
    *_, last = _blocks(q, mask, block)
    return torch.empty_like(q), q.new_empty(last[-1].stop)


@torch.library.custom_op("training::attend_in_blocks_backward", mutates_args=())
def _blocks_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, weights: Tensor, block: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v; the last two are summed in float32."""
    dq = torch.empty_like(q)
    dk, dv = (torch.zeros_like(part, dtype=torch.float32) for part in (k, v))
    scratch = q.new_empty(block * q.shape[3] * q.shape[2])
    for row, group, start, end, at in _blocks(q, mask, block):
        queries, grads, to = (part[row, group, start:end].flatten(0, 1) for part in (q, grad, dq))
        keys, values = k[row, group, :end], v[row, group, :end]
        attended = weights[at].view(-1, end)
        scores = scratch[: attended.numel()].view_as(attended)
        torch.mm(grads, values.t(), out=scores)
        torch._softmax_backward_data(scores, attended, -1, scores.dtype, grad_input=scores)
        torch.mm(scores, keys, out=to)
        dk[row, group, :end] += torch.mm(scores.t(), queries)
        dv[row, group, :end] += torch.mm(attended.t(), grads)
    return dq, dk.to(k.dtype), dv.to(v.dtype)


@_blocks_backward.register_fake
def _gradient_shapes(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, weights: Tensor, block: int
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _blocks_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.block = inputs
    ctx.save_for_backward(*tensors, output[1])
    ctx.set_materialize_grads(False)  # the weights have no gradient


def _blocks_gradients(ctx: Any, grad: Tensor, _: None) -> tuple[Tensor | None, ...]:
    return *_blocks_backward(grad.contiguous(), *ctx.saved_tensors, ctx.block), None, None


_blocks_forward.register_autograd(_blocks_gradients, setup_context=_blocks_context)


def _blocks(q: Tensor, mask: Tensor, block: int) -> Iterator[tuple[int, int, int, int, slice]]:
    """Yield for each block the batch row, KV head, first and end row, and the slice of its weights.

    No block has rows of both the context and questions.
    """
    batch, groups, total, each, _ = q.shape
    context, used = total - mask.shape[1], 0
    for row, group in product(range(batch), range(groups)):
        for start in (*range(0, context, block), *range(context, total, block)):
            end = min(start + block, context if start < context else total)
            size = (end - start) * each * end
            yield row, group, start, end, slice(used, used + size)
            used += size
