"""One evaluation from start to end, on a tiny model."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from kvweave.errors import InvalidRequest, PromptTooLong
from kvweave.testing import tiny_adapter
from kvweave_lab import results_log
from kvweave_lab.eval.evaluation import Request, file_cases, run_evaluation
from kvweave_lab.eval.grid import SUITES
from kvweave_lab.eval.samples import OTHER_DOCUMENTS

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


def test_prompts_that_do_not_fit_are_left_out_reported_and_counted(adapter, file, tmp_path):
    said = []
    done = run_evaluation(adapter, asked(file, output=tmp_path / "out"), notice=said.append)
    (sentence,) = said
    assert sentence.startswith("1 of 3 prompts are left out: they are longer than the")
    assert done.about.left_out == 1
    assert json.loads((tmp_path / "out" / "rows.json").read_text())["about"]["left_out"] == 1


class Doubtful:
    """A judge that believes one answer in four."""

    name = "doubtful"

    def share(self, answer, chunks):
        return 0.25


def test_a_custom_judge_decides_which_answers_are_faithful(adapter, file, tmp_path):
    output = tmp_path / "out"
    judged = run_evaluation(adapter, asked(file, judge=Doubtful(), output=output))
    assert {row.faithfulness.value for row in judged.rows} == {0.25}
    with pytest.raises(InvalidRequest, match="results that differ in judge"):
        run_evaluation(adapter, asked(file, output=output))


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


def test_rulers_files_of_one_task_and_several_lengths_are_not_averaged(adapter, tmp_path):
    text = "Memorize and track the chain(s) of variable. VAR A = 1. Question: Find all variables that are assigned the value 1"
    for length in ("4096", "8192"):
        (tmp_path / length / "vt").mkdir(parents=True)
        line = json.dumps({"index": 0, "input": text, "outputs": ["A"]})
        (tmp_path / length / "vt" / "validation.jsonl").write_text(line)
    request = Request(SUITE, "dev", files=(("ruler", tmp_path),))
    with pytest.raises(
        InvalidRequest, match=r"4096/vt/.* and .*8192/vt/.* both hold vt, .* one after the other"
    ):
        run_evaluation(adapter, request)
    one = replace(request, files=(("ruler", tmp_path / "4096"),))
    assert run_evaluation(adapter, one).rows[0].samples == 1


def test_other_documents_are_the_same_however_many_are_asked_for(adapter, tmp_path):
    def line(number):
        dataset = (
            "hotpotqa" if number < 5 else "2wikimqa"
        )  # the second task begins where the smallest limit ends
        context = f"The inn of {number} is in the north."
        return json.dumps({"dataset": dataset, "input": "Where?", "context": context, "answers": ["north"]})

    for name in ("one", "two"):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(line, range(30))))
    few, more, whole = (
        [case.sample for case in file_cases(adapter, asked(tmp_path, samples_per_file=limit))]
        for limit in (6, 20, None)
    )
    assert [len(few), len(more), len(whole)] == [12, 40, 60]
    assert few == [*whole[:6], *whole[30:36]]
    assert more == [*whole[:20], *whole[30:50]]
    assert [len(sample.others) for sample in few] == [4] * 5 + [OTHER_DOCUMENTS] + [4] * 5 + [OTHER_DOCUMENTS]


def test_outcomes_of_other_parts_are_not_mixed_in(file, tmp_path, monkeypatch):
    adapter, output = tiny_adapter(), tmp_path / "out"
    run_evaluation(adapter, asked(file, output=output))
    assert run_evaluation(adapter, asked(file, output=output)).rows  # the same once more
    other = SimpleNamespace(
        adapter=SimpleNamespace(fingerprint=SimpleNamespace(digest="other")), name="other"
    )
    for changed, where, name, value in (
        ("critical layers", adapter, "critical_layers", (2,)),
        ("auxiliary", results_log, "load_auxiliary", lambda name: other),
        ("embedding", results_log, "TextEncoder", lambda: other),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(where, name, value)
            with pytest.raises(
                InvalidRequest, match=f"results that differ in {changed}; name another --output"
            ):
                run_evaluation(adapter, asked(file, output=output))
