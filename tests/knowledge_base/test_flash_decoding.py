"""Answers decoded with the KV in a file, through the public interface."""

import pytest
import torch

import kvweave
from kvweave.answering.generation import Decoded, generate
from kvweave.config import GenerationConfig
from kvweave.decode.settings import ClusterSettings
from kvweave.errors import InvalidRequest
from kvweave.testing import end_only_at, tiny_adapter

GLORRIC = "What is the password of Glorric?"
TOLD = ["The password of Glorric is walnut. " * 3, "Supper is at seven in the hall. " * 4]


def test_the_whole_budget_gives_the_answer_of_dense_decoding(open_kb, documents):
    base = open_kb()
    base.add(documents)
    bounded = open_kb(kv_budget=1.0, resident_bytes=20_000_000)
    dense, answer = base.ask(GLORRIC), bounded.ask(GLORRIC)
    assert answer.text == dense.text == "walnut"
    assert dense.decoding is None
    assert 0 < answer.decoding.resident_bytes <= 20_000_000
    assert answer.decoding.attended_per_token > 0
    assert list((bounded.folder / "decoding").iterdir()) == []


def test_generate_decodes_the_result_of_prefill(tmp_path):
    adapter = tiny_adapter()
    end_only_at(adapter)
    store = kvweave.ChunkStore(tmp_path)
    prompt = kvweave.Prompt("Where?", TOLD, "Answer.", several_lines=True)

    def answer(**options):
        return kvweave.generate(kvweave.prefill(adapter, store, prompt), max_new_tokens=40, **options)

    dense = answer()
    kv = kvweave.OffloadSettings(1.0, window=8, clusters=ClusterSettings(8, 16))
    whole, part = (
        answer(kv=kv),
        answer(kv=kvweave.OffloadSettings(0.2, window=8, clusters=ClusterSettings(8, 16))),
    )
    assert whole.text == dense.text
    assert dense.tokens == whole.tokens == part.tokens == 40
    assert part.decoding.attended_per_token < whole.decoding.attended_per_token / 2
    with pytest.raises(InvalidRequest, match="max_new_tokens is 0"):
        kvweave.generate(kvweave.prefill(adapter, store, prompt), max_new_tokens=0)


def test_an_answer_that_exceeds_the_short_frequencies_continues_in_new_files():
    """LongRoPE recomputes everything at that point, and the KV is offloaded again."""
    adapter = tiny_adapter("phi3-longrope")  # trained on 64 positions
    end_only_at(adapter)
    ids = torch.randint(3, 260, (60,), generator=torch.Generator().manual_seed(1)).tolist()

    def text(kv):
        kv_cache = adapter.new_cache(len(ids))
        logits = adapter.compute(kv_cache, ids, adapter.rows(torch.arange(len(ids))))
        decoded = Decoded()
        list(generate(adapter, kv_cache, ids, logits, GenerationConfig(), 12, decoded, kv=kv))
        return decoded.text

    assert text(kvweave.OffloadSettings(1.0, window=8, clusters=ClusterSettings(8, 16))) == text(None)


def test_a_recipe_with_its_own_attention_is_refused(open_kb, documents):
    base = open_kb(kv_budget=0.5, recipe="ape")
    base.add(documents)
    with pytest.raises(InvalidRequest, match="leave kv_budget out"):
        base.ask(GLORRIC)
