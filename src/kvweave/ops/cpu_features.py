"""Which half-precision products a CPU computes in hardware; others are several times slower than float32."""

import torch

_UNITS = {
    torch.bfloat16: ("amx_bf16", "avx512_bf16", "bf16", "sve_bf16"),
    torch.float16: ("amx_fp16", "avx512_fp16", "fp16_arith"),
}


def has_fast_matmul(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether matrix products of this dtype are no slower than those of float32; always true off the CPU."""
    if device.type != "cpu" or dtype not in _UNITS:
        return True
    has = torch.cpu.get_capabilities()
    return any(has.get(unit) for unit in _UNITS[dtype])
