"""Strategies at equal bytes read, on a tiny model: rows that run together agree with steps of decoding."""

from dataclasses import replace

import pytest

from kvweave.decode.settings import OffloadSettings
from kvweave.errors import InvalidRequest
from kvweave.testing import tiny_adapter
from kvweave_lab.eval.decoding.equal_reads import Request, compare, given_texts, reads_rows
from kvweave_lab.eval.decoding.measure import variant_named
from kvweave_lab.eval.decoding.run import Prefilled, decode

PROMPT, DECODED = 280, 24
VARIANTS = ("outline", "retroinfer", "dynakv/whole-clusters", "window", "oracle")


@pytest.fixture(scope="module")
def adapter():
    return tiny_adapter()


@pytest.fixture(scope="module")
def texts(adapter, tmp_path_factory):
    file = tmp_path_factory.mktemp("texts") / "tides.txt"
    file.write_text(" ".join(f"At {hour} the tide {hour % 7} metres high turned." for hour in range(400)))
    return given_texts(adapter, [file], PROMPT, DECODED, skip=1, samples=2)


@pytest.fixture(scope="module")
def runs(adapter, texts, tmp_path_factory):
    captures = tmp_path_factory.mktemp("captures")
    request = Request(texts, VARIANTS, (0.4, 1.0), captures=captures)
    found = compare(adapter, request)
    assert len(list(captures.iterdir())) == 2, "each prompt is prefilled once"
    return found


def test_pieces_follow_each_other(adapter, texts):
    assert [text.name for text in texts] == [f"tides.txt/{PROMPT}/1", f"tides.txt/{PROMPT}/2"]
    assert all(len(text.token_ids) == PROMPT + DECODED + 1 for text in texts)


def test_the_whole_budget_is_dense_decoding(runs):
    for run in runs:
        if run.budget == 1.0 and run.variant != "window":
            assert run.kl == pytest.approx(0, abs=1e-5)
            assert run.agreement == run.recall == 1
            assert run.output_error < 1e-4
            assert run.nll == pytest.approx(run.dense_nll, abs=1e-4)


@pytest.mark.parametrize("variant", ["outline", "window", "dynakv/whole-clusters"])
def test_rows_that_run_together_are_steps_of_decoding(adapter, texts, runs, variant):
    prefilled = Prefilled.of(adapter, texts[0])
    settings = variant_named(variant, OffloadSettings(0.4))
    stepwise = decode(adapter, prefilled, variant, settings, (DECODED + 1,)).segments[0]
    first = float(-prefilled.logits[0].log_softmax(-1)[texts[0].token_ids[PROMPT]])
    (together,) = (
        run for run in runs if (run.text, run.variant, run.budget) == (texts[0].name, variant, 0.4)
    )
    assert (together.nll * DECODED + first) / (DECODED + 1) == pytest.approx(stepwise.nll, abs=1e-4)


def test_all_read_as_much_and_a_window_is_worst(runs):
    rows = {row.strategy: row for row in reads_rows(runs) if row.budget == 0.4}
    assert all(row.texts == 2 for row in rows.values())
    for name in ("outline", "retroinfer", "oracle"):
        assert 0.385 < rows[name].read_share < 0.405  # whole clusters leave a part of a small budget
        assert rows[name].output_error.value < rows["window"].output_error.value
    assert rows["outline"].index_share > rows["dynakv/whole-clusters"].index_share > 0
    assert rows["oracle"].index_share == 0
    best = min(rows[name].output_error.value for name in VARIANTS[1:4])
    assert rows["outline"].error_of_best == pytest.approx(rows["outline"].output_error.value / best)


def test_a_text_that_is_too_short_is_refused(adapter, tmp_path):
    (tmp_path / "short.md").write_text("Too short.")
    with pytest.raises(InvalidRequest, match="too few for 1 pieces of"):
        given_texts(adapter, [tmp_path], PROMPT, DECODED, skip=0, samples=1)
    with pytest.raises(InvalidRequest, match="cannot be read"):
        given_texts(adapter, [tmp_path / "none.txt"], PROMPT, DECODED, skip=0, samples=1)


def test_texts_beyond_the_positions_are_refused(adapter, texts):
    longer = replace(texts[0], token_ids=texts[0].token_ids * 4)
    with pytest.raises(InvalidRequest, match="are longer than the"):
        compare(adapter, Request((longer,)))
