"""Keys or values in 8 or 4 bits a number, each row by itself, with a scale for every group of neighbouring channels.

For KV that is written, moved and read a token at a time, where ranges over a chunk's tokens (`quantise`) would change
with every token that comes or goes: a row's codes depend on that row alone. Symmetric: code 0 is 0. Knows nothing of
which rows are keys, or of files. Tensor letter: D head width.
"""

import torch
from torch import Tensor

from kvweave.ops.quantise import two_in_a_byte

SCALE_BYTES = 2  # float16


def quantise_rows(x: Tensor, bits: int, group: int) -> tuple[Tensor, Tensor]:
    """Codes and scales of x (…, D), D a multiple of `group` and even: (…, D · bits / 8) uint8, (…, D / group) float16.

    `bits` is 8 or 4; in 4 bits a byte holds two channels as `two_in_a_byte` has them.
    """
    most = 2 ** (bits - 1) - 1
    grouped = x.float().unflatten(-1, (-1, group))  # (…, D / group, group)
    # The scale is rounded up to what float16 holds, so that no code goes beyond the last.
    scales = (grouped.abs().amax(-1) / most * (1 + 2**-10)).clamp(min=6e-8, max=65504.0).half()
    codes = (grouped / scales[..., None].float()).round_().clamp_(-most, most).flatten(-2).to(torch.int8)
    return codes.view(torch.uint8) if bits == 8 else two_in_a_byte((codes + 8).to(torch.uint8)), scales


def restore_rows(codes: Tensor, scales: Tensor, bits: int, dtype: torch.dtype) -> Tensor:
    """What `quantise_rows` made codes and scales of, up to its rounding: (…, D) in `dtype`."""
    if bits == 8:
        whole = codes.view(torch.int8)
    else:
        whole = torch.cat([codes & 15, codes >> 4], dim=-1).to(torch.int8) - 8
    grouped: Tensor = whole.float().unflatten(-1, (scales.shape[-1], -1)) * scales[..., None].float()
    return grouped.flatten(-2).to(dtype)
