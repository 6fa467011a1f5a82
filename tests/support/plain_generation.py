"""Greedy generation by plain transformers, to compare ours with."""

from functools import cache

import torch
from transformers import PreTrainedModel

from kvweave.testing import tiny_model
from support.oracle import stock

CHANGING = ("llama-dynamic", "phi3-longrope")


SETTINGS = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}


def prompt(tokens: int, seed: int = 1) -> list[int]:
    return torch.randint(3, 260, (tokens,), generator=torch.Generator().manual_seed(seed)).tolist()


@cache
def plain(family: str) -> PreTrainedModel:
    return stock(tiny_model(family))


def plain_generation(family: str, ids: list[int], count: int) -> list[int]:
    """Transformers' own greedy reply."""
    return list(_plain_generation(family, tuple(ids), count))


@cache
def _plain_generation(family: str, ids: tuple[int, ...], count: int) -> list[int]:
    """A model whose frequencies change as it runs is made anew. Before 5.20, transformers lost phi3-longrope's KV there."""
    given = torch.tensor([ids])
    model = stock(tiny_model(family)) if family in CHANGING else plain(family)
    settings = {**SETTINGS, "max_new_tokens": count, "use_cache": family != "phi3-longrope"}
    out = model.generate(given, attention_mask=torch.ones_like(given), **settings)
    return out[0, len(ids) :].tolist()
