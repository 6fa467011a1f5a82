"""Which units a CPU has, and which half-precision products it computes in hardware; others are several times slower than float32."""

import torch

_UNITS = {
    torch.bfloat16: ("amx_bf16", "avx512_bf16", "bf16", "sve_bf16"),
    torch.float16: ("amx_fp16", "avx512_fp16", "fp16_arith"),
}
_NAMES = {
    "AVX2": ("avx2",),
    "AVX512": ("avx512_f",),
    "VNNI": ("avx512_vnni", "avx_vnni"),
    "AMX": ("amx_int8", "amx_bf16"),
    "bfloat16": _UNITS[torch.bfloat16],
    "float16": _UNITS[torch.float16],
    "dot product": ("dot", "neon_dot"),
    "SVE": ("sve", "sve2"),
}


def cpu_units() -> list[str]:
    """Return the names of the units that matter for matrix products and that this CPU has."""
    has = torch.cpu.get_capabilities()
    return [name for name, flags in _NAMES.items() if any(has.get(flag) for flag in flags)]


def has_fast_matmul(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether matrix products of this dtype are no slower than those of float32; always true off the CPU."""
    if device.type != "cpu" or dtype not in _UNITS:
        return True
    has = torch.cpu.get_capabilities()
    return any(has.get(unit) for unit in _UNITS[dtype])
