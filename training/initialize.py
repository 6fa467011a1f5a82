"""A start from which lookup forms in minutes instead of hours.

Token contents start in a subspace of head width; the heads of layer 0 look one, two and three tokens back and write
what stood there into three other subspaces; later heads match their own or the previous token's content with what
stood before a key, and copy the token found. Small noise everywhere; training is free to undo all of it.
"""

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

CONTENT, BIAS, NOISE = 0.1, 0.4, 0.01
LOOK_BACK, WRITE_BACK = 0.8, 0.12
MATCH, COPY = 2.0, 0.1
FAST_PAIRS, SLOW_PAIRS = (
    10,
    14,
)  # rotary pairs: the first ones tell neighbours apart, those from here on barely turn


@torch.no_grad()
def initialize(model: LlamaForCausalLM, seed: int) -> None:
    """Set the embeddings and attention projections of `model` in place."""
    generator = torch.Generator().manual_seed(seed)
    config = model.config
    width, hidden, groups = config.head_dim, config.hidden_size, config.num_key_value_heads

    def noise(like: Tensor, scale: float = NOISE) -> Tensor:
        return torch.randn(like.shape, generator=generator) * scale

    basis = torch.linalg.qr(torch.randn(hidden, hidden, generator=generator))[0]
    content, bias = basis[:, :width].T, basis[:, -1]  # (D, hidden), (hidden,)
    room = (hidden - width) // 3
    back = [
        torch.cat([basis[:, start : start + room], torch.zeros(hidden, width - room)], 1)
        for start in range(width, width + 3 * room, room)
    ]
    embedding = model.model.embed_tokens.weight
    embedding.copy_(
        torch.randn(len(embedding), width, generator=generator) @ content * CONTENT
        + noise(embedding, 0.005)
        + BIAS * bias
    )
    frequencies = config.rope_parameters["rope_theta"] ** (-torch.arange(0, width, 2).float() / width)
    fast = (torch.arange(width // 2) < FAST_PAIRS).float()
    slow = torch.cat([(torch.arange(width // 2) >= SLOW_PAIRS).float() + 0.15] * 2)[:, None]

    def rows(head: int) -> slice:
        return slice(head * width, (head + 1) * width)

    for number, layer in enumerate(model.model.layers):
        attention = layer.self_attn
        q, k, v, o = (
            noise(part.weight)
            for part in (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
        )
        for group in range(groups):
            v[rows(group)] += content
        if number == 0:
            for group in range(groups):
                k[rows(group)] += LOOK_BACK * torch.outer(torch.cat([fast, 0 * fast]), bias)
            for head, target in enumerate(back):
                turn = -(head + 1) * frequencies
                q[rows(head)] += LOOK_BACK * torch.outer(
                    torch.cat([fast * turn.cos(), fast * turn.sin()]), bias
                )
                o[:, rows(head)] += WRITE_BACK * target
        else:
            second = back[1] if number % 2 else back[2]
            for group, target in enumerate((back[0], second)):
                k[rows(group)] += MATCH * slow * target.T
            previous = back[0] if number % 2 else back[1]
            sources = (content, content, previous.T, content)
            for head, source in enumerate(sources):
                q[rows(head)] += MATCH * slow * source
                o[:, rows(head)] += COPY * content.T
        for part, start in zip(
            (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj),
            (q, k, v, o),
            strict=True,
        ):
            part.weight.copy_(start)
