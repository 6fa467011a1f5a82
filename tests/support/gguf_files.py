"""Small GGUF files, written from tiny models as llama.cpp's converter writes them."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import PreTrainedModel

from kvweave.testing import tiny_model, tiny_tokenizer

ARCHITECTURES = {
    "llama": "llama",
    "llama-3": "llama",
    "llama-yarn": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "phi3": "phi3",
    "phi3-partial": "phi3",
    "phi3-sliding": "phi3",
    "phi3-longrope": "phi3",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3": "gemma3",
}
CONTROL, NORMAL, UNUSED, BYTE = 3, 1, 5, 6


def write_gguf(
    path: Path,
    family: str = "llama",
    kind: str = "F32",
    *,
    change: dict[str, Any] | None = None,
    without: str = "",
    parts: int = 1,
    vocabulary: str = "gpt2",
) -> PreTrainedModel:
    """Write the tiny model of a family and return it.

    `kind` is how matrices are stored, where their rows are long enough. `change` replaces metadata; a value of None leaves a
    key out. `without` leaves a tensor out. `parts` splits the tensors into that many files.
    """
    model = tiny_model(family)
    if family in ("gemma2", "gemma3"):  # as in all real ones but the largest, which the format cannot say
        model.config.query_pre_attn_scalar = model.config.head_dim
        for layer in model.model.layers:
            layer.self_attn.scaling = model.config.head_dim**-0.5
    architecture = ARCHITECTURES[family]
    tensors = {name: each for name, each in _tensors(model, architecture).items() if name != without}
    found = {**_metadata(model, architecture), **_VOCABULARIES[vocabulary](), **(change or {})}
    most = -(-len(tensors) // parts) if parts > 1 else 0
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=most)
    for key, value in found.items():
        if key == "general.architecture":
            writer.add_string(key, value)
        elif value is not None:
            _add(writer, key, value)
    wanted = gguf.GGMLQuantizationType[kind]
    for name, weight in tensors.items():
        stored = _stored_kind(weight, wanted)
        writer.add_tensor(name, gguf.quantize(weight, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _stored_kind(weight: np.ndarray, wanted: gguf.GGMLQuantizationType) -> gguf.GGMLQuantizationType:
    block, _ = gguf.GGML_QUANT_SIZES[wanted]
    if weight.ndim == 1:
        return gguf.GGMLQuantizationType.F32
    return wanted if weight.shape[-1] % block == 0 else gguf.GGMLQuantizationType.F16


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, list):
        writer.add_array(key, value)
        return
    {str: writer.add_string, bool: writer.add_bool, float: writer.add_float32, int: writer.add_uint32}[
        type(value)
    ](key, value)


def _tensors(model: PreTrainedModel, architecture: str) -> dict[str, np.ndarray]:
    config = model.config
    arch = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == architecture)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    found = {}
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            weight = weight + 1
        for part, heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
            if architecture == "llama" and part in name:  # from halves to neighbours
                halves = weight.reshape(heads, 2, -1, *weight.shape[1:])
                weight = halves.transpose(1, 2).reshape(weight.shape)
        found[names.get_name(name, try_suffixes=(".weight", ".bias"))] = weight.contiguous().numpy()
    return {**found, **_rope_factors(config)}


def _rope_factors(config: Any) -> dict[str, np.ndarray]:
    rope = config.rope_parameters
    if rope.get("rope_type") == "longrope":
        return {
            f"rope_factors_{name}.weight": np.array(rope[f"{name}_factor"], np.float32)
            for name in ("long", "short")
        }
    if rope.get("rope_type") != "llama3":
        return {}
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 1 / rope["rope_theta"] ** (torch.arange(0, 2 * len(scaled), 2) / (2 * len(scaled)))
    return {"rope_freqs.weight": (plain / scaled).numpy()}


def _metadata(model: PreTrainedModel, architecture: str) -> dict[str, Any]:
    config, rope = model.config, model.config.rope_parameters
    full = rope.get("full_attention", rope)
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    found = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": width,
        "attention.value_length": width,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.freq_base": float(full["rope_theta"]),
        "rope.dimension_count": int(width * full.get("partial_rotary_factor", 1)),
    }
    if "sliding_attention" in rope:
        found["rope.freq_base_swa"] = float(rope["sliding_attention"]["rope_theta"])
    if rope.get("rope_type") == "yarn":
        found["rope.scaling.type"] = "yarn"
        found["rope.scaling.factor"] = rope["factor"]
    if rope.get("rope_type") in ("yarn", "longrope"):
        found["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    if architecture in ("phi3", "gemma2", "gemma3") and config.sliding_window:
        found["attention.sliding_window"] = config.sliding_window
    if architecture in ("gemma2", "gemma3"):
        found["attention.sliding_window_pattern"] = [
            kind == "sliding_attention" for kind in config.layer_types
        ]
    if architecture == "gemma2":
        found["attn_logit_softcapping"] = config.attn_logit_softcapping
        found["final_logit_softcapping"] = config.final_logit_softcapping
    return {f"{architecture}.{key}": value for key, value in found.items()}


def _byte_level() -> dict[str, Any]:
    """Return the vocabulary of `tiny_tokenizer`, filled up to the model's size as llama.cpp's converter does."""
    core = json.loads(tiny_tokenizer().backend_tokenizer.to_str())["model"]
    pieces = sorted(core["vocab"], key=core["vocab"].get)
    spare = [f"[PAD{number}]" for number in range(len(pieces), 320)]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": pieces + spare,
        "tokenizer.ggml.token_type": [CONTROL] * 3 + [NORMAL] * (len(pieces) - 3) + [UNUSED] * len(spare),
        "tokenizer.ggml.merges": [" ".join(pair) for pair in core["merges"]],
        **{f"tokenizer.ggml.{name}_token_id": token for name, token in _IDS.items()},
    }


def _sentence_pieces() -> dict[str, Any]:
    """Return a vocabulary of the kind `llama`: bytes, letters, and pieces whose scores rank the merges."""
    controls = ["<pad>", "<bos>", "<eos>", "<unk>"]
    byte_pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    words = [*"▁theinorsdcat", "th", "in", "▁t", "the", "▁the", "▁c", "at", "▁cat"]
    words = list(dict.fromkeys(words))
    spare = [f"[PAD{number}]" for number in range(4 + 256 + len(words), 320)]
    letters = sum(len(word) == 1 for word in words)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": controls + byte_pieces + words + spare,
        "tokenizer.ggml.scores": [0.0] * 260
        + [-100.0] * letters
        + [-float(number) for number in range(1, len(words) - letters + 1)]
        + [-1000.0] * len(spare),
        "tokenizer.ggml.token_type": [CONTROL] * 4
        + [BYTE] * 256
        + [NORMAL] * len(words)
        + [UNUSED] * len(spare),
        "tokenizer.ggml.unknown_token_id": 3,
        **{f"tokenizer.ggml.{name}_token_id": token for name, token in _IDS.items()},
    }


_IDS = {"padding": 0, "bos": 1, "eos": 2}
_VOCABULARIES = {"gpt2": _byte_level, "llama": _sentence_pieces}
