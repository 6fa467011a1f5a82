"""Initial weights with which the model learns to look up tokens in minutes instead of hours.

Embeddings start in a subspace of head width. The heads of layer 0 attend one, two and three tokens back and write those
tokens' contents into three other subspaces. Later heads match the current or previous token with the tokens before a
key, and copy the token at the key. All weights have small noise; training can change everything.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention

CONTENT, BIAS, NOISE = 0.1, 0.4, 0.01
LOOK_BACK, WRITE_BACK = 0.8, 0.12
MATCH, COPY = 2.0, 0.1
FAST_PAIRS = 10  # the number of first rotary pairs, which distinguish neighbouring positions
SLOW_PAIRS = 14  # rotary pairs from this one on barely rotate


@torch.no_grad()
def initialize(model: LlamaForCausalLM, seed: int) -> None:
    """Set the embeddings and attention projections of `model` in place.

    The model has two KV heads of two query heads each, and hidden states several times as wide as a head.
    """
    generator = torch.Generator().manual_seed(seed)
    subspaces = _Subspaces.random(model.config, generator)
    embedding = model.model.embed_tokens.weight
    contents = torch.randn(len(embedding), model.config.head_dim, generator=generator) @ subspaces.content
    small = torch.randn(embedding.shape, generator=generator) * 0.005
    embedding.copy_(contents * CONTENT + small + BIAS * subspaces.bias)
    for number, layer in enumerate(model.model.layers):
        attention = layer.self_attn
        for part in (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj):
            part.weight.copy_(torch.randn(part.weight.shape, generator=generator) * NOISE)
        for value in attention.v_proj.weight.split(model.config.head_dim):
            value += subspaces.content
        if number == 0:
            _look_back(attention, subspaces, model.config)
        else:
            _match_and_copy(attention, subspaces, model.config, odd=number % 2 == 1)


@dataclass(frozen=True, slots=True)
class _Subspaces:
    """Orthogonal directions of the hidden states.

    `content` (D, hidden) represents a token, each of `back` (hidden, D) the tokens one, two and three positions before
    it, and `bias` (hidden,) is equal in every token.
    """

    content: Tensor
    back: tuple[Tensor, ...]
    bias: Tensor

    @classmethod
    def random(cls, config: LlamaConfig, generator: torch.Generator) -> "_Subspaces":
        width, hidden = config.head_dim, config.hidden_size
        basis = torch.linalg.qr(torch.randn(hidden, hidden, generator=generator))[0]
        room = (hidden - width) // 3
        unused = torch.zeros(hidden, width - room)
        starts = range(width, width + 3 * room, room)
        back = tuple(torch.cat([basis[:, start : start + room], unused], 1) for start in starts)
        return cls(basis[:, :width].T, back, basis[:, -1])


def _look_back(attention: LlamaAttention, subspaces: _Subspaces, config: LlamaConfig) -> None:
    """Make head h attend h + 1 tokens back: queries are the common bias, rotated by h + 1 positions."""
    width = config.head_dim
    frequencies = config.rope_parameters["rope_theta"] ** (-torch.arange(0, width, 2).float() / width)
    fast = (torch.arange(width // 2) < FAST_PAIRS).float()
    for key in attention.k_proj.weight.split(width):
        key += LOOK_BACK * torch.outer(torch.cat([fast, 0 * fast]), subspaces.bias)
    queries, outputs = attention.q_proj.weight.split(width), attention.o_proj.weight.split(width, 1)
    for head, target in enumerate(subspaces.back):
        angle = -(head + 1) * frequencies
        rotated = torch.cat([fast * angle.cos(), fast * angle.sin()])
        queries[head].add_(LOOK_BACK * torch.outer(rotated, subspaces.bias))
        outputs[head].add_(WRITE_BACK * target)


def _match_and_copy(
    attention: LlamaAttention, subspaces: _Subspaces, config: LlamaConfig, *, odd: bool
) -> None:
    """Make heads attend to the token after an earlier occurrence of the current or previous token, and copy it."""
    width, (one, two, three) = config.head_dim, subspaces.back
    slow = torch.cat([(torch.arange(width // 2) >= SLOW_PAIRS).float() + 0.15] * 2)[:, None]
    keys = attention.k_proj.weight.split(width)
    for key, earlier in zip(keys, (one, two if odd else three), strict=True):
        key += MATCH * slow * earlier.T
    content, before = subspaces.content, (one if odd else two).T
    queries, outputs = attention.q_proj.weight.split(width), attention.o_proj.weight.split(width, 1)
    for query, output, source in zip(queries, outputs, (content, content, before, content), strict=True):
        query += MATCH * slow * source
        output += COPY * content.T
