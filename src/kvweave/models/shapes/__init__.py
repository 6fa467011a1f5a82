"""Models in real shapes with random weights: for measuring time, which does not depend on what weights say.

Each shape is a transformers configuration as a JSON file beside this one.
"""

import json
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from kvweave.errors import InvalidRequest
from kvweave.models.adapter import Adapter
from kvweave.models.loading import device_named, dtype_named, reference_tokenizer
from kvweave.ops.cpu_units import multiplies

_FOLDER = Path(__file__).parent


def shape_names() -> list[str]:
    """Names of the shapes there are."""
    return sorted(path.stem for path in _FOLDER.glob("*.json"))


def shape_config(shape: str) -> PretrainedConfig:
    """A shape's configuration. Raises InvalidRequest for an unknown one."""
    if shape not in shape_names():
        raise InvalidRequest(f"there is no shape {shape!r}; choose one of {', '.join(shape_names())}")
    settings = json.loads((_FOLDER / f"{shape}.json").read_text(encoding="utf-8"))
    return AutoConfig.for_model(settings.pop("model_type"), **settings)


def random_model(shape: str, *, dtype: str = "auto", device: str = "cpu", seed: int = 0) -> Adapter:
    """A model of a real shape with seeded random weights, and the reference model's tokenizer.

    `dtype` auto is bfloat16, on a CPU without units for it float32, `device` auto a GPU if there is one. Raises InvalidRequest for an unknown shape, dtype or
    device. Its answers mean nothing; its times are the shape's.
    """
    config = shape_config(shape)
    place = device_named(device)
    fast = torch.bfloat16 if multiplies(place, torch.bfloat16) else torch.float32
    numbers = dtype_named(dtype) or fast
    torch.manual_seed(seed)
    with place:  # large shapes are made where they run
        model = AutoModelForCausalLM.from_config(config, dtype=numbers)
    return Adapter(model.to(place), reference_tokenizer(), name=f"{shape} (random weights)")
