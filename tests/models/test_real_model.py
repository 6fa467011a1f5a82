"""Exactness on pretrained weights, those of Gemma 3 270M, in float32 against plain transformers.

Random weights hide what real ones have: attention sinks, large activations, logits that are nearly equal. The long prompt
is longer than the window of 512 tokens that five of six layers have.
"""

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import kvweave
from kvweave.decode.handoff import offload
from kvweave.decode.settings import OffloadSettings
from kvweave.models.fused_cache import PlacedSpan
from kvweave.models.gguf.header import read_header
from kvweave.samples import DOCUMENTS
from kvweave.types import ChunkKV
from kvweave_lab.real_model import model_file
from support.oracle import full_prefill, stock

TOLERANCE = 2e-3  # on float32 logits of magnitude 30, summed in another order
LONG, SHORT, NEW = 600, 200, 4


@pytest.fixture(scope="module")
def adapter(real_model):
    return kvweave.load_model(str(real_model), dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def plain(real_model):
    return stock(AutoModelForCausalLM.from_pretrained(real_model, dtype=torch.float32)).eval()


@pytest.fixture(scope="module")
def ids(adapter):
    text = "\n\n".join(path.read_text() for path in sorted(DOCUMENTS.glob("*.[mt]*")))
    found = [adapter.tokenizer.bos_token_id, *adapter.template.tokenize(text)]
    assert len(found) >= LONG
    return found[:LONG]


@pytest.fixture(scope="module")
def expected(adapter, plain, ids):
    """Last logits (1, vocab) of an ordinary prefill of the long prompt."""
    assert adapter.model.config.sliding_window == 512
    return full_prefill(plain, ids, adapter.rotation)[0]


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert expected.abs().max() > 5
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)
    assert found.argmax() == expected.argmax()


def test_it_continues_text_as_a_language_model_does(adapter, plain):
    ids = torch.tensor([adapter.tokenizer("Paris is the capital of").input_ids])
    with torch.no_grad():
        assert adapter.tokenizer.decode(plain(ids).logits[0, -1].argmax()) == " France"


def test_weights_are_those_of_the_file_up_to_rounding_to_float16(adapter):
    header = read_header([model_file()])
    found = {tensor.name: tensor for tensor in header.tensors}
    layer = adapter.model.model.layers[3]
    for name, weight in {
        "blk.3.ffn_up.weight": layer.mlp.up_proj.weight,
        "blk.3.ffn_down.weight": layer.mlp.down_proj.weight,
        "blk.3.attn_output.weight": layer.self_attn.o_proj.weight,
        "blk.3.attn_v.weight": layer.self_attn.v_proj.weight,
    }.items():
        tensor = found[name]
        kind = gguf.GGMLQuantizationType(tensor.ggml_type)
        values = gguf.dequantize(tensor.data.reshape(tensor.shape[0], -1), kind)
        assert torch.equal(weight.detach(), torch.from_numpy(values).half().float()), name
    norm = found["blk.3.attn_norm.weight"].data.view(np.float32) - np.float32(1)
    assert np.array_equal(layer.input_layernorm.weight.detach().numpy(), norm)


def test_recomputing_everything_over_garbage_equals_full_prefill(adapter, ids, expected):
    stored = adapter.encode(ids[:SHORT])
    noise = torch.randn(stored.kv.shape, generator=torch.Generator().manual_seed(7))
    kv_cache = adapter.new_cache(LONG, [PlacedSpan(ChunkKV(stored.token_ids, noise * 3), 0, 0)])
    close(adapter.compute(kv_cache, ids, adapter.rows(torch.arange(LONG))), expected)


def test_a_reused_prefix_longer_than_the_window_equals_full_prefill(adapter, ids, expected):
    kv_cache = adapter.new_cache(LONG, [PlacedSpan(adapter.encode(ids[:560]), 0, 0)])
    close(adapter.compute(kv_cache, ids, adapter.rows(torch.arange(560, LONG))), expected)


@pytest.mark.parametrize(("recipe", "budget"), [("prefix", {}), ("cacheblend", {"ratio": 1.0})])
def test_a_prompt_from_stored_chunks_equals_full_prefill(recipe, budget, adapter, plain, tmp_path):
    texts = tuple((DOCUMENTS / name).read_text()[:300] for name in ("passwords.md", "supper.md"))
    prompt = kvweave.Prompt("What is the password of Glorric?", texts)
    full, _ = full_prefill(plain, list(adapter.template.render(prompt).token_ids), adapter.rotation)
    with kvweave.ChunkStore(tmp_path) as store:
        if recipe == "prefix":
            kvweave.prefill(adapter, store, prompt, recipe=recipe)
        else:
            kvweave.prepare(adapter, store, texts, recipe=recipe)
        again = kvweave.prefill(adapter, store, prompt, recipe=recipe, **budget)
    assert again.plan.exact_tokens + again.plan.recomputed_tokens > 100
    close(again.logits, full)


def test_decoding_with_everything_retrieved_equals_dense_decoding(adapter, plain, ids):
    prompt = ids[:SHORT]
    with torch.no_grad():
        out = plain.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, SHORT), do_sample=False, max_new_tokens=NEW,
            eos_token_id=None, output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
    tokens = out.sequences[0, SHORT:].tolist()
    kv_cache = adapter.new_cache(SHORT)
    found = [adapter.compute(kv_cache, prompt, adapter.rows(torch.arange(SHORT)))]
    with offload(
        adapter, kv_cache, prompt, OffloadSettings(kv_budget=1.0, window=8), question_tokens=16
    ) as cache:
        for token in tokens[:-1]:
            found.append(adapter.step(cache, token))
        assert cache.counts.retrieved > 0
    for ours, theirs in zip(found, out.logits, strict=True):
        close(ours, theirs)
