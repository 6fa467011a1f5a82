"""The forward pass of training, for rows of one context and many questions.

It computes what transformers' Llama classes compute, with their parameters. The result for a question equals that of the
unmodified model on a prompt with this question alone.
"""

import torch
import torch.nn.functional as F  # noqa: N812  torch's own name for it
from torch import Tensor
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from kvweave.machine import has_fast_matmul
from training.attention import blockwise_attention, fused_attention

FUSED_FROM = 4000  # context tokens from which PyTorch's kernel is used, which stores no attention weights

BFLOAT16_ON_CPU = has_fast_matmul(torch.device("cpu"), torch.bfloat16)

HINTED = 5  # the layer after which hints are read


def rotation(length: int, width: int, theta: float) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of every position, each (length, width / 2)."""
    frequencies = theta ** (-torch.arange(0, width, 2).float() / width)
    angles = torch.outer(torch.arange(length).float(), frequencies)
    return angles.cos(), angles.sin()


def product_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype of matrix products: bfloat16 if the device has units for it, else float32."""
    return torch.float32 if device.type == "cpu" and not BFLOAT16_ON_CPU else torch.bfloat16


def hidden_states(
    model: LlamaForCausalLM, ids: Tensor, cos: Tensor, sin: Tensor, segments: Tensor, context: int
) -> tuple[Tensor, Tensor]:
    """Return hidden states (B, T, hidden) after the last layer and after layer HINTED, both normalised.

    Matrix products use `product_dtype`, the residual stream float32. `cos` and `sin` are (B, 1, T, D / 2). Tokens of
    the context attend causally; later ones attend to the context and to earlier tokens of their own segment.
    """
    mask = mask_of(segments, context)
    x = F.embedding(ids, model.model.embed_tokens.weight)
    states = []
    for layer in model.model.layers:
        x = _layer(model, layer, x, cos, sin, mask)
        states.append(x)
    norm, middle = model.model.norm.weight, states[min(HINTED, len(states)) - 1]
    return _normalised(model, states[-1], norm), _normalised(model, middle, norm)


def question_attention(
    model: LlamaForCausalLM,
    ids: Tensor,
    cos: Tensor,
    sin: Tensor,
    segments: Tensor,
    chunks: Tensor,
    context: int,
) -> Tensor:
    """Return the last layer's attention from question rows to chunk tokens (B, Tq, context), averaged over heads.

    The softmax is over `chunks` (B, context) only, as in selectors. Other arguments are those of `hidden_states`.
    """
    mask = mask_of(segments, context)
    x = F.embedding(ids, model.model.embed_tokens.weight)
    for layer in model.model.layers[:-1]:
        x = _layer(model, layer, x, cos, sin, mask)
    q, k, _ = _project(model, model.model.layers[-1], x, cos, sin)
    k = k[:, :, :context].repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores: Tensor = (q[:, :, context:] @ k.transpose(2, 3)).float() * q.shape[-1] ** -0.5
    return scores.masked_fill(~chunks[:, None, None], float("-inf")).softmax(-1).mean(1)


def mask_of(segments: Tensor, context: int) -> Tensor:
    """Return the mask of question rows, added to their scores (B, Tq, T)."""
    order = torch.arange(segments.shape[1], device=segments.device)
    own = segments[:, context:, None]
    allowed = (segments[:, None, :] == 0) | (own == segments[:, None, :])
    visible = allowed & (order[context:, None] >= order)
    mask = torch.zeros(visible.shape, dtype=product_dtype(segments.device), device=segments.device)
    return mask.masked_fill(~visible, float("-inf"))


def _layer(
    model: LlamaForCausalLM,
    layer: LlamaDecoderLayer,
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    mask: Tensor,
) -> Tensor:
    """Return the residual stream (B, T, hidden) after a decoder layer."""
    batch, total, _ = x.shape
    feed, half = layer.mlp, product_dtype(x.device)
    q, k, v = _project(model, layer, x, cos, sin)
    short = x.device.type == "cpu" and total - mask.shape[1] < FUSED_FROM
    attend = blockwise_attention if short else fused_attention
    out = attend(q, k, v, mask).transpose(1, 2).reshape(batch, total, -1)
    x = x + F.linear(out, layer.self_attn.o_proj.weight.to(half)).float()
    h = _normalised(model, x, layer.post_attention_layernorm.weight).to(half)
    gated = F.silu(F.linear(h, feed.gate_proj.weight.to(half))) * F.linear(h, feed.up_proj.weight.to(half))
    return x + F.linear(gated, feed.down_proj.weight.to(half)).float()


def _project(
    model: LlamaForCausalLM, layer: LlamaDecoderLayer, x: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return rotated queries (B, H, T, D), rotated keys and values (B, G, T, D)."""
    config, attention = model.config, layer.self_attn
    heads, groups, width = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    batch, total, _ = x.shape
    h = _normalised(model, x, layer.input_layernorm.weight).to(product_dtype(x.device))
    packed = torch.cat([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]).to(
        h.dtype
    )
    q, k, v = (
        F.linear(h, packed).view(batch, total, -1, width).transpose(1, 2).split([heads, groups, groups], 1)
    )
    return _rotate(q.float(), cos, sin).to(h.dtype), _rotate(k.float(), cos, sin).to(h.dtype), v


def _normalised(model: LlamaForCausalLM, x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, (x.size(-1),), weight, model.config.rms_norm_eps)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
