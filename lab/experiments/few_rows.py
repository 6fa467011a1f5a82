"""Measures a linear layer over a few rows: as PyTorch multiplies, and with the factors exchanged.

    .venv/bin/python lab/experiments/few_rows.py --output lab/results/few_rows.json

The layers are those of Gemma 3 270M (head, up, down) and one of a 7B model, in float32. Each product is made with as many
different weights as fill the last cache many times over, in turn, as a model's layers do. `gain` is the median over rounds of the
plain product's time over the exchanged one's.
"""

import copy
import statistics
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from experiment import argument_parser, command_of, environment, rounded, run_script, write_result
from kvweave.models.forward import MOST_ROWS, use_few_rows
from kvweave_lab.bench.measurement import elapsed_s

SHAPES = ((262144, 640), (2048, 640), (640, 2048), (4096, 4096))
"""Outputs and inputs."""
ROWS = (1, 2, 4, 8, 16, 32, MOST_ROWS)
"""Rows at once."""
WEIGHTS = 1.2e8
"""Numbers in all weights of a shape."""


def main() -> None:
    """Measure every shape at every number of rows."""
    parser = argument_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    rows = [measured(*shape, count, options.rounds) for shape in SHAPES for count in ROWS]
    write_result({**environment(command_of(options)), "rows": rows}, options.output)


@torch.no_grad()
def measured(outputs: int, inputs: int, count: int, rounds: int) -> dict[str, Any]:
    """Return a row of the result."""
    plain = [
        nn.Linear(inputs, outputs, bias=False) for _ in range(max(1, round(WEIGHTS / (outputs * inputs))))
    ]
    exchanged = [copy.deepcopy(layer) for layer in plain] if len(plain) > 1 else [copy.copy(plain[0])]
    use_few_rows(nn.ModuleList(exchanged))
    states = torch.randn(1, count, inputs)
    times: list[tuple[float, float]] = []
    for _ in range(rounds):
        own, other = (elapsed_s(partial(_multiply, each, states)) / len(each) for each in (plain, exchanged))
        times.append((own, other))
    return rounded(
        {
            "outputs": outputs,
            "inputs": inputs,
            "rows": count,
            "plain_ms": 1e3 * statistics.median(own for own, _ in times),
            "exchanged_ms": 1e3 * statistics.median(other for _, other in times),
            "gain": statistics.median(own / other for own, other in times),
        }
    )


def _multiply(layers: Sequence[nn.Module], states: Tensor) -> None:
    for layer in layers:
        layer(states)


if __name__ == "__main__":
    run_script(main)
