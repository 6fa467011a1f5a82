"""Attention of rows that are one context and questions about it: the context is causal, what a question sees a mask says.

Queries are (B, H, T, D) and so is what comes out, keys and values (B, G, T, D) of KV heads that several heads share;
`mask` (B, Tq, T) has terms for the scores of the last Tq rows.
"""

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  torch's own name for it
from torch import Tensor

BLOCK = (
    384  # rows that attend together: their scores stay near a CPU's cache, and keys behind them are left out
)


def fused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Attention by PyTorch's kernels: first the context's rows, then those that `mask` is about."""
    context = k.shape[2] - mask.shape[1]
    k, v = (part.repeat_interleave(q.shape[1] // part.shape[1], 1) for part in (k, v))
    first, keys, values = (part[:, :, :context] for part in (q, k, v))
    out = F.scaled_dot_product_attention(first, keys, values, is_causal=True)
    if context == k.shape[2]:
        return out
    asked = F.scaled_dot_product_attention(q[:, :, context:], k, v, mask[:, None])
    return torch.cat([out, asked], 2)


def in_blocks(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """The same on a CPU, where PyTorch's kernels take far longer, backwards above all, while rows are short."""
    batch, heads, total, width = q.shape
    groups = k.shape[1]
    q = (q * width**-0.5).view(batch, groups, heads // groups, total, width).transpose(2, 3)
    out: Tensor = _blocks_forward(q.contiguous(), k.contiguous(), v.contiguous(), mask, BLOCK)[0]
    return out.transpose(2, 3).reshape(batch, heads, total, width)


# Operators of their own, as torch.compile would write out every block's code. Queries are (B, G, T, H / G, D), so that
# a block of them is a matrix that lies in one piece; bmm would take twice as long where one factor is transposed.


@torch.library.custom_op("training::attend_in_blocks", mutates_args=())
def _blocks_forward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """What is attended to, shaped like q, and for the way back the weights of all blocks, one after the other."""
    out, weights = _blocks_shapes(q, k, v, mask, block)
    scratch = q.new_empty(block * q.shape[3] * q.shape[2])
    context = q.shape[2] - mask.shape[1]
    causal = mask.new_full((block, block), float("-inf")).triu(1)
    for row, group, start, end, place in _blocks(q, mask, block):
        to = weights[place].view(-1, end)
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
    """Gradients of q, k and v; the last two are summed in float32."""
    dq = torch.empty_like(q)
    dk, dv = (torch.zeros_like(part, dtype=torch.float32) for part in (k, v))
    scratch = q.new_empty(block * q.shape[3] * q.shape[2])
    for row, group, start, end, place in _blocks(q, mask, block):
        queries, grads, to = (part[row, group, start:end].flatten(0, 1) for part in (q, grad, dq))
        keys, values = k[row, group, :end], v[row, group, :end]
        attended = weights[place].view(-1, end)
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
    ctx.set_materialize_grads(False)  # the weights have none


def _blocks_gradients(ctx: Any, grad: Tensor, _: None) -> tuple[Tensor | None, ...]:
    return *_blocks_backward(grad.contiguous(), *ctx.saved_tensors, ctx.block), None, None


_blocks_forward.register_autograd(_blocks_gradients, setup_context=_blocks_context)


def _blocks(q: Tensor, mask: Tensor, block: int) -> Iterator[tuple[int, int, int, int, slice]]:
    """Row of the batch, KV head, first row of a block, the one behind it, and where its weights are held.

    No block has rows both of the context and of questions.
    """
    batch, groups, total, each, _ = q.shape
    context, held = total - mask.shape[1], 0
    for row, group in product(range(batch), range(groups)):
        for start in (*range(0, context, block), *range(context, total, block)):
            end = min(start + block, context if start < context else total)
            size = (end - start) * each * end
            yield row, group, start, end, slice(held, held + size)
            held += size
