"""Models of real shapes with random weights."""

import pytest
import torch

from kvweave.testing import tiny_model
from kvweave_lab import shapes


@pytest.mark.parametrize(("units", "dtype"), [({"amx_bf16": True}, torch.bfloat16), ({}, torch.float32)])
def test_a_model_of_a_shape_gets_a_dtype_that_is_fast_on_this_cpu(monkeypatch, units, dtype):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: units)
    monkeypatch.setattr(shapes, "shape_config", lambda name: tiny_model().config)
    assert shapes.random_model("any").geometry.dtype == dtype
    assert shapes.random_model("any", dtype="float16").geometry.dtype == torch.float16
