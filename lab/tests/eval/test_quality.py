"""Folders of evaluations become one result; folders that must not be mixed are refused."""

import json
from dataclasses import replace

import pytest

from kvweave.errors import InvalidRequest
from kvweave.models.loading import load_model
from kvweave.testing import tiny_adapter
from kvweave_lab.eval.evaluation import Request, run_evaluation, token_count
from kvweave_lab.eval.grid import SUITES, generated_cases
from kvweave_lab.eval.report import rows_json
from kvweave_lab.eval.rows import summary_rows
from kvweave_lab.eval.world import Haystack
from lab_support.evaluations import evaluated, outcomes
from lab_support.outcomes import CONFIG, OUTCOME


@pytest.fixture
def quality(script):
    return script("quality")


@pytest.fixture
def read(quality):
    return quality.read_folders


def test_rows_are_those_over_all_folders_together(quality, tmp_path):
    single, twohop, longer = outcomes(), outcomes("twohop"), outcomes(context_tokens=2048, prompts=4)
    folders = [
        evaluated(tmp_path / "one", single, date="2026-01-05"),
        evaluated(tmp_path / "two", twohop, command="kvweave eval --output=elsewhere/two --split test"),
        evaluated(tmp_path / "longer", longer),
    ]
    made = quality.gather(folders)
    expected = rows_json(summary_rows([*single, *twohop, *longer]))
    assert [row | {"kl": pytest.approx(row["kl"])} for row in expected] == made["rows"]
    assert made["command"] == "lab/experiments/quality.py one two longer"
    assert made["evaluations"] == [
        "kvweave eval --split test --output 512",
        "kvweave eval --output=two --split test",
        "kvweave eval --split test --output 512",
    ]
    assert (made["date"], made["split"], made["chunk_tokens"]) == ("2026-01-05", "test", 96)
    assert made["minutes"] == pytest.approx(len(single + twohop + longer) * OUTCOME.took_s / 60, abs=0.05)


@pytest.mark.parametrize(("recipe", "is_used"), [("naive", False), ("similar+cacheclip", True)])
def test_the_auxiliary_model_matters_only_if_a_recipe_uses_it(read, tmp_path, recipe, is_used):
    folders = [
        evaluated(
            tmp_path / task, outcomes(task, recipes=(recipe,)), config={**CONFIG, "auxiliary": auxiliary}
        )
        for task, auxiliary in (("single", "one"), ("twohop", "other"))
    ]
    if not is_used:
        assert len(read(folders).outcomes) == 12
        return
    with pytest.raises(InvalidRequest, match="differ in auxiliary;"):
        read(folders)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"config": {**CONFIG, "model": "other"}}, "model"),
        ({"split": "dev"}, "split"),
        ({"chunk_tokens": 64, "device": "cuda"}, "chunk_tokens, device"),
    ],
)
def test_folders_that_must_not_be_mixed_are_refused(read, tmp_path, changes, named):
    folders = [
        evaluated(tmp_path / "one", outcomes()),
        evaluated(tmp_path / "two", outcomes("twohop"), **changes),
    ]
    with pytest.raises(InvalidRequest, match=f"two and .*one differ in {named};"):
        read(folders)


def test_only_outcomes_that_the_report_counts_are_read(read, tmp_path):
    folder = evaluated(tmp_path, outcomes(), more=outcomes("twohop"))
    assert read([folder]).outcomes == outcomes()


def test_a_log_with_other_prompts_than_the_report_is_refused(read, tmp_path):
    of_another_split = [replace(outcome, sample=f"dev/{outcome.sample}") for outcome in outcomes()]
    folder = evaluated(tmp_path, outcomes(), more=of_another_split)
    with pytest.raises(InvalidRequest, match="other prompts than its rows"):
        read([folder])


def test_prompts_in_two_folders_count_once(read, tmp_path):
    folders = [evaluated(tmp_path / recipe, outcomes(recipes=(recipe,))) for recipe in ("naive", "direct")]
    found = read(folders).outcomes
    assert len(found) == 2 * 4
    assert {row.samples for row in summary_rows(found)} == {2}


def test_folders_that_disagree_on_an_answer_are_refused(read, tmp_path):
    folders = [
        evaluated(tmp_path / "one", outcomes()),
        evaluated(tmp_path / "two", outcomes(answer="something else")),
    ]
    with pytest.raises(InvalidRequest, match="two has another answer to single/512/0 under full"):
        read(folders)


def test_a_folder_that_is_no_finished_evaluation_is_refused(read, tmp_path):
    with pytest.raises(InvalidRequest, match=r"outcomes.jsonl cannot be read"):
        read([tmp_path])
    folder = evaluated(tmp_path, outcomes())
    (folder / "rows.json").unlink()
    with pytest.raises(InvalidRequest, match=r"has no rows.json; let the evaluation finish"):
        read([folder])


def test_a_folder_of_an_evaluation_gives_its_own_rows(read, tmp_path):
    file = tmp_path / "hotpotqa.jsonl"
    line = {"dataset": "hotpotqa", "input": "Where?", "context": "The inn is north.", "answers": ["north"]}
    file.write_text(json.dumps(line))
    suite = replace(SUITES["quick"], recipes=("naive",), ratios=())
    request = Request(suite, "dev", files=(("longbench", file),), output=tmp_path / "out")
    done = run_evaluation(tiny_adapter(), request)
    assert summary_rows(read([tmp_path / "out"]).outcomes) == done.rows


def test_matrices_are_stored_and_the_figures_of_the_methods_page_drawn(quality, tmp_path):
    found = outcomes(recipes=("similar+reuse",))
    folder = evaluated(tmp_path / "one", found)
    made = quality.gather([folder])
    (matrix,) = made["matrices"]
    assert [cell["recipe"] for cell in matrix["cells"]] == ["reuse", "similar+reuse"]
    assert json.loads(quality.text(made)) == made
    drawn = quality.draw([folder], tmp_path / "images")
    parts = ("score-by-ratio", "score-by-cost", "matrix-0")
    assert [path.name for path in drawn] == [f"methods-{part}-512.png" for part in parts]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn)


def test_the_cost_of_fewer_bits_is_stored(quality, tmp_path):
    exact, coded = outcomes(), outcomes(recipes=("isolated-int8+reuse",))
    made = quality.gather([evaluated(tmp_path / "one", exact), evaluated(tmp_path / "two", coded)])
    (cost,) = made["storages"]
    assert (cost["recipe"], cost["storage"], cost["samples"], cost["lost"]) == ("reuse", "int8", 2, 0.0)
    assert json.loads(quality.text(made)) == made


def test_training_facts_are_given_for_the_shipped_model_only(quality):
    shipped = {"model": "reference", "dtype": "float32", "digest": load_model().fingerprint.digest}
    facts = quality.reference(shipped)
    assert facts["bytes"] == (quality.SHIPPED / "model.safetensors").stat().st_size
    assert facts["tokens"] > 0
    assert facts["hours"] > 0
    with pytest.raises(InvalidRequest, match="not the reference model that ships now"):
        quality.reference(shipped | {"digest": "other"})


def test_training_facts_include_earlier_trainings(quality, tmp_path, monkeypatch):
    shipped = {"model": "reference", "dtype": "float32", "digest": load_model().fingerprint.digest}
    parts = ((10, 1.5, 2, "CPU"), (100, 0.25, 30, "CPU"), (1000, 6.0, 400, "GPU"))
    made: dict[str, object] = {}
    for part in reversed(parts):
        made = dict(zip(("tokens", "hours", "steps", "device"), part, strict=True)) | (
            {"earlier": made} if made else {}
        )
    (tmp_path / "training.json").write_text(json.dumps(made))
    (tmp_path / "model.safetensors").write_bytes(b"1234")
    monkeypatch.setattr(quality, "SHIPPED", tmp_path)
    assert quality.reference(shipped) == {
        "tokens": 1110,
        "hours": 7.75,
        "steps": 432,
        "device": "CPU",
        "bytes": 4,
    }


def test_a_row_is_a_line_of_the_file(quality, tmp_path):
    made = quality.gather([evaluated(tmp_path, outcomes())])
    written = quality.text(made)
    assert json.loads(written) == made
    assert sum(line.strip().startswith('{"task"') for line in written.splitlines()) == len(made["rows"])


def permuted(prompts=4):
    """Return outcomes of permuted samples as they are generated, right where both chunks are in the prompt."""
    suite = replace(SUITES["full"], tasks=("coref-permuted",), context_tokens=(512,), samples=prompts)
    cases = generated_cases(suite, "test", Haystack.of_split("test"), token_count(load_model()))
    return [
        replace(
            OUTCOME,
            task=case.sample.task,
            sample=case.sample.name,
            recipe=recipe,
            ratio=1.0 if recipe == "full" else 0.0,
            score=float(not case.sample.placement.startswith("not retrieved")),
        )
        for case in cases
        for recipe in ("full", "reuse")
    ]


def test_permuted_prompts_whose_chunks_are_both_there_have_rows_of_their_own(quality, tmp_path):
    found = permuted(prompts=12)
    made = quality.gather([evaluated(tmp_path, found, samples=12)])
    right = sum(outcome.score for outcome in found) / 2
    assert 0 < right < 12
    rows = [(row["task"], row["recipe"], row["samples"], row["score"]) for row in made["against"]]
    assert rows == [("overall", "full", right, 1.0), ("overall", "reuse", right, 1.0)]
    assert "against" not in quality.gather([evaluated(tmp_path / "fixed", outcomes())])


def test_a_result_is_completed_with_costs_and_scores_without_context(quality, tmp_path):
    path = tmp_path / "result.json"
    recipes = ("full", "reuse", "following+reuse", "prophetkv", "isolated+weave", "weave")
    row = {"task": "coref-mixed", "context_tokens": 512, "samples": 1}
    result = {"model": "reference", "dtype": "float32", "digest": load_model().fingerprint.digest}
    result |= {"split": "test", "chunk_tokens": 96, "rows": [row | {"recipe": name} for name in recipes]}
    path.write_text(json.dumps(result))
    made = quality.completed(path)
    costs = {one["recipe"]: (one["passes"], one["bytes_per_token"]) for one in made["costs"]}
    assert list(costs) == list(recipes[1:])  # full attention prepares nothing
    bare, following = costs["reuse"], costs["following+reuse"]
    assert bare[0] == 1  # the chunks alone
    assert costs["prophetkv"] == bare
    assert 1 < following[0] < 2  # again after the chunk before, where there is one
    assert following[1] == 2 * bare[1]
    assert costs["isolated+weave"] == (2, bare[1] + 4)  # once more to see what moves: a number for each token
    assert costs["weave"] == (2, 2 * bare[1] + 4)
    assert made["completed"]["without_context"] == {"coref-mixed": 0}
    assert made["completed"]["command"] == "lab/experiments/quality.py --complete result.json"
    path.write_text(json.dumps(result | {"digest": "other"}))
    with pytest.raises(InvalidRequest, match="not the reference model that ships now"):
        quality.completed(path)
