"""Exactness on pretrained weights, in float32 against plain transformers, on every real model that is prepared.

Random weights hide what real ones have: attention sinks, large activations, logits that are nearly equal. The long prompt
is longer than the window of 512 tokens that five of six layers of Gemma 3 have; models without windows get a shorter one.
"""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import gguf
import numpy as np
import pytest
import torch

import kvweave
from kvweave.decode.handoff import offload
from kvweave.decode.settings import OffloadSettings
from kvweave.models.fused_cache import PlacedSpan
from kvweave.models.gguf.header import read_header
from kvweave.ops.quantise import quantise
from kvweave.samples import DOCUMENTS
from kvweave.types import ChunkKV
from kvweave_lab.real_models import MODELS, model_file, prepared_folder
from support.oracle import full_prefill, twin

TOLERANCE = 2e-3  # on float32 logits of magnitude 30, summed in another order
QUESTION, REPLY, DECODED = 40, 16, 4  # tokens

pytestmark = pytest.mark.parametrize("real_model", MODELS, indirect=True, scope="module")


@pytest.fixture(scope="module")
def adapter(real_model):
    return kvweave.load_model(str(prepared_folder(real_model)), dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def plain(adapter):
    return twin(adapter.model)


@pytest.fixture(scope="module")
def ids(adapter):
    """The long prompt."""
    text = "\n\n".join(path.read_text() for path in sorted(DOCUMENTS.glob("*.[mt]*")))
    first = [] if adapter.tokenizer.bos_token_id is None else [adapter.tokenizer.bos_token_id]
    found = [*first, *adapter.template.tokenize(text)]
    window = getattr(adapter.model.config, "sliding_window", None)
    assert window in (None, 512)
    length = 150 if window is None else 600
    assert len(found) >= length
    return found[:length]


@pytest.fixture(scope="module")
def expected(adapter, plain, ids):
    """Last logits (1, vocab) of an ordinary prefill of the long prompt."""
    return full_prefill(plain, ids, adapter.rotation)[0]


@pytest.fixture(scope="module")
def prompt():
    texts = tuple((DOCUMENTS / name).read_text()[:250] for name in ("passwords.md", "supper.md"))
    return kvweave.Prompt("Repeat the text above, word for word.", texts, several_lines=True)


@pytest.fixture(scope="module")
def reply(adapter, plain, prompt):
    """The greedy reply to the prompt, token ids (REPLY,), and the logits (1, vocab) before each of them."""
    given = torch.tensor([adapter.template.render(prompt).token_ids])
    with torch.no_grad():
        out = plain.generate(
            given, attention_mask=torch.ones_like(given), do_sample=False, max_new_tokens=REPLY,
            repetition_penalty=1.0, output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
    assert out.sequences.shape[1] == given.shape[1] + REPLY
    return out.sequences[0, given.shape[1] :].tolist(), out.logits


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert expected.abs().max() > 5
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)
    assert found.argmax() == expected.argmax()


def test_it_continues_text_as_a_language_model_does(adapter, plain):
    ids = torch.tensor([adapter.tokenizer("The capital of France is").input_ids])
    with torch.no_grad():
        assert adapter.tokenizer.decode(plain(ids).logits[0, -1].argmax()) == " Paris"


def test_weights_are_those_of_the_file_up_to_rounding_to_float16(adapter, real_model):
    header = read_header([model_file(real_model)])
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
    norm = found["blk.3.attn_norm.weight"].data.view(np.float32)
    if adapter.model.config.model_type.startswith("gemma"):
        norm = norm - np.float32(1)  # GGUF files have the factor, transformers what exceeds 1
    assert np.array_equal(layer.input_layernorm.weight.detach().numpy(), norm)


def test_recomputing_everything_over_garbage_equals_full_prefill(adapter, ids, expected):
    stored = adapter.encode(ids[:50])
    noise = torch.randn(stored.kv.shape, generator=torch.Generator().manual_seed(7))
    kv_cache = adapter.new_cache(len(ids), [PlacedSpan(ChunkKV(stored.token_ids, noise * 3), 0, 0)])
    close(adapter.compute(kv_cache, ids, adapter.rows(torch.arange(len(ids)))), expected)


def test_a_reused_prefix_equals_full_prefill(adapter, ids, expected):
    """With windows it is longer than one of them."""
    stored = len(ids) - QUESTION
    kv_cache = adapter.new_cache(len(ids), [PlacedSpan(adapter.encode(ids[:stored]), 0, 0)])
    close(adapter.compute(kv_cache, ids, adapter.rows(torch.arange(stored, len(ids)))), expected)


def test_a_moved_chunk_has_the_kv_that_transformers_computes_at_its_place(adapter, plain, ids):
    chunk, start = ids[1:61], 500
    positions = torch.arange(start, start + len(chunk))[None]
    with torch.no_grad():
        kv = plain(torch.tensor([chunk]), position_ids=positions, logits_to_keep=1).past_key_values
    prompt = [*[ids[0]] * start, *chunk, ids[61]]
    moved = adapter.new_cache(len(prompt), [PlacedSpan(adapter.encode(chunk), start, start)])
    adapter.compute(moved, prompt, adapter.rows(torch.tensor([0, len(prompt) - 1])))
    for ours, theirs in zip(moved.layers, kv.layers, strict=True):
        place = slice(start, start + len(chunk))
        torch.testing.assert_close(ours.keys[:, :, place], theirs.keys, atol=TOLERANCE, rtol=1e-4)
        torch.testing.assert_close(ours.values[:, :, place], theirs.values, atol=TOLERANCE, rtol=1e-4)


@pytest.mark.parametrize("recipe", ["weave", "cacheblend"])
def test_recomputing_all_of_stored_chunks_equals_full_prefill(recipe, adapter, prompt, reply, tmp_path):
    with kvweave.ChunkStore(tmp_path) as store:
        kvweave.prepare(adapter, store, prompt.chunks, recipe=recipe)
        result = kvweave.prefill(adapter, store, prompt, recipe=recipe, ratio=1.0)
    assert result.plan.recomputed_tokens > 80
    close(result.logits, reply[1][0])


def test_a_reply_over_a_reused_prefix_equals_transformers(adapter, prompt, reply, tmp_path):
    with kvweave.ChunkStore(tmp_path) as store:
        kvweave.prefill(adapter, store, prompt, recipe="prefix")
        result = kvweave.prefill(adapter, store, prompt, recipe="prefix")
        assert result.plan.exact_tokens > 80
        close(result.logits, reply[1][0])
        found = kvweave.generate(result, max_new_tokens=REPLY)
    assert list(found.ids) == reply[0]
    assert found.text.strip() == adapter.tokenizer.decode(reply[0], skip_special_tokens=True).strip()


def test_decoding_with_everything_retrieved_equals_dense_decoding(adapter, prompt, reply):
    ids = list(adapter.template.render(prompt).token_ids)
    kv_cache = adapter.new_cache(len(ids))
    found = [adapter.compute(kv_cache, ids, adapter.rows(torch.arange(len(ids))))]
    with offload(
        adapter, kv_cache, ids, OffloadSettings(kv_budget=1.0, window=8), question_tokens=16
    ) as cache:
        for token in reply[0][: DECODED - 1]:
            found.append(adapter.step(cache, token))
        assert cache.counts.retrieved > 0
    for ours, theirs in zip(found, reply[1][:DECODED], strict=True):
        close(ours, theirs)


def test_requests_in_one_batch_equal_each_of_them_alone(adapter, plain, ids):
    """Two prompts of different lengths and a token after each."""
    prompts = [ids[:30], ids[20:65]]
    batcher, barrier = adapter.serve_many(), Barrier(len(prompts))

    def request(given):
        kv_cache = adapter.new_cache(len(given))
        barrier.wait()
        logits = adapter.compute(kv_cache, given, adapter.rows(torch.arange(len(given))))
        return logits, adapter.step(kv_cache, given[0])

    try:
        with ThreadPoolExecutor(len(prompts)) as threads:
            found = list(threads.map(request, prompts))
        assert batcher.stats.most_requests == len(prompts)
    finally:
        adapter.serve_alone()
    for given, got in zip(prompts, found, strict=True):
        with torch.no_grad():
            alone = plain(torch.tensor([[*given, given[0]]]), logits_to_keep=2).logits[0]
        close(torch.cat(got), alone)


@pytest.mark.parametrize(("storage", "bound"), [("int8", 0.001), ("int4", 0.1)])
def test_quantised_kv_of_a_prefix_keeps_the_distribution_up_to_a_kl(storage, bound, adapter, ids, expected):
    stored = len(ids) - QUESTION
    exact = adapter.encode(ids[:stored])
    kv = ChunkKV(exact.token_ids, quantise(exact.kv, storage).all_layers())
    kv_cache = adapter.new_cache(len(ids), [PlacedSpan(kv, 0, 0)])
    found = adapter.compute(kv_cache, ids, adapter.rows(torch.arange(stored, len(ids))))
    kl = torch.nn.functional.kl_div(
        found.log_softmax(-1), expected.log_softmax(-1), log_target=True, reduction="sum"
    ).item()
    assert 0 < kl < bound
