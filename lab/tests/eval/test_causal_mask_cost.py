"""The experiment that runs scattered rows as one causal query."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  torch's own name for it
from torch.nn.attention.bias import causal_lower_right

from kvweave.models.attention import AttentionCall, RowPlan
from kvweave.ops.attention import AttentionSettings
from kvweave.testing import tiny_adapter
from kvweave_lab.eval.natural.measure import NaturalRunner
from kvweave_lab.eval.natural.outcomes import NaturalLog
from kvweave_lab.eval.natural.prompts import make_prompt
from lab_support.natural_set import library_of

LENGTH = 60


@pytest.fixture
def mask(script):
    return script("causal_mask_cost")


@pytest.fixture
def call():
    random = torch.Generator().manual_seed(0)
    query, keys, values = (torch.randn(1, 2, LENGTH, 16, generator=random) for _ in range(3))
    return lambda rows: AttentionCall(0, query[:, :, rows], keys, values, AttentionSettings(0.25))


def test_rows_attend_as_a_causal_query_aligned_at_the_last_key(mask, call):
    rows = torch.tensor([3, 4, 9, 31, 57, 59])
    own = call(rows)
    found = mask.OneQueryPlan(rows, torch.float32, LENGTH).attend(own)
    bias = causal_lower_right(len(rows), LENGTH)
    expected = F.scaled_dot_product_attention(own.query, own.keys, own.values, attn_mask=bias, scale=0.25)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert (found - RowPlan(rows, torch.float32).attend(own)).abs().max() > 0.1
    last = mask.OneQueryPlan(rows, torch.float32, LENGTH).subset(rows[3:]).attend(call(rows[3:]))
    torch.testing.assert_close(last, expected[:, :, 3:], atol=1e-5, rtol=1e-5)


def test_the_last_rows_of_a_prompt_attend_as_they_should(mask, call):
    rows = torch.arange(40, LENGTH)
    found = mask.OneQueryPlan(rows, torch.float32, LENGTH).attend(call(rows))
    torch.testing.assert_close(found, RowPlan(rows, torch.float32).attend(call(rows)))


def test_both_masks_run_on_the_same_prompts(mask, tmp_path):
    adapter = tiny_adapter()
    content, library = library_of(tmp_path, adapter)
    prompts = [make_prompt(adapter, library, question, 64, None) for question in content.questions[:2]]
    corpus = library.corpus(adapter.template)
    runner = NaturalRunner(adapter, corpus, NaturalLog(None, {}), answers=4)
    found = mask.measure(runner, prompts, mask.RECIPES, (0.3, 1.0))
    assert found["prompts"] == 2
    assert [(row["recipe"], row["ratio"]) for row in found["rows"]] == [
        (name, ratio) for name in mask.RECIPES for ratio in (0.3, 1.0)
    ]
    for row in found["rows"]:
        if row["ratio"] == 1:  # all rows are the last ones of the prompt
            assert row["wrong"]["kl"]["value"] < 1e-6
            assert row["later_share"] == 0
        else:
            assert row["wrong"]["kl"]["value"] != pytest.approx(row["right"]["kl"]["value"], rel=1e-3)
            assert 0.1 < row["later_share"] < 1
        assert row["difference"]["kl"]["value"] == pytest.approx(
            row["wrong"]["kl"]["value"] - row["right"]["kl"]["value"], abs=1e-6
        )
