"""What a CPU has units for: without them, products of half precision are several times slower than float32."""

import torch

_UNITS = {
    torch.bfloat16: ("amx_bf16", "avx512_bf16", "bf16", "sve_bf16"),
    torch.float16: ("amx_fp16", "avx512_fp16", "fp16_arith"),
}


def multiplies(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether matrix products of this dtype are no slower there than those of float32; of other devices than a CPU, always."""
    if device.type != "cpu" or dtype not in _UNITS:
        return True
    has = torch.cpu.get_capabilities()
    return any(has.get(unit) for unit in _UNITS[dtype])
