"""The dtype and bits that a model is loaded with: by the CPU's units, by memory, and as the user says."""

import json
import logging

import pytest
import torch
from safetensors.torch import save_file

import kvweave
from kvweave.errors import InvalidRequest, NotEnoughMemory
from kvweave.models import precision
from kvweave.models.precision import WeightSizes, choose_precision, read_sizes
from kvweave.testing import tiny_model, tiny_tokenizer

CPU, GPU = torch.device("cpu"), torch.device("cuda")
GB = 10**9
SIZES = WeightSizes(
    linear=GB,
    packed_linear=GB,
    embedding=GB // 10,
    head=GB // 10,
    packed_head=GB // 10,
    others=1000,
    tied=False,
    dtype=torch.bfloat16,
)


@pytest.fixture(params=[{"avx2": True}, {"avx512_bf16": True}], ids=["no bfloat16 units", "bfloat16 units"])
def units(request, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: request.param)
    return request.param


def choose(dtype="auto", bits="auto", memory=100 * GB, sizes=SIZES, device=CPU):
    return choose_precision(sizes, "some/model", dtype, bits, device, memory)


def test_float32_where_the_cpu_has_no_units_for_the_checkpoint(units):
    chosen = choose()
    fast = "avx512_bf16" in units
    assert (chosen.dtype, chosen.bits) == (torch.bfloat16 if fast else torch.float32, "full")
    assert (chosen.notice is None) == fast
    assert fast or "stored in bfloat16 and computes in float32" in chosen.notice
    assert not chosen.important


def test_float16_checkpoints_compute_in_float32_on_any_cpu(monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_fp16": True})
    half = WeightSizes(**{**{name: getattr(SIZES, name) for name in SIZES.__slots__}, "dtype": torch.float16})
    assert choose(sizes=half).dtype == torch.float32
    assert choose(sizes=half, device=GPU).dtype == torch.float16


def test_a_gpu_takes_the_dtype_of_the_checkpoint():
    assert choose(device=GPU).dtype == torch.bfloat16
    full = WeightSizes(**{**{name: getattr(SIZES, name) for name in SIZES.__slots__}, "dtype": torch.float32})
    assert choose(device=GPU, sizes=full).dtype == torch.float32


def test_less_memory_gives_the_checkpoints_dtype_and_then_8_bits(monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True})
    slow = choose(memory=3 * GB)
    assert (slow.dtype, slow.bits, slow.important) == (torch.bfloat16, "full", True)
    assert "--weights int8 is faster" in slow.notice
    small = choose(memory=2 * GB)
    assert (small.dtype, small.bits, small.important) == (torch.float32, "int8", True)
    assert "do not fit into memory; its linear layers have int8 weights" in small.notice
    with pytest.raises(NotEnoughMemory, match=r"--weights int4 \(838 MB\) would fit"):
        choose(memory=10**9)  # fewer than 8 bits are the user's choice


@pytest.mark.parametrize(
    ("memory", "advice"),
    [
        (3 * GB, r"--dtype bfloat16 \(2\.4 GB\) or --weights int8 \(1\.2 GB\) or --weights int4"),
        (2 * GB, r"in float32, and 2\.0 GB of memory are left; --weights int8 \(1\.2 GB\) or --weights int4"),
        (10**9, r"; --weights int4 \(838 MB\) would fit"),
        (10**8, "even the fewest bits need 838 MB: take a smaller --model"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_would(memory, advice):
    with pytest.raises(NotEnoughMemory, match=advice) as refused:
        choose(dtype="float32", bits="full", memory=memory)
    assert "\n" not in str(refused.value)


def test_named_bits_are_not_replaced():
    assert choose(bits="int4").bits == "int4"
    with pytest.raises(NotEnoughMemory, match=r"for its weights in int8"):
        choose(bits="int8", memory=10**9)


def test_unknown_or_impossible_choices():
    with pytest.raises(InvalidRequest, match="weights 'int3' is unknown; use auto, full, int8, int4"):
        choose(bits="int3")
    with pytest.raises(InvalidRequest, match="multiplied in float32 on a CPU, not in bfloat16"):
        choose(dtype="bfloat16", bits="int8")
    assert choose(dtype="bfloat16", bits="int8", device=GPU).dtype == torch.bfloat16


def test_sizes_are_read_from_the_files_headers(tmp_path):
    tiny_model("gemma3").to(torch.bfloat16).save_pretrained(tmp_path)
    sizes, model = read_sizes(tmp_path), tiny_model("gemma3")
    assert sizes is not None
    assert sizes.dtype == torch.bfloat16
    held = sum(each.numel() for each in model.parameters())
    assert sizes.bytes(torch.float32, "full") == 4 * held
    assert sizes.tied == (model.get_output_embeddings().weight is model.get_input_embeddings().weight)


def test_files_in_parts_and_damaged_ones(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"tie_word_embeddings": False}))
    save_file({"model.embed_tokens.weight": torch.ones(10, 8)}, tmp_path / "model-00001-of-00002.safetensors")
    save_file(
        {"lm_head.weight": torch.ones(10, 8), "norm.weight": torch.ones(8)},
        tmp_path / "model-00002-of-00002.safetensors",
    )
    sizes = read_sizes(tmp_path)
    assert sizes is not None
    assert (sizes.embedding, sizes.head, sizes.others, sizes.linear, sizes.tied) == (80, 80, 8, 0, False)
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(b"\xff" * 7)
    assert read_sizes(tmp_path) is None


@pytest.mark.parametrize("shape", ["[8, 1e999]", "[8, -1]", "[1, 1, 1, 9999999999999]"])
def test_no_size_is_read_from_a_header_that_names_more_weights_than_the_file_has(tmp_path, shape):
    header = f'{{"norm.weight": {{"dtype": "F32", "shape": {shape}, "data_offsets": [0, 4]}}}}'.encode()
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    assert read_sizes(tmp_path) is None


def test_too_little_memory_is_said_before_anything_is_loaded(tmp_path, monkeypatch):
    tiny_model().save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    monkeypatch.setattr(precision, "available_memory_bytes", lambda: 1000)
    monkeypatch.setattr("kvweave.models.loading.AutoModelForCausalLM", None)
    monkeypatch.setattr("kvweave.models.loading.AutoTokenizer", None)
    with pytest.raises(NotEnoughMemory, match="of memory are left"):
        kvweave.load_model(str(tmp_path), device="cpu")


def test_the_choice_is_logged_in_one_line(tmp_path, monkeypatch, caplog):
    tiny_model().to(torch.bfloat16).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True})
    caplog.set_level(logging.INFO, "kvweave")
    assert kvweave.load_model(str(tmp_path), device="cpu").geometry.dtype == torch.float32
    assert not caplog.records  # a tiny model
    monkeypatch.setattr(precision, "NOTABLE_BYTES", 0)
    kvweave.load_model(str(tmp_path), device="cpu", dtype="bfloat16")
    assert not caplog.records  # the caller chose it
    kvweave.load_model(str(tmp_path), device="cpu")
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert "is stored in bfloat16 and computes in float32" in caplog.text
