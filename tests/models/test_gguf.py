"""Models from GGUF files: the same numbers as the models they were written from, for every family and way of storing."""

import json
import struct
import warnings
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

import kvweave
from kvweave.errors import ModelError, ModelNotFound, UnsupportedModel
from kvweave.machine import has_fast_matmul
from kvweave.models.gguf import convert
from kvweave.models.gguf.families import rope_parameters
from kvweave.models.gguf.header import Header, TensorEntry
from kvweave.models.source import gguf_folder
from kvweave.testing import tiny_model, tiny_tokenizer
from support.gguf_files import ARCHITECTURES, write_gguf

IDS = torch.randint(3, 260, (1, 90), generator=torch.Generator().manual_seed(1))


def converted(path: Path, home: Path) -> Path:
    found = gguf_folder(str(path), home)
    assert found is not None
    return Path(found.place)


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(IDS).logits


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_gives_the_logits_of_the_model_that_was_written(family, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tiny configurations draw notices from some families
        written = write_gguf(tmp_path / "model.gguf", family)
        read = AutoModelForCausalLM.from_pretrained(converted(tmp_path / "model.gguf", tmp_path))
        torch.testing.assert_close(logits(read), logits(written), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2"])
@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0"])
def test_gives_the_weights_that_transformers_reads_from_the_file(family, kind, tmp_path):
    write_gguf(tmp_path / "model.gguf", family, kind)
    ours = load_file(converted(tmp_path / "model.gguf", tmp_path) / "model.safetensors")
    theirs = load_gguf_checkpoint(
        tmp_path / "model.gguf", return_tensors=True, model_to_load=tiny_model(family)
    )
    for name, weight in ours.items():
        stored = {"F32": torch.float32, "BF16": torch.bfloat16}.get(kind, torch.float16)
        if weight.ndim == 1:
            stored = torch.float32
        elif weight.shape[-1] % gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][0]:
            stored = torch.float16
        assert weight.dtype == stored, name
        torch.testing.assert_close(weight.float(), theirs["tensors"][name].to(stored).float(), atol=0, rtol=0)


@pytest.mark.parametrize(("kind", "dtype"), [("F32", "float32"), ("F16", "bfloat16"), ("Q8_0", "bfloat16")])
def test_never_computes_in_float16_by_accident(kind, dtype, tmp_path):
    write_gguf(tmp_path / "model.gguf", "qwen2", kind)
    folder = converted(tmp_path / "model.gguf", tmp_path)
    assert json.loads((folder / "config.json").read_text())["dtype"] == dtype
    adapter = kvweave.load_model(str(tmp_path / "model.gguf"), home=tmp_path, device="cpu")
    named = getattr(torch, dtype)
    assert adapter.geometry.dtype == (named if has_fast_matmul(torch.device("cpu"), named) else torch.float32)


def test_names_the_version_of_transformers(tmp_path):
    """Without it, transformers below 5.20 and vLLM warn that the tokenizer's pattern is incorrect."""
    write_gguf(tmp_path / "model.gguf", "qwen2")
    config = json.loads((converted(tmp_path / "model.gguf", tmp_path) / "config.json").read_text())
    assert config["transformers_version"] == transformers.__version__


def test_blocks_of_four_bits_are_dequantised_as_gguf_does_it():
    blocks = np.random.default_rng(0).integers(0, 256, (6, 2 * 144), dtype=np.uint8)
    blocks.reshape(-1, 144)[:, :4] = np.array([0.01, 0.02], np.float16).view(np.uint8)
    expected = gguf.dequantize(blocks, gguf.GGMLQuantizationType.Q4_K)
    tensor = TensorEntry("blk.0.ffn_up.weight", (6, 512), int(gguf.GGMLQuantizationType.Q4_K), blocks.ravel())
    header = Header(Path("x"), {"general.architecture": "qwen2"}, (tensor,))
    found = convert.read_tensor(header, tensor)
    assert found.dtype == torch.float16
    assert torch.equal(found, torch.from_numpy(expected).half())


def test_numbers_beyond_float16_stay_float32():
    blocks = np.zeros((2, 34), np.uint8)
    blocks[:, :2] = np.array([60000], np.float16).view(np.uint8)
    blocks[:, 2:] = 100
    tensor = TensorEntry("blk.0.ffn_up.weight", (2, 32), int(gguf.GGMLQuantizationType.Q8_0), blocks.ravel())
    found = convert.read_tensor(Header(Path("x"), {"general.architecture": "qwen2"}, (tensor,)), tensor)
    assert found.dtype == torch.float32
    assert float(found[1, 1]) == float(np.float16(60000)) * 100


def test_large_models_are_written_in_several_files(tmp_path, monkeypatch):
    monkeypatch.setattr(convert, "SHARD_BYTES", 20_000)
    written = write_gguf(tmp_path / "model.gguf")
    folder = converted(tmp_path / "model.gguf", tmp_path)
    assert len(list(folder.glob("model-*-of-*.safetensors"))) > 2
    read = AutoModelForCausalLM.from_pretrained(folder)
    torch.testing.assert_close(logits(read), logits(written), atol=1e-4, rtol=1e-4)


def test_all_parts_of_a_split_file_are_read_whichever_is_named(tmp_path):
    written = write_gguf(tmp_path / "model.gguf", parts=3)
    third = tmp_path / "model-00003-of-00003.gguf"
    adapter = kvweave.load_model(str(third), home=tmp_path)
    assert adapter.fingerprint.name == str(tmp_path / "model-00001-of-00003.gguf")
    torch.testing.assert_close(logits(adapter.model), logits(written), atol=1e-4, rtol=1e-4)
    assert kvweave.load_model(str(tmp_path), home=tmp_path).fingerprint == adapter.fingerprint
    third.unlink()
    with pytest.raises(ModelNotFound, match=r"one of 3 parts.* model-00003-of-00003\.gguf is not beside it"):
        kvweave.load_model(str(tmp_path / "model-00001-of-00003.gguf"), home=tmp_path)


def test_a_part_under_another_name_is_refused(tmp_path):
    write_gguf(tmp_path / "model.gguf", parts=2)
    (tmp_path / "model-00001-of-00002.gguf").rename(tmp_path / "first.gguf")
    with pytest.raises(ModelNotFound, match="one of 2 parts of a model, but 1 is given"):
        kvweave.load_model(str(tmp_path / "first.gguf"), home=tmp_path)


# Vocabularies


def test_a_byte_level_vocabulary_gives_the_same_ids(tmp_path):
    write_gguf(tmp_path / "model.gguf")
    read, original = (
        AutoTokenizer.from_pretrained(converted(tmp_path / "model.gguf", tmp_path)),
        tiny_tokenizer(),
    )
    text = "The other theory, there:  naïve ☺\n\tthe end<eos>"
    expected = original(text, add_special_tokens=False)["input_ids"]
    assert read(text, add_special_tokens=False)["input_ids"] == expected
    assert read.decode(expected) == text
    assert (read.bos_token, read.eos_token, read.pad_token) == ("<bos>", "<eos>", "<pad>")


def test_a_vocabulary_of_sentence_pieces_merges_the_best_pieces_first(tmp_path):
    write_gguf(tmp_path / "model.gguf", vocabulary="llama")
    read = AutoTokenizer.from_pretrained(converted(tmp_path / "model.gguf", tmp_path))
    assert read.convert_ids_to_tokens(read("the cat é")["input_ids"]) == [
        "<bos>", "▁the", "▁cat", "▁", "<0xC3>", "<0xA9>",
    ]  # fmt: skip
    write_gguf(tmp_path / "other.gguf", vocabulary="llama", change={"tokenizer.ggml.add_space_prefix": False})
    other = AutoTokenizer.from_pretrained(converted(tmp_path / "other.gguf", tmp_path))
    ids = other("the cat")["input_ids"]
    assert other.convert_ids_to_tokens(ids) == ["<bos>", "the", "▁cat"]
    assert other.decode(ids[1:]) == "the cat"


def test_bos_is_added_as_the_file_says(tmp_path):
    for wanted in (True, False):
        path = tmp_path / f"{wanted}.gguf"
        write_gguf(path, change={"tokenizer.ggml.add_bos_token": wanted})
        read = AutoTokenizer.from_pretrained(converted(path, tmp_path))
        assert (read("in")["input_ids"][0] == read.bos_token_id) == wanted


def test_chat_template_and_ends_of_answers_come_along(tmp_path):
    template = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    write_gguf(
        tmp_path / "model.gguf",
        change={"tokenizer.chat_template": template, "tokenizer.ggml.eot_token_id": 9},
    )
    folder = converted(tmp_path / "model.gguf", tmp_path)
    read = AutoTokenizer.from_pretrained(folder)
    assert read.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "[hi]"
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [2, 9]


# Scaled positions


def rope_header(**factors: list[float]) -> Header:
    tensors = tuple(
        TensorEntry(f"{name}.weight", (len(each),), 0, np.array(each, np.float32).view(np.uint8))
        for name, each in factors.items()
    )
    settings = {"llama.rope.freq_base": 500000.0, "llama.context_length": 131072}
    return Header(Path("x"), {"general.architecture": "llama", **settings}, tensors)


def test_the_factors_of_llama_3_are_recognised():
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    config = LlamaConfig(head_dim=64, rope_parameters=rope)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    factors = (1 / 500000.0 ** (torch.arange(0, 64, 2) / 64) / scaled).tolist()
    assert rope_parameters(rope_header(rope_freqs=factors)) == rope
    assert rope_parameters(rope_header(rope_freqs=[1.0, 2.0]))["rope_type"] == "longrope"


# What cannot be read


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"general.architecture": "mamba"}, "architecture 'mamba'; kvweave reads GGUF files of llama, qwen2"),
        ({"general.architecture": "clip"}, r"image part of a model \(mmproj\)"),
        ({"general.type": "adapter"}, "type 'adapter'"),
        ({"llama.expert_count": 8}, "mixture of experts"),
        ({"llama.rope.scaling.type": "su", "llama.rope.scaling.factor": 2.0}, "scales positions by 'su'"),
        ({"llama.attention.causal": False}, "makes embeddings"),
        ({"llama.block_count": None}, "does not say its llama.block_count"),
        ({"llama.feed_forward_length": 40}, "of shape"),
        ({"tokenizer.ggml.pre": "klingon"}, "splits text into words by 'klingon'"),
        ({"tokenizer.ggml.model": "bert"}, "vocabulary of kind 'bert'"),
    ],
)
def test_what_kvweave_cannot_run_is_named(change, message, tmp_path):
    write_gguf(tmp_path / "model.gguf", change=change)
    with pytest.raises(UnsupportedModel, match=message):
        kvweave.load_model(str(tmp_path / "model.gguf"), home=tmp_path / "home")
    assert not list(tmp_path.glob("home/models/gguf/*-v*"))


def test_a_missing_tensor_is_named(tmp_path):
    write_gguf(tmp_path / "model.gguf", without="blk.1.ffn_up.weight")
    with pytest.raises(ModelNotFound, match=r"lacks the tensors blk\.1\.ffn_up\.weight"):
        kvweave.load_model(str(tmp_path / "model.gguf"), home=tmp_path)


def test_a_file_cut_off_anywhere_is_refused(tmp_path):
    write_gguf(tmp_path / "whole.gguf")
    data = (tmp_path / "whole.gguf").read_bytes()
    path = tmp_path / "cut.gguf"
    for length in [0, 3, 4, 8, 30, 200, 5_000, len(data) // 2, len(data) - 40]:
        path.write_bytes(data[:length])
        with pytest.raises(ModelNotFound, match=r"is cut off|not a GGUF file"):
            kvweave.load_model(str(path), home=tmp_path / "home")
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"general.alignment": "x"}, "alignment"),
        ({"split.count": "x"}, "numbers of parts"),
        ({"llama.block_count": 2**32 - 1}, "layers, but"),
        ({"llama.embedding_length": "x"}, "is damaged"),
        ({"llama.attention.head_count": 0}, "is damaged"),
        ({"tokenizer.ggml.tokens": [1, 2]}, "is damaged"),
        ({"tokenizer.ggml.bos_token_id": 99_999}, "is damaged"),
    ],
)
def test_metadata_of_the_wrong_kind_or_size_end_in_one_line(change, message, tmp_path):
    write_gguf(tmp_path / "odd.gguf", change=change)
    with pytest.raises(ModelError, match=message) as caught:
        gguf_folder(str(tmp_path / "odd.gguf"), tmp_path / "home")
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("kind", ["lists in lists", "axes"])
def test_a_header_cannot_make_its_reader_recurse_or_multiply_without_end(kind, tmp_path):
    lists = struct.pack("<IQ", 9, 1) * 100_000
    metadata = struct.pack("<QcI", 1, b"a", 9) + lists
    tensor = struct.pack("<QcI", 1, b"a", 100_000) + b"\xff" * 800_000 + struct.pack("<IQ", 0, 0)
    counts, body = ((0, 1), metadata) if kind == "lists in lists" else ((1, 0), tensor)
    (tmp_path / "odd.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, *counts) + body)
    with pytest.raises(ModelNotFound, match=kind):
        gguf_folder(str(tmp_path / "odd.gguf"), tmp_path / "home")


def test_files_that_are_not_gguf(tmp_path):
    (tmp_path / "text.gguf").write_text("hello" * 100)
    with pytest.raises(ModelNotFound, match="is not a GGUF file"):
        kvweave.load_model(str(tmp_path / "text.gguf"), home=tmp_path)
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(ModelNotFound, match="not a folder or GGUF file"):
        kvweave.load_model(str(tmp_path / "notes.txt"), home=tmp_path)


def test_unknown_versions_and_types_of_tensors(tmp_path):
    write_gguf(tmp_path / "model.gguf")
    data = bytearray((tmp_path / "model.gguf").read_bytes())
    data[4:8] = (3).to_bytes(4, "big")
    (tmp_path / "big.gguf").write_bytes(data)
    with pytest.raises(UnsupportedModel, match="other byte order"):
        kvweave.load_model(str(tmp_path / "big.gguf"), home=tmp_path)
    data[4:8] = (3).to_bytes(4, "little")
    at = data.index(b"output_norm.weight") + len(b"output_norm.weight") + 4 + 8
    data[at : at + 4] = (213).to_bytes(4, "little")
    (tmp_path / "new.gguf").write_bytes(data)
    with pytest.raises(UnsupportedModel, match=r"ggml type 213 \(output_norm\.weight\)"):
        kvweave.load_model(str(tmp_path / "new.gguf"), home=tmp_path)
    data[at : at + 4] = int(gguf.GGMLQuantizationType.I32).to_bytes(4, "little")
    (tmp_path / "whole_numbers.gguf").write_bytes(data)
    with pytest.raises(UnsupportedModel, match=r"of type I32 \(output_norm\.weight\)"):
        kvweave.load_model(str(tmp_path / "whole_numbers.gguf"), home=tmp_path)


def test_unknown_settings_are_logged(tmp_path, caplog):
    write_gguf(tmp_path / "model.gguf", change={"llama.attention.sigmoid": True})
    converted(tmp_path / "model.gguf", tmp_path)
    assert "settings that kvweave does not know: llama.attention.sigmoid" in caplog.text
