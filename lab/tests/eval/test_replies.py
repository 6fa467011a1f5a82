"""Replies decoded together equal those that the product decodes alone."""

import pytest
import torch

from kvweave.answering.generation import Decoded, generate
from kvweave.config import GenerationConfig
from kvweave.testing import end_only_at, tiny_adapter
from kvweave.types import ReplyFormat
from kvweave_lab.eval.replies import generate_together
from support.spelled import Spelled

GREEDY = GenerationConfig()


def ids_of(tokens, seed):
    return torch.randint(3, 260, (tokens,), generator=torch.Generator().manual_seed(seed)).tolist()


def prefilled(adapter, ids):
    kv_cache = adapter.new_cache(len(ids))
    return kv_cache, ids, adapter.compute(kv_cache, ids, adapter.rows(torch.arange(len(ids))))


def alone(adapter, ids, form):
    kv_cache, _, logits = prefilled(adapter, ids)
    decoded = Decoded()
    for _ in generate(adapter, kv_cache, ids, logits, GREEDY, 8, decoded, form=form):
        pass
    return decoded


@pytest.mark.parametrize("one_line", [False, True])
@pytest.mark.parametrize("lengths", [(40,), (30, 7, 51), (60, 58, 20)])
@pytest.mark.parametrize("family", ["llama", "phi3-longrope"])
def test_replies_together_are_those_of_each_alone(family, lengths, one_line):
    """They end at different steps, and only some outgrow the short frequencies (trained to 64)."""
    adapter, form = tiny_adapter(family), ReplyFormat(one_line=one_line)
    prompts = [ids_of(tokens, seed) for seed, tokens in enumerate(lengths)]
    end_only_at(adapter)
    first = alone(adapter, prompts[0], ReplyFormat()).ids
    end_only_at(adapter, first[3])
    adapter.tokenizer = Spelled({first[2]: "one\ntwo"})
    together = generate_together(adapter, [prefilled(adapter, ids) for ids in prompts], 8, form)
    expected = [alone(adapter, ids, form) for ids in prompts]
    found = [(reply.text, list(reply.ids), reply.finish_reason) for reply in together]
    assert found == [(reply.text, list(reply.ids), reply.finish_reason) for reply in expected]
    assert found[0][2] == "stop"
    assert ("two" in found[0][0]) is not one_line
