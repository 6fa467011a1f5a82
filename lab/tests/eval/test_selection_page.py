"""lab/experiments/selection.py, and what lab/pages/build.py writes of it."""

import json

import pytest

from kvweave.results import facts
from kvweave.testing import tiny_adapter
from kvweave_lab.eval.selection.analysis import analyse
from lab_support.selections import SAMPLES, values


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    return analyse(
        tiny_adapter(),
        tmp_path_factory.mktemp("kv"),
        SAMPLES,
        answered_ratios=(0.1,),
        auxiliary=tiny_adapter("qwen3", seed=3),
    )


@pytest.fixture
def parts(script):
    return script("selection"), script("selection_page").selection_page


def test_a_page_without_results_states_that(parts):
    assert parts[1](None, []).endswith("Not measured yet.\n")


def test_every_part_of_a_report_is_on_the_page(parts, report):
    benchmark, page = parts
    plain = json.loads(json.dumps(facts(report)))
    other = benchmark.setting_summary(plain | {"context_tokens": 2048.0, "chunk_tokens": 191.0})
    about = {"command": "select", "evaluations": ["evaluate a"], "date": "2026-01-02", "others": [other]}
    found = json.loads(json.dumps(benchmark.quoted(plain) | about))
    text = page(found, ["selection-places.png", "other.png"])
    assert text.count("](images/") == 1
    first = report.preparations[0]
    decoding, stale = report.selections.index("decoding"), report.selections.index("question_stale")
    assert f"(ProphetKV eq. 7) | {_text(first.overlap[stale][decoding])} | " in text
    near = report.ratios.index(0.2)
    assert f" | {_text(first.selection_loss[stale][near])} |" in text
    assert f"| `attention_change`: \\|ΔΦ\\| | {_text(first.factor_loss[1][0])} | " in text
    for kind in report.preparations:
        assert _text(kind.deviation.relative[-1]) in text
    assert (
        f"| {report.context_tokens:.0f} tokens in chunks of {report.chunk_tokens:.0f} | 2,048 tokens in chunks of 191 |"
        in text
    )
    assert (
        f"(ProphetKV eq. 7) | {_text(first.overlap[stale][decoding])} | {_text(first.of_optimal[stale])} | "
        in text
    )
    row = first.depths[stale]
    shares = " | ".join(f"{share.value:.2f}" for share in row)
    widest = max((share.high - share.low) / 2 for share in row)
    assert f"| `question_stale` | {shares} | {widest:.3f} |" in text
    assert (
        f"halves of one task's prompts by {_text(min((first.agreement[0][0], first.agreement[1][1]), key=_value))} to"
        in text
    )
    assert f"| difference, paired | {_text(report.auxiliary.kl_difference)} | " in text
    assert f"Full attention scores {_text(report.answers.full_score)}; " in text
    by_task = {task.task: values(task.curves[0]) for task in first.layers[1:]}
    best = {task: 1 + curve.index(max(curve)) for task, curve in by_task.items()}
    one, other = best["single"], best["twohop"]
    apart = f"layer {one} in `single`, layer {other} in `twohop`"
    assert (
        f"the best one is {apart if one != other else f'layer {one} on all of them'}. If layers are ranked"
        in text
    )
    assert "evaluate a" in text.partition("## Commands")[2]


def test_what_the_worst_tokens_leave_is_told_by_preparation_and_layer(parts, report):
    found = parts[0].deviation_left(json.loads(json.dumps(facts(report))))
    assert found["ratio"] == report.ratio
    for kind in report.preparations:
        left = found["left"][kind.name]
        assert [one["value"] for one in left] == [one.value for one in kind.deviation.left]
        assert all(0 <= one["value"] < 1 for one in left)


def _text(estimate) -> str:
    low, high = sorted((estimate.low, estimate.high))
    return f"{estimate.value:.3f} ({low:.3f} to {high:.3f})"


def _value(estimate):
    return estimate.value
