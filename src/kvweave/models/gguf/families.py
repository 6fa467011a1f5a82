"""The model families that GGUF files are read of: what `config.json` says of each, and what differs in its weights.

transformers reads GGUF files too, but leaves out what the files of some families say: rope scaling, head widths, windows. So
the configuration is written here from all that a file says. `ROWS` are the families.
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from torch import Tensor

from kvweave.errors import UnsupportedModel
from kvweave.models.gguf.header import Header

_LOG = logging.getLogger(__name__)

Settings = dict[str, Any]

_READ: Final = frozenset(
    {
        *("context_length", "embedding_length", "block_count", "feed_forward_length", "vocab_size"),
        *(
            "attention.head_count",
            "attention.head_count_kv",
            "attention.key_length",
            "attention.value_length",
        ),
        *("attention.layer_norm_rms_epsilon", "attention.causal", "attention.sliding_window"),
        *("attention.sliding_window_pattern", "attn_logit_softcapping", "final_logit_softcapping"),
        *("rope.dimension_count", "rope.freq_base", "rope.freq_base_swa", "rope.scale_linear"),
        *("rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length"),
        *("rope.scaling.attn_factor", "rope.scaling.finetuned", "rope.dimension_count_swa"),
        "expert_count",
    }
)


@dataclass(frozen=True, slots=True)
class Family:
    """How one architecture of llama.cpp is written in transformers.

    Attributes:
        model_type: transformers' name.
        settings: returns what only this family's configuration has.
        interleaved: llama.cpp stores the rows of q and k so that the two dims that turn together are neighbours.
        norm_offset: what llama.cpp added to the weights of all norms.
    """

    model_type: str
    settings: Callable[[Header], Settings]
    interleaved: bool = False
    norm_offset: float = 0.0


def family_of(header: Header) -> Family:
    """Return the family of a file; raises UnsupportedModel, naming what it is, if kvweave does not read it."""
    name, kind = header.architecture, header.metadata.get("general.type", "model")
    if name == "clip" or kind == "mmproj":
        raise UnsupportedModel(
            f"{header.path} is the image part of a model (mmproj), not its language model; name the other file"
        )
    if kind != "model":
        raise UnsupportedModel(f"{header.path} is no whole model but of type {kind!r}; name the model's file")
    if name not in ROWS:
        raise UnsupportedModel(
            f"{header.path} has the architecture {name or 'none'!r}; kvweave reads GGUF files of {', '.join(ROWS)}. If "
            "transformers knows the model, name its folder or hub id with *.safetensors instead"
        )
    return ROWS[name]


def model_config(header: Header) -> Settings:
    """Return what `config.json` holds: a transformers configuration, in the family's usual dtype.

    Raises UnsupportedModel for a file with something that the family's configuration cannot say.
    """
    family = family_of(header)
    try:
        config = {**_common(header), **family.settings(header)}
    except KeyError as error:
        raise UnsupportedModel(
            f"{header.path} does not say its {error.args[0]}; it was not made by llama.cpp's converter"
        ) from error
    prefix = f"{header.architecture}."
    unread = [key for key in header.metadata if key.startswith(prefix) and key[len(prefix) :] not in _READ]
    if unread:
        _LOG.warning(
            "%s has settings that kvweave does not know: %s; compare an answer with llama.cpp's",
            header.path,
            ", ".join(unread),
        )
    return {"model_type": family.model_type, **config}


def restore(header: Header, name: str, weights: Tensor) -> Tensor:
    """Undo what llama.cpp's converter did to a tensor. `weights` has the shape that transformers has."""
    family = family_of(header)
    if family.norm_offset and name.endswith("norm.weight"):
        return weights.float() - family.norm_offset
    heads = {"attn_q": "attention.head_count", "attn_k": "attention.head_count_kv"}
    part = name.split(".")[-2] if "." in name else ""
    if family.interleaved and part in heads:
        count = _single(header.get(heads[part]) or header.get("attention.head_count"))
        pairs = weights.reshape(count, -1, 2, *weights.shape[1:])  # heads, D / 2, 2, inputs
        return pairs.transpose(1, 2).reshape(weights.shape)
    return weights


def _common(header: Header) -> Settings:
    hidden, heads = _need(header, "embedding_length"), _need(header, "attention.head_count")
    kv_heads = header.get("attention.head_count_kv", heads)
    lists = [
        each for each in (heads, kv_heads, _need(header, "feed_forward_length")) if isinstance(each, list)
    ]
    if any(len(set(each)) > 1 for each in lists):
        raise UnsupportedModel(
            f"{header.path} has layers of different sizes, which {header.architecture} has not"
        )
    heads, kv_heads, wide = map(_single, (heads, kv_heads, header.get("feed_forward_length")))
    width = head_width(header)
    if header.get("attention.value_length", width) != width:
        raise UnsupportedModel(f"{header.path} has keys and values of different widths; one is needed")
    if header.get("expert_count"):
        raise UnsupportedModel(
            f"{header.path} is a mixture of experts; name a folder or hub id with *.safetensors"
        )
    if not header.get("attention.causal", True):
        raise UnsupportedModel(f"{header.path} makes embeddings and cannot answer; name a language model")
    names, layers = {tensor.name for tensor in header.tensors}, _need(header, "block_count")
    if not isinstance(layers, int) or layers > len(names):  # before as many layers are made
        raise UnsupportedModel(
            f"{header.path} has {str(layers)[:20]} layers, but {len(names)} tensors; download it again"
        )
    ids = {name: header.metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in _IDS.items()}
    return {
        "hidden_size": hidden,
        "intermediate_size": wide,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": width,
        "max_position_embeddings": _need(header, "context_length"),
        "rms_norm_eps": _need(header, "attention.layer_norm_rms_epsilon"),
        "rope_parameters": rope_parameters(header),
        "vocab_size": _vocabulary(header),
        # llama.cpp writes the output projection only where it is not the embedding.
        "tie_word_embeddings": "output.weight" not in names,
        **ids,
    }


_IDS: Final = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}


def _need(header: Header, key: str) -> Any:
    value = header.get(key)
    if value is None:
        raise KeyError(f"{header.architecture}.{key}")
    return value


def _single(value: Any) -> Any:
    return value[0] if isinstance(value, list) else value


def _vocabulary(header: Header) -> int:
    """Return the rows of the embedding, some of which may belong to no word."""
    for tensor in header.tensors:
        if tensor.name == "token_embd.weight":
            return tensor.shape[0]
    raise UnsupportedModel(f"{header.path} has no token embedding (token_embd.weight)")


def head_width(header: Header) -> int:
    """Return D, the width of a head."""
    heads = _single(_need(header, "attention.head_count"))
    return int(header.get("attention.key_length") or _need(header, "embedding_length") // heads)


def _has(header: Header, *names: str) -> bool:
    return any(tensor.name.endswith(names) for tensor in header.tensors)


def _llama(header: Header) -> Settings:
    return {"attention_bias": _has(header, "attn_q.bias"), "mlp_bias": _has(header, "ffn_up.bias")}


def _qwen3(header: Header) -> Settings:
    return {"attention_bias": _has(header, "attn_q.bias"), "use_sliding_window": False}


def _phi3(header: Header) -> Settings:
    turning = header.get("rope.dimension_count", head_width(header))
    context = _need(header, "context_length")
    return {
        "sliding_window": header.get("attention.sliding_window") or None,
        "partial_rotary_factor": turning / head_width(header),
        "original_max_position_embeddings": header.get("rope.scaling.original_context_length", context),
    }


def _gemma2(header: Header) -> Settings:
    return {
        "sliding_window": _need(header, "attention.sliding_window"),
        "layer_types": _layer_types(header, every=2),
        "query_pre_attn_scalar": _query_scale(header, 46),
        "attn_logit_softcapping": header.get("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": header.get("final_logit_softcapping", 30.0),
    }


def _gemma3(header: Header) -> Settings:
    return {
        "sliding_window": _need(header, "attention.sliding_window"),
        "layer_types": _layer_types(header, every=6),
        "query_pre_attn_scalar": _query_scale(header, 62),
        "attn_logit_softcapping": header.get("attn_logit_softcapping"),
        "final_logit_softcapping": header.get("final_logit_softcapping"),
        "rope_parameters": {
            "full_attention": rope_parameters(header),
            "sliding_attention": {"rope_type": "default", "rope_theta": rope_theta(header, "_swa")},
        },
    }


def _layer_types(header: Header, *, every: int) -> list[str]:
    """Return each layer's attention: full in every `every`-th, unless the file says another number or lists the layers."""
    pattern = header.get("attention.sliding_window_pattern", every)
    layers = range(_need(header, "block_count"))
    sliding = (
        [bool(each) for each in pattern]
        if isinstance(pattern, list)
        else [(layer + 1) % pattern != 0 for layer in layers]
    )
    return ["sliding_attention" if each else "full_attention" for each in sliding]


def _query_scale(header: Header, layers_of_27b: int) -> int:
    """Return what queries are divided by the root of: the head's width, but not in the 27B models, which no key says.

    llama.cpp knows those by their number of layers too (src/models/gemma3.cpp).
    """
    if _need(header, "block_count") == layers_of_27b:
        return int(_need(header, "embedding_length") // _single(_need(header, "attention.head_count")))
    return head_width(header)


ROWS: Final[Mapping[str, Family]] = {
    "llama": Family("llama", _llama, interleaved=True),  # Mistral's too
    "qwen2": Family("qwen2", lambda header: {"use_sliding_window": False}),
    "qwen3": Family("qwen3", _qwen3),
    "phi3": Family("phi3", _phi3),
    "gemma": Family("gemma", lambda header: {}, norm_offset=1.0),
    "gemma2": Family("gemma2", _gemma2, norm_offset=1.0),
    "gemma3": Family("gemma3_text", _gemma3, norm_offset=1.0),
}


ROPE_FACTORS: Final = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that are settings, not weights."""

_LLAMA3: Final = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def rope_theta(header: Header, suffix: str = "") -> float:
    """Return the base of the frequencies; `_swa` is that of the layers with a window."""
    return float(header.get(f"rope.freq_base{suffix}", 10_000.0))


def rope_parameters(header: Header) -> dict[str, Any]:
    """Return transformers' `rope_parameters` of the layers without a window.

    Some converters write the scaling as metadata, those of Llama 3 and Phi 3 as tensors of one factor per pair of dims.
    Raises UnsupportedModel for a kind of scaling that transformers does not have.
    """
    theta = rope_theta(header)
    factors = {name: _factors(header, name) for name in ROPE_FACTORS}
    if factors["rope_freqs.weight"] is not None:
        return _scaled_frequencies(header, theta, factors["rope_freqs.weight"])
    long, short = factors["rope_factors_long.weight"], factors["rope_factors_short.weight"]
    if long is not None and short is not None:
        return _longrope(header, theta, long, short)
    kind = header.get("rope.scaling.type", "none")
    factor = header.get("rope.scaling.factor") or header.get("rope.scale_linear")
    if header.get("rope.scale_linear") and kind == "none":
        kind = "linear"
    if kind == "none" or not factor:
        return {"rope_type": "default", "rope_theta": theta}
    if kind == "linear":
        return {"rope_type": "linear", "rope_theta": theta, "factor": float(factor)}
    if kind == "yarn":
        original = header.get("rope.scaling.original_context_length")
        more = {} if original is None else {"original_max_position_embeddings": original}
        return {"rope_type": "yarn", "rope_theta": theta, "factor": float(factor), **more}
    raise UnsupportedModel(f"{header.path} scales positions by {kind!r}; kvweave reads none, linear and yarn")


def _factors(header: Header, name: str) -> list[float] | None:
    """Return a tensor of factors, D / 2 of them."""
    for tensor in header.tensors:
        if tensor.name == name:
            return [float(str(factor)) for factor in tensor.data.view(np.float32)]
    return None


def _scaled_frequencies(header: Header, theta: float, factors: Sequence[float]) -> dict[str, Any]:
    """Return Llama 3's scaling if the factors are those, else the same factors for all lengths.

    llama.cpp divides each frequency by its factor, which is what longrope does too.
    """
    llama3 = {"rope_type": "llama3", "rope_theta": theta, "factor": max(factors), **_LLAMA3}
    if np.allclose(_llama3_factors(theta, 2 * len(factors), max(factors)), factors, rtol=1e-5):
        return llama3
    return {
        "rope_type": "longrope",
        "rope_theta": theta,
        "long_factor": list(factors),
        "short_factor": list(factors),
        "factor": 1.0,
        "attention_factor": 1.0,
        "original_max_position_embeddings": header.get("context_length"),
    }


def _llama3_factors(theta: float, dims: int, factor: float) -> list[float]:
    """Return the factors that llama.cpp's converter writes for Llama 3 (convert_hf_to_gguf.py)."""
    low, high, original = _LLAMA3.values()
    found = []
    for dim in range(0, dims, 2):
        wavelength = 2 * math.pi * theta ** (dim / dims)
        if wavelength < original / high:
            found.append(1.0)
        elif wavelength > original / low:
            found.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            found.append(1 / ((1 - smooth) / factor + smooth))
    return found


def _longrope(header: Header, theta: float, long: list[float], short: list[float]) -> dict[str, Any]:
    context = header.get("context_length")
    original = header.get("rope.scaling.original_context_length", context)
    found = {
        "rope_type": "longrope",
        "rope_theta": theta,
        "long_factor": long,
        "short_factor": short,
        "factor": context / original,
        "original_max_position_embeddings": original,
    }
    attention = header.get("rope.scaling.attn_factor")
    return found if attention is None else {**found, "attention_factor": attention}
