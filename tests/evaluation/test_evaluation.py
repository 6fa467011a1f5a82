"""One evaluation from start to end, on a tiny model."""

import json
from dataclasses import replace

import pytest

from kvweave.errors import InvalidRequest, PromptTooLong
from kvweave.evaluation.evaluation import Request, run_evaluation
from kvweave.evaluation.suites import SUITES
from kvweave.testing import tiny_adapter

SUITE = replace(SUITES["quick"], recipes=(), ratios=(), samples=1)


@pytest.fixture(scope="module")
def adapter():
    return tiny_adapter()


@pytest.fixture
def file(tmp_path):
    """Two questions that fit the tiny model and one that does not."""

    def line(number, context):
        return json.dumps(
            {"dataset": "hotpotqa", "input": f"Where is {number}?", "context": context, "answers": ["north"]}
        )

    path = tmp_path / "hotpotqa.jsonl"
    contexts = ["The inn is in the north.", "The inn is there. " * 200, "There is rain."]
    path.write_text("\n".join(line(number, text) for number, text in enumerate(contexts)))
    return path


def asked(file, **more):
    return Request(SUITE, "dev", files=(("longbench", file),), **more)


def test_files_are_read_whole_unless_asked_otherwise(adapter, file):
    assert run_evaluation(adapter, asked(file)).rows[0].samples == 2  # of three, one is too long
    assert run_evaluation(adapter, asked(file, samples_per_file=1)).rows[0].samples == 1


def test_what_does_not_fit_is_left_out_said_and_counted(adapter, file, tmp_path):
    said = []
    done = run_evaluation(adapter, asked(file, output=tmp_path / "out"), notice=said.append)
    (sentence,) = said
    assert sentence.startswith("1 of 3 prompts are left out: they are longer than the")
    assert done.about.left_out == 1
    assert json.loads((tmp_path / "out" / "rows.json").read_text())["about"]["left_out"] == 1


def test_nothing_that_fits_is_an_error_before_anything_runs(adapter, file, monkeypatch):
    lines = file.read_text().splitlines()
    file.write_text(lines[1])
    monkeypatch.setattr(type(adapter), "compute", None)
    with pytest.raises(PromptTooLong, match=r"none of the 1 prompts fits the \d+ tokens that tiny"):
        run_evaluation(adapter, asked(file))


def test_a_file_without_samples_is_named(adapter, file):
    file.write_text("\n")
    with pytest.raises(InvalidRequest, match=r"no samples in .*hotpotqa\.jsonl"):
        run_evaluation(adapter, asked(file))


def test_minutes_are_those_of_all_runs_together(adapter, file, tmp_path):
    output = tmp_path / "out"
    first = run_evaluation(adapter, asked(file, samples_per_file=1, output=output))
    whole = run_evaluation(adapter, asked(file, output=output))
    again = run_evaluation(adapter, asked(file, output=output))
    assert 0 < first.about.minutes < whole.about.minutes == again.about.minutes
    assert again.rows == whole.rows
