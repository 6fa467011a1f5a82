"""Recipe variants from a file run on the same prompts, are stored by name, and are compared with a baseline."""

import json
from dataclasses import replace

import pytest

from kvweave.errors import InvalidRequest, UnknownRecipe
from kvweave.recipes.methods import recipe_named
from kvweave.testing import tiny_adapter
from kvweave_lab.eval.grid import SUITES, Case
from kvweave_lab.eval.rows import summary_rows
from kvweave_lab.eval.samples import Sample
from lab_support.outcomes import OUTCOME

SUITE = replace(SUITES["quick"], tasks=("single", "twohop"), ratios=(0.5,), samples=1)
SAMPLE = Sample(
    "one",
    "single",
    ("The inn is in the north.", "There is rain."),
    "Where is it?",
    ("north",),
    "exact_match",
    4,
)


@pytest.fixture
def recipe_grid(script, monkeypatch):
    """The module with a tiny model and one prompt for each task."""
    module = script("recipe_grid")
    adapter = tiny_adapter()
    monkeypatch.setattr(module, "model", lambda name: adapter)

    def cases(grid, adapter):
        (task,), (seed,) = grid.suite.tasks, grid.suite.seeds
        return [Case(replace(SAMPLE, name=f"{task}/{seed}", task=task), 512, seed)]

    monkeypatch.setattr(module.Grid, "cases", cases)
    return module


def grid_of(recipe_grid, *names, **more):
    return recipe_grid.Grid(lambda: {name: recipe_named(name) for name in names}, SUITE, "dev", **more)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "ideas.py"
    path.write_text(
        "from dataclasses import dataclass, replace\n"
        "from kvweave.recipes.methods import recipe_named\n"
        "from kvweave.recipes.prepare import Similar\n"
        "@dataclass(frozen=True)\n"
        "class Own:\n"
        "    size: int = 1\n"
        "made = recipe_named('prophetkv')\n"
        "VARIANTS = {'mine': made, 'few neighbours': replace(made, prepare=Similar(5))}\n"
    )
    return path


class TestVariantsOfAFile:
    def test_all_of_them_and_named_recipes(self, script, file):
        made = script("experiments").FileVariants(file, (), ("epic", "similar+prophetkv"))()
        assert list(made) == ["mine", "few neighbours", "epic", "similar+prophetkv"]
        assert made["few neighbours"].prepare.count == 5

    def test_the_chosen_ones_and_a_baseline_from_the_file(self, script, file):
        made = script("experiments").FileVariants(file, ("few neighbours",), ("mine",))()
        assert list(made) == ["few neighbours", "mine"]
        assert made["mine"] == recipe_named("prophetkv")

    def test_unknown_names_and_files_are_refused(self, script, file, tmp_path):
        experiments = script("experiments")
        with pytest.raises(InvalidRequest, match="has no variant 'other'; it has mine, few neighbours"):
            experiments.FileVariants(file, ("other",), ())()
        with pytest.raises(UnknownRecipe, match="there is no recipe 'nothing'"):
            experiments.FileVariants(file, (), ("nothing",))()
        with pytest.raises(InvalidRequest, match="is no Python file"):
            experiments.FileVariants(tmp_path / "absent.py", (), ())()
        empty = tmp_path / "empty.py"
        empty.write_text("")
        with pytest.raises(InvalidRequest, match="has no VARIANTS"):
            experiments.FileVariants(empty, (), ())()


class TestRecipeGrid:
    def test_variants_run_under_their_names_with_the_baselines(self, recipe_grid, tmp_path):
        grid = recipe_grid.Grid(
            lambda: {"mine": recipe_named("random"), "plain": recipe_named("ape")}, SUITE, "dev"
        )
        found = recipe_grid.run(grid, tmp_path, 1)
        labels = [("full", 1.0), ("reuse", 0.0), ("mine", 0.5), ("plain", 0.0)]  # ape selects nothing
        assert [(one.task, one.recipe, one.ratio) for one in found] == [
            (task, *label) for task in SUITE.tasks for label in labels
        ]
        assert grid.prompts == 2
        assert grid.answers == len(found)

    def test_every_task_and_seed_has_a_separate_folder(self, recipe_grid, tmp_path):
        grid = recipe_grid.Grid(dict, replace(SUITE, seeds=(0, 3)), "dev")
        assert grid.prompts == 4
        found = recipe_grid.run(grid, tmp_path, 1)
        places = ["single/0", "single/3", "twohop/0", "twohop/3"]
        assert list(dict.fromkeys(one.sample for one in found)) == places
        folders = sorted(path.parent.name for path in tmp_path.glob("*/outcomes.jsonl"))
        assert folders == ["single", "single-3", "twohop", "twohop-3"]

    def test_a_second_run_computes_only_new_outcomes(self, recipe_grid, tmp_path, monkeypatch):
        first = recipe_grid.run(grid_of(recipe_grid, "random"), tmp_path, 1)
        ran = []
        original = recipe_grid.Runner.prefill
        monkeypatch.setattr(
            recipe_grid.Runner,
            "prefill",
            lambda self, candidate, *more: (
                ran.append(candidate.recipe.name) or original(self, candidate, *more)
            ),
        )
        assert recipe_grid.run(grid_of(recipe_grid, "random"), tmp_path, 1) == first
        assert ran == []
        more = recipe_grid.run(grid_of(recipe_grid, "random", "epic"), tmp_path, 1)
        assert ran == ["full", "epic"] * 2  # full attention runs again, to compare new outcomes with
        assert [one for one in more if one.recipe != "epic"] == first

    def test_outcomes_under_other_critical_layers_are_not_mixed_in(self, recipe_grid, tmp_path):
        grid = grid_of(recipe_grid, "qcfuse")
        recipe_grid.run(grid, tmp_path, 1)
        recipe_grid.model(None).critical_layers = (2,)
        with pytest.raises(InvalidRequest, match="differ in critical layers; name another"):
            recipe_grid.run(grid, tmp_path, 1)

    def test_a_name_of_another_recipe_is_refused(self, recipe_grid, tmp_path):
        recipe_grid.record_definitions(tmp_path, [recipe_named("random")])
        recipe_grid.record_definitions(tmp_path, [recipe_named("epic")])
        assert set(json.loads((tmp_path / "definitions.json").read_text())) == {"random", "epic"}
        with pytest.raises(InvalidRequest, match="outcomes of another recipe under the name 'random'"):
            recipe_grid.record_definitions(tmp_path, [replace(recipe_named("epic"), name="random")])

    def test_the_same_function_at_another_address_is_the_same_recipe(self, recipe_grid, tmp_path):
        for _ in range(2):
            recipe_grid.record_definitions(
                tmp_path, [replace(recipe_named("random"), select=lambda state: state.stale)]
            )
        assert "lambda" in json.loads((tmp_path / "definitions.json").read_text())["random"]

    def test_the_order_in_which_a_process_writes_a_set_does_not_matter(self, recipe_grid, tmp_path):
        recipe = replace(recipe_named("prophetkv"), attend=frozenset({"chunk", "system"}))
        recipe_grid.record_definitions(tmp_path, [recipe])
        file = tmp_path / "definitions.json"
        written = file.read_text()
        other = written.replace("{'chunk', 'system'}", "{'system', 'chunk'}")
        assert other != written
        file.write_text(other)
        recipe_grid.record_definitions(tmp_path, [recipe])
        assert file.read_text() == written

    @pytest.mark.parametrize("name", ["full", "reuse"])
    def test_the_names_of_the_baselines_are_reserved(self, recipe_grid, name):
        grid = recipe_grid.Grid(lambda: {name: recipe_named("random")}, SUITE, "dev")
        with pytest.raises(InvalidRequest, match=f"a variant is called '{name}'"):
            grid.candidates()

    def test_samples_may_count_as_another_kind(self, script):
        module = script("recipe_grid")
        suite = replace(SUITE, tasks=("single",), samples=12, context_tokens=(300,))
        adapter = tiny_adapter()

        def kind(sample):
            return "number" if sample.answers[0].isdigit() else None

        everything = module.Grid(dict, suite, "dev").cases(adapter)
        numbers = module.Grid(dict, suite, "dev", kind=kind).cases(adapter)
        assert 0 < len(numbers) < len(everything)
        assert {case.sample.task for case in numbers} == {"number"}
        wanted = [case.sample.name for case in everything if case.sample.answers[0].isdigit()]
        assert [case.sample.name for case in numbers] == wanted


def outcomes(scores):
    """Return the outcomes of two prompts of one task, with scores by recipe and ratio."""
    return [
        replace(
            OUTCOME, task="single", sample=str(number), recipe=recipe, ratio=ratio, coverage=None, score=score
        )
        for (recipe, ratio), pair in scores.items()
        for number, score in enumerate(pair)
    ]


FULL_AND_REUSE = {("full", 1.0): (1.0, 1.0), ("reuse", 0.0): (0.0, 0.0)}


class TestTables:
    def test_variants_by_ratio_and_score_with_gains_over_the_baseline_there(self, script):
        experiments = script("experiments")
        scores = {
            ("base", 0.1): (0.0, 1.0),
            ("base", 0.2): (1.0, 1.0),
            ("mine", 0.1): (1.0, 1.0),
            ("mine", 0.2): (0.0, 1.0),
        }
        made = outcomes(FULL_AND_REUSE | scores)
        _, _, *lines = experiments.overall(made, summary_rows(made), "base")
        cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
        assert [cell[:2] for cell in cells] == [
            ["`reuse`", "0"],
            ["`mine`", "0.1"],
            ["`base`", "0.1"],
            ["`base`", "0.2"],
            ["`mine`", "0.2"],
            ["`full`", "1"],
        ]
        gains = {(cell[0], cell[1]): cell[4] for cell in cells}
        assert gains["`mine`", "0.1"].startswith("+0.500 ")
        assert gains["`mine`", "0.2"].startswith("-0.500 ")
        assert {gains[run] for run in (("`base`", "0.1"), ("`base`", "0.2"), ("`full`", "1"))} == {"–"}

    def test_a_baseline_without_ratios_is_compared_with_at_all_of_them(self, script):
        experiments = script("experiments")
        made = outcomes(FULL_AND_REUSE | {("mine", 0.1): (1.0, 0.5), ("mine", 0.2): (1.0, 1.0)})
        lines = experiments.overall(made, summary_rows(made), "reuse")
        gains = [line.split("|")[5].split()[0] for line in lines if "`mine`" in line]
        assert gains == ["+0.750", "+1.000"]

    def test_every_task_has_a_column(self, script):
        made = outcomes(FULL_AND_REUSE)
        head, _, *lines = script("experiments").by_task(summary_rows(made))
        assert head == "| variant | ratio | single | overall |"
        assert lines == ["| `reuse` | 0 | 0.00 | 0.00 |", "| `full` | 1 | 1.00 | 1.00 |"]
