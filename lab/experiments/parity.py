"""Measures exactness per model family: the largest logit difference from plain transformers.

    .venv/bin/python lab/experiments/parity.py --output lab/results/parity.json

Models are tiny, with random weights in float32, on the CPU. `recompute_all` computes all rows over a cache filled with
random KV. `prefix_reuse` takes the first 70 of 100 rows from KV that was stored unrotated in the same frequency regime.
"""

import warnings

import torch
import transformers

from experiment import argument_parser, run_script, write_result
from kvweave.models.fused_cache import PlacedSpan
from kvweave.testing import FAMILIES, tiny_adapter, tiny_model
from kvweave.types import ChunkKV

N, STORED = 100, 70


def stock_logits(family: str, ids: list[int]) -> torch.Tensor:
    model = tiny_model(family)
    softcap = getattr(model.config, "attn_logit_softcapping", None)
    model.set_attn_implementation("eager" if softcap else "sdpa")
    with torch.no_grad():
        return model(torch.tensor([ids]), use_cache=False, logits_to_keep=1).logits[:, -1]


def measure(family: str) -> dict[str, object]:
    ids = torch.randint(3, 260, (N,), generator=torch.Generator().manual_seed(1)).tolist()
    expected = stock_logits(family, ids)
    adapter = tiny_adapter(family)
    whole = adapter.new_cache(N)
    adapter.compute(whole, ids, adapter.rows(torch.arange(N)), capture=True)
    stored = adapter.extract_chunk_kv(whole, ids, 0, STORED)
    garbage = ChunkKV(stored.token_ids, torch.randn_like(stored.kv) * 3)

    def difference(kv: object, first: int) -> float:
        kv_cache = adapter.new_cache(N, [PlacedSpan(kv, 0, 0)])  # type: ignore[arg-type]
        logits = adapter.compute(kv_cache, ids, adapter.rows(torch.arange(first, N)))
        return float((logits - expected).abs().max())

    return {
        "family": family,
        "model_class": type(adapter.model).__name__,
        "largest_logit": float(expected.abs().max()),
        "recompute_all": difference(garbage, 0),
        "prefix_reuse": difference(stored, STORED),
    }


def main() -> None:
    parser = argument_parser(__doc__)
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    result = {
        "command": "lab/experiments/parity.py",
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "families": [measure(family) for family in FAMILIES],
    }
    write_result(result, args.output)


if __name__ == "__main__":
    run_script(main)
