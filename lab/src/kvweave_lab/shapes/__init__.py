"""Models of real shapes with random weights, to measure times, which do not depend on the weights.

Each shape is a transformers configuration in a JSON file of this folder.
"""

import json
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from kvweave.errors import InvalidRequest
from kvweave.machine import has_fast_matmul, respect_cpu_limits
from kvweave.models.adapter import Adapter
from kvweave.models.forward import use_few_rows
from kvweave.models.loading import parse_device, parse_dtype, reference_tokenizer
from kvweave.models.precision import weights_named
from kvweave.models.quantised import quantise_weights

_FOLDER = Path(__file__).parent


def shape_names() -> list[str]:
    """Return the names of all shapes."""
    return sorted(path.stem for path in _FOLDER.glob("*.json"))


def shape_config(shape: str) -> PretrainedConfig:
    """Return a shape's configuration. Raises InvalidRequest for an unknown one."""
    if shape not in shape_names():
        raise InvalidRequest(f"there is no shape {shape!r}; choose one of {', '.join(shape_names())}")
    settings = json.loads((_FOLDER / f"{shape}.json").read_text(encoding="utf-8"))
    return AutoConfig.for_model(settings.pop("model_type"), **settings)


def random_model(
    shape: str, *, dtype: str = "auto", weights: str = "auto", device: str = "cpu", seed: int = 0
) -> Adapter:
    """Return a model of a real shape with seeded random weights, and the reference model's tokenizer.

    Its answers mean nothing; its times are the shape's. `dtype` auto is bfloat16, or float32 on a CPU without units for
    bfloat16; `weights` auto is full; `device` auto is a GPU if there is one. Raises InvalidRequest for an unknown shape, dtype,
    number of bits or device.
    """
    respect_cpu_limits()
    config = shape_config(shape)
    place = parse_device(device)
    fast = torch.bfloat16 if has_fast_matmul(place, torch.bfloat16) else torch.float32
    bits = weights_named(weights, dtype, place)
    torch_dtype = parse_dtype(dtype) or (fast if bits == "full" else torch.float32)
    torch.manual_seed(seed)
    with place:  # make large shapes directly on their device
        model = AutoModelForCausalLM.from_config(config, dtype=torch_dtype)
    if bits != "full":
        quantise_weights(model, bits, place)
    use_few_rows(model.to(place))
    return Adapter(model, reference_tokenizer(), name=f"{shape} (random weights)")
