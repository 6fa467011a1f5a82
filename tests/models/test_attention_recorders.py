"""AttentionShares and PeakAttention against the eager attention of plain transformers."""

import pytest
import torch

from kvweave.errors import InvalidRequest
from kvweave.models.fused_cache import PlacedSpan
from kvweave.models.hooks import AttentionShares, PeakAttention
from kvweave.testing import tiny_model
from support.prompts import IDS, N, quiet_adapter

PARTS = [(0, 9), (9, 30), (30, N)]
ROWS = torch.tensor([3, 25, 31, 59])


def eager_weights(family: str) -> torch.Tensor:
    model = tiny_model(family)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        out = model(torch.tensor([IDS]), output_attentions=True, use_cache=False)
    return torch.cat(out.attentions)  # (L, H, N, N)


@pytest.mark.parametrize("family", ["llama", "gemma2"])  # gemma2: windows in some layers, soft-capped logits
def test_shares_and_peaks_are_those_of_eager_attention(family):
    adapter, weights = quiet_adapter(family), eager_weights(family)
    shares, peak = AttentionShares(ROWS, PARTS), PeakAttention()
    plan = adapter.rows(torch.arange(N))
    plan.hooks.extend([shares, peak])
    adapter.compute(adapter.new_cache(N), IDS, plan)
    mean = weights.mean(dim=(0, 1))[ROWS]
    expected = torch.stack([mean[:, start:end].sum(dim=1) for start, end in PARTS], dim=1)
    torch.testing.assert_close(shares.shares, expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(peak.weights, weights.amax(dim=(0, 1, 2)), atol=1e-5, rtol=1e-4)


def test_a_row_that_the_pass_does_not_compute_is_refused():
    adapter = quiet_adapter("llama")
    plan = adapter.rows(torch.arange(20, N))
    plan.hooks.append(AttentionShares(ROWS, PARTS))
    kv_cache = adapter.new_cache(N, [PlacedSpan(adapter.encode(IDS[:20]), 0, 0)])
    with pytest.raises(InvalidRequest, match=r"rows \[3\]"):
        adapter.compute(kv_cache, IDS, plan)
