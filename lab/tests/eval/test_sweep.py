"""Which samples a sweep analyses; the analysis itself is stood in for by a list of what it was given."""

import pytest

from kvweave.errors import InvalidRequest
from kvweave.testing import tiny_adapter
from kvweave_lab.eval.selection import analysis as sweep
from kvweave_lab.eval.selection.analysis import Sweep, run_sweep


@pytest.fixture
def analysed(monkeypatch):
    """The samples' names of every report."""
    given = []
    monkeypatch.setattr(
        sweep,
        "analyse",
        lambda adapter, folder, samples, **_: given.append([sample.name for sample in samples]),
    )
    return given


def asked(**given) -> Sweep:
    lengths = {"context_tokens": (1200, 900), "chunk_tokens": (500, 400)}
    return Sweep(
        **{"tasks": ("single", "order"), "split": "dev", "seed": 1, "samples": 2, "ratio": 0.2}
        | lengths
        | given
    )


def test_every_length_is_analysed_with_every_chunk_size(analysed):
    reports = run_sweep(tiny_adapter(), None, asked())
    assert list(reports) == [
        f"{context} tokens in chunks of {chunk}" for context in (1200, 900) for chunk in (500, 400)
    ]
    for names, (context, chunk) in zip(
        analysed, ((c, k) for c in (1200, 900) for k in (500, 400)), strict=True
    ):
        assert [name.rpartition("/")[0] for name in names] == [
            f"{task}/dev/{context}/{chunk}/1" for task in ("single", "order") for _ in "ab"
        ]


def test_duplicates_count_once(analysed):
    run_sweep(tiny_adapter(), None, asked())
    once = list(analysed)
    analysed.clear()
    run_sweep(
        tiny_adapter(),
        None,
        asked(
            tasks=("single", "order", "single"), context_tokens=(1200, 900, 900), chunk_tokens=(500, 400, 500)
        ),
    )
    assert analysed == once


def test_an_unknown_task_is_refused():
    with pytest.raises(InvalidRequest, match="no task 'juggling'; choose from single"):
        run_sweep(tiny_adapter(), None, asked(tasks=("juggling",)))
