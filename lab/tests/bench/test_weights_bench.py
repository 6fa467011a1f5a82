"""`kvweave bench weights`: variants take turns, memory is counted, quality is compared token by token."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvweave.models.adapter import Adapter
from kvweave.models.quantised import quantise_weights
from kvweave.testing import tiny_adapter, tiny_model, tiny_tokenizer
from kvweave_lab.bench.weights import WeightsSettings, bench_weights, held_bytes

FEW = WeightsSettings(prompt_tokens=64, new_tokens=2, rounds=2, text_tokens=300)
TEXT = "the cat sat on the mat and nobody came " * 20


def load(name: str) -> Adapter:
    config = tiny_model().config
    config.update({"hidden_size": 64, "intermediate_size": 128, "head_dim": 16})  # 4 bits need such widths
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    if name != "float32":
        quantise_weights(model, name, torch.device("cpu"))
    return Adapter(model, tiny_tokenizer())


def test_variants_are_compared_with_the_first():
    done = bench_weights("tiny", load, ["float32", "int8", "int4"], [], TEXT, FEW)
    full, int8, int4 = done.variants
    assert full.quality is None
    assert full.prefill.of_first.median == 1.0
    assert int8.prefill.of_first.median > 0
    assert 0 < int8.quality.kl < int4.quality.kl
    assert int8.quality.tokens == int4.quality.tokens == 300
    assert int4.weight_bytes < int8.weight_bytes  # narrow layers are filled up to 512 inputs in 8 bits


def test_a_variant_is_identical_to_itself():
    done = bench_weights("tiny", lambda name: tiny_adapter(), ["float32", "bfloat16"], [], TEXT, FEW)
    assert done.variants[1].quality.kl == pytest.approx(0, abs=1e-9)
    assert done.variants[1].quality.agreement == 1.0


def test_without_text_nothing_is_said_of_quality():
    done = bench_weights("tiny", load, ["float32", "int8"], [], "", FEW)
    assert [one.quality for one in done.variants] == [None, None]


def test_held_bytes_count_shared_weights_once():
    adapter = tiny_adapter("gemma3")
    tied = adapter.model.get_output_embeddings().weight is adapter.model.get_input_embeddings().weight
    weights = sum(each.numel() * 4 for each in adapter.model.parameters())
    buffers = sum(each.numel() * each.element_size() for each in adapter.model.buffers())
    assert tied
    assert held_bytes(adapter.model) == weights + buffers


@pytest.mark.parametrize("inputs", [512, 640])
def test_packed_weights_take_the_memory_that_is_counted(inputs):
    if not torch.backends.quantized.supported_engines.count("fbgemm"):
        pytest.skip("this build of PyTorch has no FBGEMM")
    from kvweave.ops.quantised_linear import pack_int8
    from kvweave_lab.bench.measurement import resident_bytes, trim_heap

    codes, scales = torch.ones(65536, inputs, dtype=torch.int8), torch.ones(65536)
    pack_int8(codes[:64], scales[:64])
    trim_heap()
    before = resident_bytes()
    packed = pack_int8(codes, scales)
    trim_heap()
    taken = resident_bytes() - before
    assert taken < 1.1 * packed.bytes
    # With AVX512, most of what fills 640 inputs up to 1,024 lies in pages that are never touched.
    assert taken > 0.9 * (packed.bytes if inputs == 512 else codes.nbytes)


@pytest.fixture
def folder(tmp_path):
    """A model of its own: the command drops the weights that it has measured."""
    tiny_model().save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_the_command_appends_to_a_file(command, tmp_path, folder):
    words = (
        "bench",
        "weights",
        "--model",
        folder,
        "--variant",
        "float32",
        "--variant",
        "int8",
        "--quiet",
    )
    few = (
        "--rounds",
        "1",
        "--prompt-tokens",
        "32",
        "--new-tokens",
        "1",
        "--output",
        tmp_path / "weights.json",
    )
    (tmp_path / "text.txt").write_text(TEXT)
    assert "agree" in command(*words, *few).stdout
    found = command.json(*words, *few, "--text", tmp_path / "text.txt")
    assert [one["name"] for one in found["variants"]] == ["float32", "int8"]
    assert found["variants"][1]["quality"]["agreement"] > 0.5
    written = json.loads((tmp_path / "weights.json").read_text())
    assert len(written) == 2
    assert written[1]["command"].startswith(f"kvweave bench weights --model {folder}")
    assert written[1]["date"]


def test_what_cannot_be_measured_is_said_in_a_line(command, tmp_path, folder):
    words = ("bench", "weights", "--model", folder, "--quiet")
    assert "choose one of float32" in command(*words, "--variant", "int3", code=1).stderr
    assert "--text cannot be read" in command(*words, "--text", tmp_path / "none", code=1).stderr
    (tmp_path / "other.json").write_text("{}")
    refused = command(
        *words,
        "--variant",
        "float32",
        "--rounds",
        "1",
        "--prompt-tokens",
        "8",
        "--new-tokens",
        "1",
        "--output",
        tmp_path / "other.json",
        code=1,
    )
    assert "holds no list of measurements" in refused.stderr
