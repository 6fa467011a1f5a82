"""Decoding on a fused cache, token by token, against plain transformers."""

import warnings

import pytest
import torch

from kvweave.answering.generation import Decoded, generate
from kvweave.config import GenerationConfig
from kvweave.testing import FAMILIES, end_only_at, tiny_adapter
from support.plain_generation import plain_generation, prompt


def by_steps(adapter, ids: list[int], count: int) -> list[int]:
    end_only_at(adapter)
    kv_cache = adapter.new_cache(len(ids))
    logits = adapter.compute(kv_cache, ids, adapter.rows(torch.arange(len(ids))))
    decoded = Decoded()
    for _ in generate(adapter, kv_cache, ids, logits, GenerationConfig(), count, decoded):
        pass
    return list(decoded.ids)


@pytest.mark.parametrize("family", FAMILIES)
def test_steps_choose_the_tokens_of_plain_generation(family):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapter = tiny_adapter(family)
        ids = prompt(100)
        assert by_steps(adapter, ids, 10) == plain_generation(family, ids, 10)


def test_an_answer_that_outgrows_the_short_frequencies_equals_plain_generation():
    adapter = tiny_adapter("phi3-longrope")  # trained to 64
    ids = prompt(60)
    assert by_steps(adapter, ids, 12) == plain_generation("phi3-longrope", ids, 12)


def test_two_requests_decoded_in_turn_do_not_share_their_frequencies():
    adapter = tiny_adapter("llama-dynamic")
    prompts = [prompt(200), prompt(70, seed=2)]
    alone = [plain_generation("llama-dynamic", ids, 6) for ids in prompts]
    kv_caches, chosen = [], [[], []]
    for number, ids in enumerate(prompts):
        kv_caches.append(adapter.new_cache(len(ids)))
        logits = adapter.compute(kv_caches[-1], ids, adapter.rows(torch.arange(len(ids))))
        chosen[number].append(int(logits.argmax()))
    for _ in range(5):
        for number, kv_cache in enumerate(kv_caches):
            chosen[number].append(int(adapter.step(kv_cache, chosen[number][-1]).argmax()))
    assert chosen == alone


def test_text_held_back_for_an_unfinished_character_comes_out_at_the_end():
    adapter = tiny_adapter()
    first, *_, last = "\u00e9".encode()
    ids = [adapter.tokenizer("a", add_special_tokens=False)["input_ids"][0]]
    pieces = []

    class Fixed:
        def __init__(self):
            self.left = [*ids, adapter.tokenizer("\u00e9", add_special_tokens=False)["input_ids"][0]]

        def choose(self, logits):
            return self.left.pop(0) if self.left else 2

    assert first != last
    import kvweave.answering.generation as module

    original, module.Sampler = module.Sampler, lambda settings, device: Fixed()
    try:
        kv_cache = adapter.new_cache(3)
        logits = adapter.compute(kv_cache, [5, 6, 7], adapter.rows(torch.arange(3)))
        decoded = Decoded()
        pieces = list(generate(adapter, kv_cache, [5, 6, 7], logits, GenerationConfig(), 8, decoded))
    finally:
        module.Sampler = original
    assert "".join(pieces) == decoded.text == "a\ufffd"
