"""Chunk KV in 8 or 4 bits a number: keys per channel, values per token, the few outlier tokens exactly.

Keys have channels that are large in every token, and values have none. So keys are coded channel by channel over the
tokens of the chunk, values token by token over their channels (KIVI, arXiv 2402.02750). A single outlier token would
use up the levels of its channels; those few are kept exactly (KVQuant, arXiv 2401.18079).

The definition, for one layer with keys and values x[g, s, d], M = 2**bits - 1 levels, and E the outlier tokens:

    keys      low[g, d] = min over s not in E of x,   step[g, d] = (max - low) / M
    values    low[g, s] = min over d of x,            step[g, s] = (max - low) / M,  both rounded outwards to bfloat16
    code      round((x - low) / step),  0 where step is 0
    decoded   x itself for s in E, else low + code · step in float32, rounded to the dtype of x

Codes are computed from the stored, rounded ranges, so that no number is off by more than half a step. The ranges of
keys need all of a chunk's tokens; `quantise_rows` codes KV that is written token by token. Knows nothing of files
or models. Tensor letters: L layers, G KV heads, S tokens, D head width, E outlier tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kvweave.errors import InvalidRequest
from kvweave.types import Storage

BITS: Mapping[Storage, int] = {"int8": 8, "int4": 4}
"""The quantised storages and their bits per number."""

SCALE_BYTES = 2  # float16, of `quantise_rows`

NOT_FINITE = "the model's weights are damaged, or its numbers overflow; try dtype float32 or bfloat16"
"""What to do about a model that gives NaN or infinity."""

TOKENS_PER_OUTLIER = 128
"""One token in this many, rounded up, is kept exactly: at D = 64 less than 1 % of the bytes."""


@dataclass(frozen=True, slots=True)
class QuantisedKV:
    """A chunk's quantised KV, which decodes layer by layer (see `kvweave.types.KVLayers`).

    Attributes:
        storage: int8 or int4.
        codes: (L, 2, G, S, D) uint8. In 4 bits (L, 2, G, S, ⌈D / 2⌉): a byte holds two codes of one token, channel c in
            its low half and c + ⌈D / 2⌉ in the high one.
        key_low, key_step: (L, G, 1, D) float32.
        value_low, value_step: (L, G, S, 1) bfloat16.
        outlier_tokens: (L, E) int32, ascending.
        outlier_rows: (L, 2, G, E, D) in the model's dtype.
    """

    storage: Storage
    codes: Tensor
    key_low: Tensor
    key_step: Tensor
    value_low: Tensor
    value_step: Tensor
    outlier_tokens: Tensor
    outlier_rows: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the decoded KV, (L, 2, G, S, D)."""
        return (*self.codes.shape[:-1], self.outlier_rows.shape[-1])

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the decoded KV."""
        return self.outlier_rows.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors by attribute, the codes last: those before them are small."""
        small = ("key_low", "key_step", "outlier_tokens", "outlier_rows", "value_low", "value_step")
        return {name: getattr(self, name) for name in (*small, "codes")}

    @property
    def layer_wait_s(self) -> float:
        """0: everything is in memory."""
        return 0.0

    def load(self, index: int) -> None:
        """Do nothing: everything is in memory."""

    def layer(self, index: int) -> Tensor:
        """Return one decoded layer, (2, G, S, D), owned by the caller."""
        return self._decode(index, self.codes.new_empty(self.shape[1:], dtype=self.dtype))

    def all_layers(self) -> Tensor:
        """Return the decoded KV, (L, 2, G, S, D), owned by the caller."""
        decoded = self.codes.new_empty(self.shape, dtype=self.dtype)
        for index, into in enumerate(decoded):
            self._decode(index, into)
        return decoded

    def _decode(self, index: int, into: Tensor) -> Tensor:
        ranges = (
            (self.key_low[index], self.key_step[index]),
            (self.value_low[index].float(), self.value_step[index].float()),
        )
        for codes, (low, step), out in zip(self.codes[index], ranges, into, strict=True):
            low, step = low.expand(out.shape), step.expand(out.shape)  # (G, S, D)
            if BITS[self.storage] == 8:
                torch.addcmul(low, codes, step, out=out)
                continue
            half = codes.shape[-1]
            torch.addcmul(low[..., :half], codes & 15, step[..., :half], out=out[..., :half])
            rest = codes[..., : out.shape[-1] - half] >> 4
            torch.addcmul(low[..., half:], rest, step[..., half:], out=out[..., half:])
        return into.index_copy_(2, self.outlier_tokens[index].long(), self.outlier_rows[index])


def all_finite(numbers: Tensor) -> bool:
    """Whether no number is NaN or infinite.

    A sum, which is several times faster than a look at each number, decides unless it overflows.
    """
    return bool(numbers.sum().isfinite()) or bool(numbers.isfinite().all())


def quantise(kv: Tensor, storage: Storage) -> QuantisedKV:
    """Quantise KV (L, 2, G, S, D), keys before rotation, to int8 or int4; `kv` is not changed and not kept.

    Raises:
        InvalidRequest: another storage; numbers that are not finite, or whose range is not.
    """
    if storage not in BITS:
        raise InvalidRequest(f"KV cannot be coded as {storage}; choose one of {', '.join(BITS)}")
    bits = BITS[storage]
    tokens = find_outliers(kv)
    is_outlier = torch.zeros(kv.shape[0], kv.shape[3], dtype=torch.bool).scatter_(1, tokens, True)
    is_outlier = is_outlier[:, None, :, None]  # (L, 1, S, 1)
    numbers = kv.float().masked_fill(is_outlier[:, None], 0.0)
    keys, values = numbers.unbind(1)  # each (L, G, S, D)
    key_low, key_step = _key_ranges(keys, is_outlier, bits)
    value_low, value_step = _value_ranges(values, bits)
    for tensor in (kv, key_low, key_step, value_low, value_step):
        if not all_finite(tensor):
            raise InvalidRequest(
                f"KV of NaN, infinity or too large numbers cannot be coded as {storage}: {NOT_FINITE}"
            )
    codes = torch.stack(
        [_codes(keys, key_low, key_step, bits), _codes(values, value_low.float(), value_step.float(), bits)],
        dim=1,
    )
    layers = torch.arange(kv.shape[0])[:, None]
    rows = kv.permute(0, 3, 1, 2, 4)[layers, tokens]  # (L, E, 2, G, D)
    return QuantisedKV(
        storage=storage,
        codes=pack_nibbles(codes) if bits == 4 else codes,
        key_low=key_low,
        key_step=key_step,
        value_low=value_low,
        value_step=value_step,
        outlier_tokens=tokens.to(torch.int32),
        outlier_rows=rows.permute(0, 2, 3, 1, 4).contiguous(),
    )


def quantised_bytes(shape: tuple[int, int, int, int, int], dtype: torch.dtype, storage: Storage) -> int:
    """Return the bytes of quantised KV of this shape (L, 2, G, S, D) and dtype; InvalidRequest as `quantise`."""
    if storage not in BITS:
        raise InvalidRequest(f"KV cannot be coded as {storage}; choose one of {', '.join(BITS)}")
    layers, parts, heads, tokens, width = shape
    outliers = -(-tokens // TOKENS_PER_OUTLIER)
    codes = parts * heads * tokens * (-(-width // 2) if BITS[storage] == 4 else width)
    keys, values = 2 * heads * width * 4, 2 * heads * tokens * 2  # low and step of each
    exact = outliers * (4 + parts * heads * width * dtype.itemsize)
    return layers * (codes + keys + values + exact)


def find_outliers(kv: Tensor) -> Tensor:
    """Return the tokens of each layer of KV (L, 2, G, S, D) whose keys are the farthest outliers, (L, E) ascending.

    E = ⌈S / TOKENS_PER_OUTLIER⌉. The distance is the mean over the channels of z⁴, where z is the difference from the
    channel's mean in standard deviations.
    """
    keys = kv[:, 0].float()
    difference = keys - keys.mean(dim=2, keepdim=True)
    deviation = difference.square().mean(dim=2, keepdim=True).sqrt()
    distance = (difference / deviation.masked_fill(deviation == 0, 1.0)).pow(4).mean(dim=(1, 3))  # (L, S)
    order = distance.argsort(dim=1, descending=True, stable=True)
    return order[:, : -(-kv.shape[3] // TOKENS_PER_OUTLIER)].sort(dim=1).values


def pack_nibbles(codes: Tensor) -> Tensor:
    """Pack codes below 16, (…, D) uint8, to (…, ⌈D / 2⌉): channel c in the low half, c + ⌈D / 2⌉ in the high one."""
    half = -(-codes.shape[-1] // 2)
    packed = codes[..., :half].clone()
    packed[..., : codes.shape[-1] - half] |= codes[..., half:] << 4
    return packed


def _key_ranges(keys: Tensor, is_outlier: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return low and step, (L, G, 1, D) float32, of the tokens that are no outliers; `is_outlier` is (L, 1, S, 1)."""
    if bool(is_outlier.all()):  # at most one token
        zeros = keys.new_zeros(keys.shape[0], keys.shape[1], 1, keys.shape[3])
        return zeros, zeros.clone()
    low = keys.masked_fill(is_outlier, torch.inf).amin(dim=2, keepdim=True)
    high = keys.masked_fill(is_outlier, -torch.inf).amax(dim=2, keepdim=True)
    return low, (high - low) / (2**bits - 1)


def _value_ranges(values: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return low and step, (L, G, S, 1) bfloat16, rounded outwards so that the range still covers every number."""
    low = _rounded(values.amin(dim=-1, keepdim=True), -torch.inf)
    step = (values.amax(dim=-1, keepdim=True) - low.float()) / (2**bits - 1)
    return low, _rounded(step, torch.inf)


def _rounded(numbers: Tensor, towards: float) -> Tensor:
    """Round to bfloat16, down or up."""
    nearest = numbers.bfloat16()
    wrong_side = nearest.float() < numbers if towards > 0 else nearest.float() > numbers
    return torch.where(wrong_side, torch.nextafter(nearest, torch.full_like(nearest, towards)), nearest)


def _codes(numbers: Tensor, low: Tensor, step: Tensor, bits: int) -> Tensor:
    """Return codes (L, G, S, D), uint8."""
    levels = (numbers - low) / step.masked_fill(step == 0, 1.0)
    return levels.round_().clamp_(0, 2**bits - 1).to(torch.uint8)


def quantise_rows(x: Tensor, bits: int, group: int) -> tuple[Tensor, Tensor]:
    """Return codes (…, D · bits / 8) uint8 and scales (…, D / group) float16 of x (…, D), each row on its own.

    D is even and a multiple of `group`. `bits` is 8 or 4; in 4 bits a byte holds two channels, as in `pack_nibbles`.
    """
    most = 2 ** (bits - 1) - 1
    grouped = x.float().unflatten(-1, (-1, group))  # (…, D / group, group)
    # The scale is rounded up to a float16 number, so that no code exceeds the largest.
    scales = (grouped.abs().amax(-1) / most * (1 + 2**-10)).clamp(min=6e-8, max=65504.0).half()
    codes = (grouped / scales[..., None].float()).round_().clamp_(-most, most).flatten(-2).to(torch.int8)
    return codes.view(torch.uint8) if bits == 8 else pack_nibbles((codes + 8).to(torch.uint8)), scales


def dequantise_rows(codes: Tensor, scales: Tensor, bits: int, dtype: torch.dtype) -> Tensor:
    """Return what `quantise_rows` coded, up to its rounding: (…, D) in `dtype`."""
    if bits == 8:
        whole = codes.view(torch.int8)
    else:
        whole = torch.cat([codes & 15, codes >> 4], dim=-1).to(torch.int8) - 8
    grouped: Tensor = whole.float().unflatten(-1, (scales.shape[-1], -1)) * scales[..., None].float()
    return grouped.flatten(-2).to(dtype)
