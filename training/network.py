"""The forward pass of training: the mathematics of transformers' Llama classes on their own parameters, for rows of
one context and many questions. What it computes for a question equals the ordinary model on that prompt alone.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaForCausalLM

BLOCK = 512  # context rows that attend together: what lies behind a block is not computed


def rotation(length: int, width: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines of every position, each (length, width / 2)."""
    frequencies = theta ** (-torch.arange(0, width, 2).float() / width)
    angles = torch.outer(torch.arange(length).float(), frequencies)
    return angles.cos(), angles.sin()


def hidden_states(model: LlamaForCausalLM, ids: Tensor, cos: Tensor, sin: Tensor, segments: Tensor, context: int) -> Tensor:
    """Final hidden states (B, T, hidden), normalised; matrix products in bfloat16, the residual stream in float32.

    `cos`, `sin` are (B, 1, T, D / 2). Tokens before `context` attend causally to what is before them; later ones to
    the context and to earlier tokens of their own segment.
    """
    config = model.config
    heads, groups, width = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    batch, total = ids.shape
    half, eps = torch.bfloat16, config.rms_norm_eps
    order = torch.arange(total, device=ids.device)
    asked = segments[:, context:, None]
    visible = (asked == segments[:, None, :]) & (order[context:, None] >= order) | (segments[:, None, :] == 0)
    mask = torch.zeros(visible.shape, dtype=half).masked_fill(~visible, float("-inf"))[:, None]  # (B, 1, Tq, T)
    causal = mask.new_full((context, context), float("-inf")).triu(1)
    blocks = [(start, min(start + BLOCK, context)) for start in range(0, context, BLOCK)]
    x = F.embedding(ids, model.model.embed_tokens.weight)
    for layer in model.model.layers:
        attention, feed = layer.self_attn, layer.mlp
        h = F.rms_norm(x, (x.size(-1),), layer.input_layernorm.weight, eps).to(half)
        packed = torch.cat([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]).to(half)
        q, k, v = F.linear(h, packed).view(batch, total, -1, width).transpose(1, 2).split([heads, groups, groups], 1)
        q, k = _rotate(q.float(), cos, sin).to(half), _rotate(k.float(), cos, sin).to(half)
        parts = [
            _attend(q[:, :, start:end], k[:, :, :end], v[:, :, :end], causal[start:end, :end])
            for start, end in blocks
        ]
        parts.append(_attend(q[:, :, context:], k, v, mask))
        out = torch.cat(parts, 2).transpose(1, 2).reshape(batch, total, heads * width)
        x = x + F.linear(out, attention.o_proj.weight.to(half)).float()
        h = F.rms_norm(x, (x.size(-1),), layer.post_attention_layernorm.weight, eps).to(half)
        gated = F.silu(F.linear(h, feed.gate_proj.weight.to(half))) * F.linear(h, feed.up_proj.weight.to(half))
        x = x + F.linear(gated, feed.down_proj.weight.to(half)).float()
    return F.rms_norm(x, (x.size(-1),), model.model.norm.weight, eps)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Attention written as two products per KV head: on a CPU faster than the fused kernel, backwards above all."""
    batch, heads, rows, width = q.shape
    groups, keys = k.shape[1], k.shape[2]
    q = (q * width**-0.5).reshape(batch * groups, heads // groups * rows, width)
    k, v = k.reshape(batch * groups, keys, width), v.reshape(batch * groups, keys, width)
    scores = torch.bmm(q, k.transpose(1, 2)).view(batch, heads, rows, keys)
    weights = torch.softmax(scores.float() + mask, -1).to(q.dtype).view(batch * groups, -1, keys)
    return torch.bmm(weights, v).view(batch, heads, rows, width)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
