"""What a transformers user runs today: full prefill over the library's own attention and cache.

Our attention function hands calls that are not ours to the library's; `library_attention` leaves that step out too.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from kvweave.models.adapter import Adapter
from kvweave.models.attention import ATTENTION_NAME

BLOCK_TOKENS = 1024  # of the prefill in blocks


def stock_prefill(adapter: Adapter, ids: Tensor) -> Tensor:
    """The whole prompt (1, N) in one causal pass; logits (1, vocab) of the last position, the only ones made."""
    return prefill_in_blocks(adapter, ids, ids.shape[1])


def prefill_in_blocks(adapter: Adapter, ids: Tensor, block_tokens: int = BLOCK_TOKENS) -> Tensor:
    """The same, some tokens at a time, each block behind the ones before it."""
    cache = DynamicCache(config=adapter.model.config)
    logits = torch.empty(0)
    with torch.no_grad():
        for block in ids.split(block_tokens, dim=1):
            logits = adapter.model(block, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
    return logits[:, -1]


@contextmanager
def library_attention(adapter: Adapter) -> Iterator[None]:
    """For a while, the model calls the library's sdpa without a detour; a soft cap, which that refuses, stays with ours."""
    model: PreTrainedModel = adapter.model
    if getattr(model.config.get_text_config(decoder=True), "attn_logit_softcapping", None):
        yield
        return
    model.set_attn_implementation("sdpa")
    try:
        yield
    finally:
        model.set_attn_implementation(ATTENTION_NAME)
