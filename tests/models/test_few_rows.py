"""Linear layers over a few rows give what PyTorch's give, with the same weights under the same names."""

import copy

import pytest
import torch
from torch import nn

from kvweave.models.forward import FewRowsLinear, use_few_rows
from kvweave.testing import tiny_model


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 1), (1, 2), (3, 5), (1, 64), (1, 65), (1, 0)])
def test_the_product_is_the_same(shape, bias):
    plain = nn.Linear(24, 40, bias=bias)
    fast = copy.deepcopy(plain)
    fast.__class__ = FewRowsLinear
    states = torch.randn(*shape, 24)
    torch.testing.assert_close(fast(states), plain(states))
    assert fast(states).is_contiguous()


def test_a_model_keeps_its_weights():
    model = tiny_model("gemma3")
    before = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    ids = torch.arange(3, 10)[None]
    expected = model(ids).logits
    use_few_rows(model)
    assert {name: tensor.data_ptr() for name, tensor in model.state_dict().items()} == before
    assert any(type(module) is FewRowsLinear for module in model.modules())
    torch.testing.assert_close(model(ids).logits, expected)


def test_only_plain_layers_in_float32_change():
    class Own(nn.Linear):
        pass

    layers = nn.ModuleList([Own(4, 4), nn.Linear(4, 4, dtype=torch.bfloat16), nn.Linear(4, 4)])
    use_few_rows(layers)
    assert [type(layer) for layer in layers] == [Own, nn.Linear, FewRowsLinear]
