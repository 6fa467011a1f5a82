"""How a GGUF file says that positions are scaled, as transformers' `rope_parameters`.

Some converters write the scaling as metadata, those of Llama 3 and Phi 3 as tensors of one factor per pair of dims.
"""

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from kvweave.errors import UnsupportedModel
from kvweave.models.gguf.header import Header

FACTORS: Final = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that are settings, not weights."""

_LLAMA3: Final = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def rope_theta(header: Header, suffix: str = "") -> float:
    """Return the base of the frequencies; `_swa` is that of the layers with a window."""
    return float(header.get(f"rope.freq_base{suffix}", 10_000.0))


def rope_parameters(header: Header) -> dict[str, Any]:
    """Return transformers' `rope_parameters` of the layers without a window.

    Raises UnsupportedModel for a kind of scaling that transformers does not have.
    """
    theta = rope_theta(header)
    factors = {name: _factors(header, name) for name in FACTORS}
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
