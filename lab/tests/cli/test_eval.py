"""kvweave eval and kvweave eval selection through the real command."""

import json

import pytest

FEW = ("eval", "--samples", "1", "--task", "single", "--task", "coref", "--context-tokens", "256", "--quiet")
FIELDS = (
    "task recipe ratio samples score full_score reuse_score normalised agreement kl rows selection".split()
)
SELECTION = (
    *("eval", "selection", "--samples", "1", "--task", "twohop"),
    *("--context-tokens", "256", "--quiet"),
)
HOTPOT = '{"dataset": "hotpotqa", "input": "Where is it?", "context": "It is here. ", "answers": ["here"]}\n'


@pytest.mark.usefixtures("undrawn")
def test_every_recipe_and_task_has_a_row_and_recomputing_everything_is_full_attention(command, tmp_path):
    recipes, folder = ("full", "naive", "direct", "reuse"), tmp_path / "results"
    options = [word for recipe in recipes for word in ("--recipe", recipe)]
    environment = {"KVWEAVE_DTYPE": "float32", "KVWEAVE_DEVICE": "cpu"}
    ratios = ("--ratio", "0", "--ratio", "0.3", "--ratio", "1", "--json", "--output", folder)
    done = command(*FEW, *options, *ratios, **environment)
    result = json.loads(done.stdout)
    rows = result["rows"]
    assert {(row["task"], row["recipe"]) for row in rows} == {
        (task, recipe) for task in ("single", "coref", "overall") for recipe in recipes
    }
    assert result["about"]["samples"] == 1
    assert result["matrices"] == []  # nothing ran on two preparations
    for row in rows:
        assert set(FIELDS) <= set(row)
    full = [row for row in rows if row["recipe"] == "full"]
    assert all(row["score"] == row["full_score"] and row["agreement"] == 1 and row["kl"] == 0 for row in full)

    (all_rows,) = [
        row for row in rows if (row["task"], row["recipe"], row["ratio"]) == ("overall", "reuse", 1)
    ]
    assert all_rows["agreement"] == 1
    assert all_rows["kl"] < 1e-9

    assert "Some figures rest on 1 prompt; below 200" in done.stderr
    assert "--ratio 0.3 does not apply to full, naive, direct, reuse, which select no tokens" in done.stderr
    assert {row["ratio"] for row in rows if row["recipe"] == "naive"} == {0, 1}

    called = json.loads((folder / "rows.json").read_text("utf-8"))["about"]["command"]
    assert called.startswith("kvweave eval --samples 1 --task single")
    assert called.endswith("--dtype float32 --device cpu")  # from the environment


def test_a_folder_gets_results_plots_and_a_page_and_a_second_run_resumes(command, tmp_path, request):
    folder = tmp_path / "results"
    options = (*FEW, "--recipe", "direct", "--recipe", "prophetkv", "--ratio", "0.2", "--output", folder)
    first = command(*options)
    assert "coref" in first.stdout
    page = (folder / "report.html").read_text("utf-8")
    assert "data:image/png;base64" in page
    assert list(folder.glob("*.png"))
    outcomes = (folder / "outcomes.jsonl").read_text("utf-8")

    (folder / "outcomes.jsonl").write_text(outcomes[: len(outcomes) // 2], "utf-8")
    request.getfixturevalue("undrawn")
    command(*options)
    again = (folder / "outcomes.jsonl").read_text("utf-8")
    assert without_times(again) == without_times(outcomes)


def without_times(log: str) -> list[str]:
    """Return a log's lines without the times, which differ between runs."""
    lines = [json.loads(line) for line in log.split("\n")[:-1]]
    return sorted(json.dumps({name: line[name] for name in line if name != "took_s"}) for line in lines)


def test_selectors_on_several_preparations_make_a_matrix(command, tmp_path):
    few = ("eval", "--samples", "1", "--task", "coref", "--context-tokens", "256", "--quiet")
    two = ("--matrix", "--recipe", "random", "--prepare", "bare", "--prepare", "isolated")
    result = command(*few, *two, "--coverage", "0.5", "--output", tmp_path / "out")
    assert "--coverage 0.5 does not apply to random: it takes scores that add up to a whole" in result.stderr
    assert "gain over isolated" in result.stdout
    assert "bare lifts" in result.stdout
    assert (tmp_path / "out" / "matrix-0.15-256.png").exists()
    content = json.loads((tmp_path / "out" / "rows.json").read_text("utf-8"))
    (matrix,) = content["matrices"]
    assert [(cell["selector"], cell["recipe"]) for cell in matrix["cells"]] == [
        ("random", "bare+random"),
        ("random", "random"),
    ]
    assert {row["recipe"] for row in content["rows"]} == {"full", "reuse", "bare+random", "random"}


@pytest.mark.usefixtures("undrawn")
def test_storages_are_compared_prompt_by_prompt(command, tmp_path):
    few = ("eval", "--samples", "1", "--task", "coref", "--context-tokens", "256", "--quiet")
    options = (*few, "--recipe", "reuse", "--storage", "int8", "--storage", "int4")
    told = command(*options, "--output", tmp_path).stdout
    result = json.loads((tmp_path / "rows.json").read_text("utf-8"))
    assert result["matrices"] == []  # one preparation in three storages
    found = result["storages"]
    assert [(cost["recipe"], cost["storage"], cost["samples"]) for cost in found] == [
        ("reuse", "int8", 1),
        ("reuse", "int4", 1),
    ]
    for cost in found:
        assert cost["lost"] == cost["exact_score"] - cost["score"]
    assert "chunk KV in fewer bits" in told


def test_prompts_that_are_too_long_are_left_out_and_counted(command, tmp_path):
    (tmp_path / "data.jsonl").write_text(HOTPOT + HOTPOT.replace("It is here. ", "It is here. " * 9000))
    result = command("eval", "--longbench", tmp_path / "data.jsonl", "--recipe", "reuse", "--quiet", "--json")
    assert "1 of 2 prompts are left out" in result.stderr
    assert {row["samples"] for row in json.loads(result.stdout)["rows"]} == {1}


@pytest.mark.usefixtures("undrawn")
def test_selection_reports_which_tokens_matter(command, tmp_path):
    result = command(*SELECTION, "--output", tmp_path / "selection")
    assert "auxiliary" in result.stdout
    assert "Some figures rest on 1 prompt; below 200" in result.stderr
    assert (tmp_path / "selection" / "selection.json").exists()
    assert list((tmp_path / "selection").glob("*.png"))


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("--task", "nothing"), "single, multikey"),
        (("--recipe", "nothing"), "full, reuse"),
        (("--prepare", "nothing"), "bare, isolated, similar"),
        (("--storage", "nothing"), "exact, int8, int4"),
        (("--storage", "int8", "--recipe", "cachecraft"), "keeps exact versions"),
        (("--suite", "nothing"), "quick, full"),
        (("--split", "nothing"), "train, dev, test"),
        (("--haystack", "/nowhere"), "/nowhere is not a folder"),
        (("--context-tokens", "64", "--task", "commonwords"), "longer context"),
        (("--ruler", "/nowhere.jsonl"), "/nowhere.jsonl"),
        (
            ("--ruler", "/nowhere.jsonl", "--task", "coref", "--context-tokens", "256"),
            "--task, --context-tokens: only for",
        ),
        (
            ("--longbench", "/a", "--split", "dev", "--seed", "0", "--haystack", "/b"),
            "--split, --seed, --haystack: only for",
        ),
        (("--overlap", "50"), "--overlap: only for --ruler and --longbench"),
        (("selection",), "--samples, --quiet: it would be ignored before `selection`"),
    ],
)
def test_errors_name_what_could_be_evaluated(command, flags, expected):
    refused = command("eval", "--samples", "1", "--quiet", *flags, code=1)
    assert expected in " ".join(refused.stderr.split())


def test_two_processes_compute_what_one_does_with_an_auxiliary_model(command):
    options = (*FEW, "--recipe", "cacheclip", "--ratio", "0.2", "--json")
    one, two = (json.loads(command(*options, "--processes", count).stdout)["rows"] for count in ("1", "2"))
    assert one == two


def test_qcfuse_runs_at_its_own_ratios_with_the_layers_that_were_measured(command, tmp_path):
    ratios = ("0.1", "0.2", "0.4", "0.5")
    few = ("eval", "--samples", "1", "--task", "twohop", "--context-tokens", "256", "--quiet", "--json")
    options = (*few, "--recipe", "qcfuse", *(word for ratio in ratios for word in ("--ratio", ratio)))
    plain = command(*options)
    assert "qcfuse scores tokens with layers 2, 3, 4; `kvweave profile-layers` measures" in plain.stderr
    home = tmp_path / "other"
    command("profile-layers", "--home", home, "--samples", "1", "--context-tokens", "256", "--quiet")
    (path,) = (home / "models").iterdir()
    path.write_text(path.read_text().replace('"critical_layers": [', '"critical_layers": [0, ', 1))
    measured = command(*options, "--home", home)
    layers = json.loads(path.read_text())["critical_layers"]
    assert f"qcfuse scores tokens with layers {', '.join(map(str, layers))}" in measured.stderr
    assert "profile-layers" not in measured.stderr
    found = json.loads(measured.stdout)
    assert found["about"]["critical_layers"] == layers
    rows = {row["ratio"]: row for row in found["rows"] if row["recipe"] == "qcfuse"}
    assert [rows[float(ratio)]["rows"] for ratio in ratios] == sorted(
        rows[float(ratio)]["rows"] for ratio in ratios
    )


def test_a_set_of_tasks_runs_as_a_whole(command):
    options = ("eval", "--samples", "1", "--context-tokens", "384", "--recipe", "reuse", "--quiet")
    rows = json.loads(command(*options, "--tasks", "neutral", "--json").stdout)["rows"]
    assert [row["task"] for row in rows if row["recipe"] == "full"] == [
        *("coref-mixed", "vartrack-mixed", "contradiction-mixed", "twohop", "order", "overall"),
    ]
    refused = command(*options, "--tasks", "neutral", "--task", "coref", code=1).stderr
    assert "--task and --tasks both name the tasks; leave one of them out" in " ".join(refused.split())
    assert "there is no set of tasks 'odd'" in command(*options, "--tasks", "odd", code=1).stderr
