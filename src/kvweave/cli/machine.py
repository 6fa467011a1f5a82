"""doctor's findings about the machine: cores, memory, and what the processor's units mean for dtype and speed."""

from kvweave.cli.output import amount


def cores_finding() -> str:
    """Say how many cores and threads there are, and what limits them."""
    import os

    from kvweave.machine import cpu_limits
    from kvweave.ops.threads import VARIABLES, respect_cpu_limits

    threads, limits = respect_cpu_limits(), cpu_limits()
    parts = [f"{limits.cores} of {os.cpu_count()} cores"]
    parts.append("no quota" if limits.quota is None else f"a quota of {limits.quota:.4g} cores")
    chosen = [f"{name}={os.environ[name]}" for name in VARIABLES if os.environ.get(name)]
    parts.append(f"{threads} threads" + (f" ({', '.join(chosen)})" if chosen else ""))
    if threads > limits.threads:
        parts.append(f"more than the {limits.threads} that run at once: lower {VARIABLES[0]}")
    return ", ".join(parts)


def memory_finding() -> str:
    """Say how much memory is left, and the container's limit."""
    from kvweave.machine import available_memory_bytes, memory_limit_bytes

    limit = memory_limit_bytes()
    return f"{amount(available_memory_bytes())} left" + (
        "" if limit is None else f", under a limit of {amount(limit)}"
    )


def units_finding() -> str:
    """Name the processor's units, and say what kvweave does with them."""
    import torch

    from kvweave.ops.cpu_features import cpu_units, has_fast_matmul
    from kvweave.ops.quantised_linear import has_integer_kernel

    units = cpu_units()
    half = has_fast_matmul(torch.device("cpu"), torch.bfloat16)
    dtype = (
        "bfloat16 models compute in bfloat16"
        if half
        else "no units for bfloat16, so such models compute in float32"
    )
    integers = (
        "--weights int8 multiplies in integers, faster than float32"
        if has_integer_kernel()
        else "--weights int8 saves memory and is slower than float32, without kernels for integers"
    )
    return f"{', '.join(units) or 'no vector units that kvweave knows'}: {dtype}; {integers}"
