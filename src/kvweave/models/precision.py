"""Chooses the dtype and the bits of a model's weights before they are loaded, by the units of the processor and the memory left.

Nothing is loaded here: the sizes come from the headers of the weight files.
"""

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Literal

import torch

from kvweave.errors import InvalidRequest, NotEnoughMemory
from kvweave.machine import available_memory_bytes, has_fast_matmul
from kvweave.ops.quantised_linear import packed_bytes

WeightBits = Literal["full", "int8", "int4"]
"""How many bits a weight of a linear layer has: those of the dtype, 8 or 4."""

BITS: tuple[WeightBits, ...] = ("full", "int8", "int4")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_FILE_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_INT4_BYTES = 0.625
"""Of a weight in 4 bits, with its share of a scale and an offset in 16 bits per 32 weights."""
_MARGIN = 1.05
"""What loading needs beside the weights: one layer at a time in full, and the libraries' own memory."""
NOTABLE_BYTES = 100_000_000
"""Smaller models are loaded without a word."""


@dataclass(frozen=True, slots=True)
class WeightSizes:
    """How many weights a checkpoint has.

    Attributes:
        linear: of linear layers, without the output head.
        packed_linear, packed_head: bytes of linear layers and head in 8 bits, as packed.
        embedding: of the table of tokens.
        head: of the output head; also if it shares the embedding's weight.
        others: norms and biases.
        tied: the head shares the embedding's weight.
        dtype: that of the configuration, or of most weights in the files.
    """

    linear: int
    packed_linear: int
    embedding: int
    head: int
    packed_head: int
    others: int
    tied: bool
    dtype: torch.dtype

    def bytes(self, dtype: torch.dtype, bits: WeightBits) -> int:
        """Return the memory of the loaded weights."""
        if bits == "full":
            head = 0 if self.tied else self.head
            return (self.linear + self.embedding + head + self.others) * dtype.itemsize
        linear = self.packed_linear if bits == "int8" else int(self.linear * _INT4_BYTES)
        return linear + int(self.embedding * 1.125) + self.packed_head + self.others * torch.float32.itemsize


@dataclass(frozen=True, slots=True)
class Precision:
    """How a model is loaded. `notice` is a line for the user, `important` if it names something slow or inexact."""

    dtype: torch.dtype | None
    bits: WeightBits
    notice: str | None = None
    important: bool = False


def choose_precision(
    sizes: WeightSizes | None,
    name: str,
    dtype: str,
    bits: str,
    device: torch.device,
    available_bytes: int | None = None,
) -> Precision:
    """Return the dtype and bits to load a model with; a dtype of None is the checkpoint's.

    `dtype` auto is float32 on a CPU without units for the checkpoint's dtype, and for float16 on any CPU; elsewhere, and
    where float32 does not fit into memory, it is the checkpoint's. `bits` auto is full; int8 where full does not fit and int8
    does. `sizes` None is not known, and fits.

    Raises:
        InvalidRequest: an unknown dtype or number of bits, or a pair that cannot be.
        NotEnoughMemory: the weights do not fit; the message names what would.
    """
    named = weights_named(bits, dtype, device)
    if sizes is None:
        return Precision(DTYPES.get(dtype), named)
    if available_bytes is None:
        available_bytes = _available_bytes(device)
    tried = list(_candidates(sizes, dtype, bits, device))
    for number, (tried_dtype, tried_bits) in enumerate(tried):
        if sizes.bytes(tried_dtype, tried_bits) * _MARGIN <= available_bytes:
            found = Precision(tried_dtype, tried_bits)
            return _with_notice(found, sizes, name, tried[0] if number else None, device, dtype == "auto")
    raise NotEnoughMemory(_shortage(sizes, name, tried[0], available_bytes, device))


def parse_dtype(dtype: str) -> torch.dtype | None:
    """Return the named dtype, None for auto. Raises InvalidRequest for an unknown one."""
    if dtype != "auto" and dtype not in DTYPES:
        raise InvalidRequest(f"dtype {dtype!r} is unknown; use auto, {', '.join(DTYPES)}")
    return DTYPES.get(dtype)


def read_sizes(folder: Path) -> WeightSizes | None:
    """Return how many weights a model folder's safetensors files have; None if there are none or one is damaged."""
    tensors: dict[str, tuple[str, list[int]]] = {}
    try:
        for file in sorted(folder.glob("*.safetensors")):
            most = 2 * file.stat().st_size  # the smallest weights have four bits
            for name, one in _header(file).items():
                if not 0 <= prod(one["shape"]) <= most:
                    return None
                tensors[name] = one["dtype"], one["shape"]
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return _sizes(tensors, config) if tensors else None
    except Exception:  # a damaged file may cause any exception; loading says what is wrong
        return None


def _header(file: Path) -> dict[str, Any]:
    with file.open("rb") as opened:
        (length,) = struct.unpack("<Q", opened.read(8))
        header: dict[str, Any] = json.loads(opened.read(min(length, 100_000_000)))  # the format's own limit
    header.pop("__metadata__", None)
    return header


def _sizes(tensors: dict[str, tuple[str, list[int]]], config: dict[str, Any]) -> WeightSizes:
    counts = {"linear": 0, "packed_linear": 0, "embedding": 0, "head": 0, "packed_head": 0, "others": 0}
    by_dtype: dict[str, int] = {}
    embedding = 0
    for name, (stored, shape) in tensors.items():
        count, kind = prod(shape), _kind(name, shape)
        counts[kind] += count
        if kind in ("linear", "head"):
            counts[f"packed_{kind}"] += packed_bytes(shape[0], shape[1])
        elif kind == "embedding":
            embedding = packed_bytes(shape[0], shape[1])
        by_dtype[stored] = by_dtype.get(stored, 0) + count
    tied = not counts["head"] or config.get("tie_word_embeddings") is True
    if tied:
        counts["head"], counts["packed_head"] = counts["embedding"], embedding
    most = max(by_dtype, key=lambda each: by_dtype[each])
    named = config.get("dtype") or config.get("torch_dtype")  # what transformers loads the files' weights in
    dtype = DTYPES.get(str(named)) or _FILE_DTYPES.get(most, torch.float32)
    return WeightSizes(**counts, tied=tied, dtype=dtype)


def _kind(name: str, shape: list[int]) -> str:
    if len(shape) != 2:
        return "others"  # norms, biases, fused experts
    if "embed" in name:
        return "embedding"
    return "head" if name.startswith("lm_head.") else "linear"


def weights_named(bits: str, dtype: str, device: torch.device) -> WeightBits:
    """Return the named bits, full for auto. Raises InvalidRequest for unknown ones, and for a dtype that they exclude."""
    parse_dtype(dtype)
    if bits not in ("auto", *BITS):
        raise InvalidRequest(f"weights {bits!r} is unknown; use auto, {', '.join(BITS)}")
    if bits in ("int8", "int4") and device.type == "cpu" and dtype not in ("auto", "float32"):
        raise InvalidRequest(
            f"weights in {bits} are multiplied in float32 on a CPU, not in {dtype}; leave --dtype out"
        )
    if bits == "int4" and device.type != "cpu" and dtype not in ("auto", "bfloat16"):
        raise InvalidRequest(
            f"weights in int4 are multiplied in bfloat16 on a GPU, not in {dtype}; leave --dtype out"
        )
    return next((one for one in BITS if one == bits), "full")


def _candidates(
    sizes: WeightSizes, dtype: str, bits: str, device: torch.device
) -> Iterator[tuple[torch.dtype, WeightBits]]:
    """Yield dtypes and bits from the most to the least exact."""
    chosen = parse_dtype(dtype)
    on_cpu = device.type == "cpu"
    if bits in ("auto", "full"):
        if chosen is not None:
            yield chosen, "full"
        elif on_cpu and (sizes.dtype == torch.float16 or not has_fast_matmul(device, sizes.dtype)):
            yield torch.float32, "full"
            yield sizes.dtype, "full"
        else:
            yield sizes.dtype, "full"
    if bits in ("int8", "int4"):
        on_gpu = torch.bfloat16 if bits == "int4" else chosen or sizes.dtype
        yield torch.float32 if on_cpu else on_gpu, weights_named(bits, dtype, device)
    elif bits == "auto" and on_cpu and chosen in (None, torch.float32):
        yield torch.float32, "int8"


def _available_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return available_memory_bytes() if device.type == "cpu" else 2**62


def _with_notice(
    found: Precision,
    sizes: WeightSizes,
    name: str,
    instead_of: tuple[torch.dtype, WeightBits] | None,
    device: torch.device,
    automatic: bool,
) -> Precision:
    """Add what the user should know of an automatic choice."""
    assert found.dtype is not None
    stored, need = _short(sizes.dtype), sizes.bytes(found.dtype, found.bits)
    if need < NOTABLE_BYTES or device.type != "cpu":
        return found
    if instead_of is not None:
        full = (
            f"{_size(sizes.bytes(*instead_of))} of weights in {_short(instead_of[0])} do not fit into memory"
        )
        if found.bits != "full":
            notice = f"{name}: {full}; its linear layers have {found.bits} weights, {_size(need)}"
        else:
            notice = f"{name}: {full}; it computes in {stored}, for which this CPU has no units: --weights int8 is faster"
        return Precision(found.dtype, found.bits, notice, important=True)
    if automatic and found.bits == "full" and found.dtype != sizes.dtype:
        notice = f"{name} is stored in {stored} and computes in float32, which is faster on this CPU ({_size(need)})"
        return Precision(found.dtype, found.bits, notice)
    return found


def _shortage(
    sizes: WeightSizes,
    name: str,
    wanted: tuple[torch.dtype, WeightBits],
    available_bytes: int,
    device: torch.device,
) -> str:
    """The message about weights that do not fit, with the choices that would."""
    where = "memory" if device.type == "cpu" else "GPU memory"
    dtype, bits = wanted
    kind = _short(dtype) if bits == "full" else bits
    choices: list[tuple[str, int]] = []
    if bits == "full" and dtype == torch.float32:
        choices.append(("--dtype bfloat16", sizes.bytes(torch.bfloat16, "full")))
    choices += [(f"--weights {less}", sizes.bytes(dtype, less)) for less in BITS[BITS.index(bits) + 1 :]]
    fitting = [f"{option} ({_size(need)})" for option, need in choices if need * _MARGIN <= available_bytes]
    if fitting:
        advice = f"{' or '.join(fitting)} would fit"
    else:
        least = min((need for _, need in choices), default=sizes.bytes(dtype, bits))
        advice = f"even the fewest bits need {_size(least)}: take a smaller --model, or free memory"
    return (
        f"{name} needs {_size(sizes.bytes(dtype, bits))} for its weights in {kind}, "
        f"and {_size(available_bytes)} of {where} are left; {advice}"
    )


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
