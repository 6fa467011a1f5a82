"""Linear layers over a few rows at once, on CPUs: steps of several requests, and drafts.

PyTorch multiplies 2 to 64 rows by a weight in up to three times the time that the weight by the rows, transposed, takes.
Measured by `lab/experiments/few_rows.py`.
"""

from typing import Final

import torch
from torch import Tensor, nn

MOST_ROWS: Final = 64
"""With more rows, the product is bound by arithmetic, and the copy of the result costs more than the exchange gains."""


class FewRowsLinear(nn.Linear):
    """`nn.Linear`, with the factors exchanged for 2 to MOST_ROWS rows."""

    def forward(self, states: Tensor) -> Tensor:
        """Return states (…, K) @ weight.T + bias, (…, N)."""
        rows = states.numel() // self.in_features
        if not 2 <= rows <= MOST_ROWS:
            return super().forward(states)
        product = (self.weight @ states.reshape(rows, self.in_features).T).T.contiguous()
        if self.bias is not None:
            product += self.bias
        return product.view(*states.shape[:-1], self.out_features)


def use_few_rows(model: nn.Module) -> None:
    """Exchange the factors in a float32 model's plain linear layers on a CPU; its weights stay the same tensors."""
    for module in model.modules():
        if (
            type(module) is nn.Linear
            and module.weight.device.type == "cpu"
            and module.weight.dtype == torch.float32
        ):
            module.__class__ = FewRowsLinear
