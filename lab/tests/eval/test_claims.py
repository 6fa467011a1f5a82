"""Claims of papers: results become numbers, verdicts, tables and figures, without statements that were not measured."""

import importlib
import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import matplotlib
import pytest
import torch

from kvweave.errors import InvalidRequest
from kvweave.recipes.methods import recipe_named
from kvweave.recipes.request import Budget
from kvweave.testing import tiny_adapter
from kvweave_lab.eval.grid import SUITES, Case
from kvweave_lab.eval.samples import Sample
from kvweave_lab.report.figures import LIGHT, rc_params, to_png
from kvweave_lab.statistics import Estimate
from lab_support.outcomes import OUTCOME

ROOT = Path(__file__).parents[3]
PROMPTS = 3

pytestmark = pytest.mark.usefixtures("script")


@pytest.fixture
def claims():
    return importlib.import_module("papers").CLAIMS


@pytest.fixture
def setting():
    return importlib.import_module("papers.claim").Setting("dev", PROMPTS, tuned="some-folder")


def answers(grid, score):
    """Return a grid's outcomes; `score` takes recipe, ratio and chunk size."""
    tasks = ("number", "UUID") if grid.kind else grid.suite.tasks
    labels = [("full", 1.0), *((each.recipe.name, each.ratio) for each in grid.candidates())]
    return [
        replace(
            OUTCOME,
            task=task,
            sample=f"{task}/{number}",
            recipe=recipe,
            ratio=ratio,
            coverage=None,
            score=float(score(recipe, ratio, grid.suite.chunk_tokens)),
        )
        for task in tasks
        for number in range(PROMPTS)
        for recipe, ratio in labels
    ]


def selections(grid, evidence):
    """Return a grid's selections: chunk starts and late chunks for cacheblend, even ones for others.

    `evidence` takes a recipe.
    """
    selected = importlib.import_module("papers.selected")
    even = {"tenths": [0.1] * 10, "fifths": [0.2] * 5}
    biased = {"tenths": [1.0] + [0.0] * 9, "fifths": [0.0] * 4 + [1.0]}
    return [
        selected.Selected(
            task,
            f"{task}/{number}",
            name,
            **(biased if name == "cacheblend" else even),
            stale_tenths=even["tenths"],
            stale_fifths=even["fifths"],
            evidence=evidence(name),
            beside=0.9,
        )
        for task in grid.suite.tasks
        for number in range(PROMPTS)
        for name in grid.variants()
    ]


def numbers_of(claim, setting, value):
    """Return a claim's numbers as read from the results file."""
    selects = claim.measure is not importlib.import_module("recipe_grid").run
    results = selections if selects else answers
    found = {part: results(grid, value) for part, grid in claim.grids(setting).items()}
    return json.loads(json.dumps(claim.numbers(found)))


def equal_scores(claim):
    """Return a function that gives every recipe the same score."""
    return lambda *run: 0.5


def held(claim, result):
    return [verdict.held for verdict in claim.verdicts(result)]


class TestEveryClaim:
    def test_its_numbers_make_verdicts_a_table_and_a_figure(self, claims, setting):
        for name, claim in claims.items():
            result = numbers_of(claim, setting, equal_scores(claim))
            assert claim.verdicts(result), name
            assert all(one.statement.endswith(".") for one in claim.verdicts(result)), name
            widths = {line.count("|") for line in claim.table(result)}
            assert len(widths) == 1, name
            with matplotlib.rc_context(rc_params(LIGHT)):
                assert to_png(claim.draw(result, LIGHT)).startswith(b"\x89PNG"), name

    def test_no_statement_holds_if_all_recipes_score_the_same(self, claims, setting):
        for name in ("fragments", "neighbours", "cacheclip-parts", "fusionrag-parts", "chunk-size"):
            result = numbers_of(claims[name], setting, equal_scores(claims[name]))
            assert set(held(claims[name], result)) == {None}, name

    def test_every_grid_can_be_sent_to_another_process(self, claims, setting):
        import pickle

        for claim in claims.values():
            for grid in claim.grids(setting).values():
                assert list(pickle.loads(pickle.dumps(grid)).variants()) == list(grid.variants())

    def test_papers_and_tasks_are_named(self, claims, setting):
        for claim in claims.values():
            assert re.match(r"(CacheClip|FusionRAG|ProphetKV) §", claim.paper)
            for grid in claim.grids(setting).values():
                assert grid.split == "dev"
                assert grid.prompts >= PROMPTS * len(grid.suite.tasks)


class TestVerdicts:
    def test_a_collapse_that_windows_avoid(self, claims, setting):
        def score(recipe, ratio, size):
            return 0.0 if recipe == "cacheblend" and ratio == 0.5 else 1.0

        claim = claims["fragments"]
        found = claim.verdicts(numbers_of(claim, setting, score))
        # for each kind: the fall, windows around CacheBlend, windows in CacheClip, which never fell
        assert [verdict.held for verdict in found] == [True, True, None] * 2
        assert (
            "averaged over 30%, 50%, 70%, the difference is -0.333 (-0.333 to -0.333)" in found[0].statement
        )
        assert "number needles" in found[0].statement
        assert "UUID needles" in found[3].statement

    def test_no_ratio_is_picked_by_its_score(self, claims, setting):
        """A loss at one ratio and an equal gain at another are no collapse."""
        claim = claims["fragments"]
        moved = {0.3: -0.5, 0.5: 0.5}

        def score(recipe, ratio, size):
            return 0.5 + (recipe == "cacheblend") * moved.get(ratio, 0.0)

        assert held(claim, numbers_of(claim, setting, score)) == [None] * 6

    def test_the_opposite_of_a_collapse(self, claims, setting):
        claim = claims["fragments"]
        found = held(claim, numbers_of(claim, setting, lambda recipe, ratio, size: recipe != "reuse"))
        assert found == [False, None, None] * 2

    def test_prophetkv_ahead_at_every_chunk_size(self, claims, setting):
        claim = claims["chunk-size"]
        result = numbers_of(claim, setting, lambda recipe, ratio, size: recipe in ("full", "prophetkv"))
        assert held(claim, result)[:3] == [True] * 3
        result = numbers_of(
            claim, setting, lambda recipe, ratio, size: recipe in ("full", "epic") or size == 32 != recipe
        )
        assert held(claim, result)[2] is False  # epic is ahead with chunks of some size

    def test_chunk_sizes_are_judged_on_the_papers_task(self, claims, setting):
        claim = claims["chunk-size"]
        result = numbers_of(claim, setting, equal_scores(claim))
        for gain in result["gains"]:
            better = 0.1 if gain["task"] == "multivalue" else -0.3
            gain |= {"gain": better, "gain_interval": [better - 0.01, better + 0.01]}
        found = claim.verdicts(result)[:3]
        assert [verdict.held for verdict in found] == [True] * 3
        assert all(
            "on `multivalue`, the paper's task" in one.statement
            and "On `vartrack`: 32: -0.300" in one.statement
            for one in found
        )

    def test_losses_grow_with_smaller_chunks(self, claims, setting):
        claim = claims["chunk-size"]
        result = numbers_of(claim, setting, lambda recipe, ratio, size: recipe == "full" or size > 32)
        assert held(claim, result)[3:] == [True] * 4

    def test_losses_on_different_prompts_are_not_called_paired(self, claims, setting):
        claim = claims["chunk-size"]
        result = numbers_of(claim, setting, lambda recipe, ratio, size: recipe == "full" or size > 32)
        statements = [one.statement for one in claim.verdicts(result)]
        assert all("the difference is unpaired" in one for one in statements[3:])
        assert "(1.000 with 32 tokens, 0.000 with 128; the difference is unpaired): +1.000" in statements[3]
        assert not any("unpaired" in one for one in statements[:3])

    def test_variants_that_are_compared_recompute_as_many_rows(self, claims, setting):
        for name in ("fragments", "cacheclip-parts"):
            (grid,) = claims[name].grids(setting).values()
            assert grid.variants()["cacheclip without windows"].select.refill

    def test_both_parts_of_fusionrag_together_restore_everything(self, claims, setting):
        scores = {
            "full": 1.0,
            "reuse": 0.0,
            "similar chunks alone": 0.2,
            "selection alone": 0.6,
            "fusionrag-alone": 1.0,
        }
        claim = claims["fusionrag-parts"]
        found = claim.verdicts(numbers_of(claim, setting, lambda recipe, ratio, size: scores[recipe]))
        assert [verdict.held for verdict in found] == [True] * 5
        assert "+0.400 (+0.400 to +0.400)" in found[2].statement  # what preparation adds to selection

    def test_fine_tuning_is_left_out_if_it_was_not_measured(self, claims, setting):
        claim = claims["cacheclip-parts"]
        tuned = claim.verdicts(numbers_of(claim, setting, equal_scores(claim)))
        untuned = claim.verdicts(numbers_of(claim, replace(setting, tuned=None), equal_scores(claim)))
        assert len(tuned) == len(untuned) + 1
        assert not any("fine-tuned" in one.statement for one in untuned)

    @pytest.mark.parametrize(("computed", "wanted"), [(17.0, (None, False)), (13.0, (True, True))])
    def test_a_gain_with_more_recomputed_tokens_is_not_judged(self, claims, setting, computed, wanted):
        claim = claims["cacheclip-parts"]
        tuned = "cacheclip-windows, auxiliary fine-tuned"
        result = numbers_of(claim, setting, lambda recipe, ratio, size: recipe in (tuned, "full"))
        for row in result["rows"]:
            row["computed"] = computed if row["recipe"] == tuned else 13.0
        verdict = claim.verdicts(result)[-1]
        assert (verdict.held, verdict.judged) == wanted
        assert ("recomputes 17 tokens" in verdict.statement) is not verdict.judged

    def test_heads_and_late_chunks(self, claims, setting):
        claim = claims["heads"]
        found = claim.verdicts(numbers_of(claim, setting, equal_scores(claim)))
        assert [verdict.held for verdict in found] == [True] * 4
        assert "10.00 (10.00 to 10.00) times" in found[0].statement
        assert "5.00 (5.00 to 5.00) times" in found[2].statement

    def test_fewer_than_five_stale_chunks_have_no_share_of_late_ones(self, claims, setting):
        claim = claims["heads"]
        (grid,) = claim.grids(setting).values()
        made = selections(grid, lambda name: 0.5)
        few = [
            replace(
                one, sample=f"{one.sample}/few", fifths=[0.25] * 4 + [0.0], stale_fifths=[0.25] * 4 + [0.0]
            )
            for one in made
        ]
        shares, more = claim.numbers({"": made}), claim.numbers({"": [*made, *few]})
        assert [one["fifths"][-1] for one in more["shares"]] == [
            one["fifths"][-1] for one in shares["shares"]
        ]
        assert more["gains"]["late"] == shares["gains"]["late"]

    def test_blind_selections_that_find_hardly_more_than_chance(self, claims, setting):
        claim = claims["crowding"]
        scores = {"prophetkv": 0.9, "random": 0.2, "epic": 0.4, "kvshare": 0.1}
        found = claim.verdicts(numbers_of(claim, setting, lambda name: scores.get(name, 0.2)))
        assert [verdict.held for verdict in found] == [True] * 3 + [False, True, True]
        assert "90% (90% to 90%) of its selection is no evidence" in found[-1].statement

    @pytest.mark.parametrize(
        ("low", "high", "wanted"), [(0.01, 0.2, True), (-0.2, -0.01, False), (-0.01, 0.2, None), (0, 0, None)]
    )
    def test_a_verdict_needs_an_interval_that_excludes_zero(self, low, high, wanted):
        claim = importlib.import_module("papers.claim")
        ((found, statement, _),) = claim.better("This is better", Estimate((low + high) / 2, low, high))
        assert found is wanted
        assert statement.startswith("This is better: ")
        assert claim.better("This is better", None) == []


class TestWindows:
    @staticmethod
    def chosen(scores, lengths, ratio):
        fragments = importlib.import_module("papers.fragments")
        state = SimpleNamespace(
            stale=torch.arange(10, 10 + len(scores)),
            matched=[SimpleNamespace(origin="reused", span=SimpleNamespace(tokens=n)) for n in lengths],
            request=SimpleNamespace(budget=Budget(ratio)),
        )
        score = SimpleNamespace(scores=lambda state: torch.tensor(scores, dtype=torch.float))
        return fragments.InWindows(score, window=4, more_than=2).choose(state).tolist()

    def test_a_window_comes_before_single_tokens_that_score_higher(self):
        # the third token of the second window is the sixth highest; the first window has the two highest alone
        scores = [9, 8, 0, 0, 7, 6, 5, 0]
        assert self.chosen(scores, [8], 3 / 8) == [14, 15, 16]
        assert self.chosen(scores, [8], 5 / 8)[-3:] == [14, 15, 16]

    def test_every_chunk_begins_a_new_window(self):
        scores = [0, 0, 9, 8, 7, 0]
        assert self.chosen(scores, [2, 4], 0.5) == [12, 13, 14]

    def test_budget_is_used_up_and_never_exceeded(self):
        for ratio in (0.0, 0.3, 1.0):
            assert len(self.chosen([3, 1, 2, 0], [4], ratio)) == Budget(ratio).max_rows(4)


def test_numbers_and_uuids_are_distinguished_from_words():
    fragments = importlib.import_module("papers.fragments")
    made = Sample("one", "single", (), "Which?", ("4711",), "exact_match", 4)
    values = {"1234567": "number", "0b9f-1-2-3-4": "UUID", "lantern": None, "well-made": None}
    assert {value: fragments.kind(replace(made, answers=(value,))) for value in values} == values


CHUNKS = (
    "The lantern is old and stands in the first chunk of all.",
    "The host of Brenek is Folddra. Rain falls on the hills and on the fields and on the roads again.",
    "Rain falls on the hills and on the fields and on the roads again. Folddra keeps the compass.",
)
SAMPLE = Sample(
    "one",
    "twohop",
    CHUNKS,
    "What does the host of Brenek keep?",
    ("compass", "Folddra, compass"),
    "exact_match",
    4,
)


class TestSelections:
    @pytest.fixture
    def selected(self, monkeypatch):
        """The module with a tiny model and one prompt."""
        module = importlib.import_module("papers.selected")
        adapter = tiny_adapter()
        monkeypatch.setattr(module, "model", lambda name: adapter)
        cases = [Case(SAMPLE, 512, 0)]
        monkeypatch.setattr(importlib.import_module("recipe_grid").Grid, "cases", lambda *grid: cases)
        return module

    @staticmethod
    def grid(ratio=0.4):
        suite = replace(SUITES["quick"], tasks=("twohop",), ratios=(ratio,))
        variants = {"epic": recipe_named("epic", "isolated"), "random": recipe_named("random")}
        return importlib.import_module("recipe_grid").Grid(lambda: variants, suite, "dev")

    def test_clues_are_names_of_the_question_and_words_of_the_answer(self, selected):
        assert selected.clues(SAMPLE) == {"Brenek", "compass", "Folddra"}
        found = [CHUNKS[2][start:end].strip() for start, end in selected.sentences(CHUNKS[2], {"compass"})]
        assert found == ["Folddra keeps the compass."]

    def test_shares_of_a_selection_of_first_tokens(self, selected, tmp_path):
        first, _ = selected.run(self.grid(0.4), tmp_path, 1)
        assert first.recipe == "epic"
        assert sum(first.tenths) == pytest.approx(1, abs=1e-4)
        assert first.tenths[0] == pytest.approx(
            0.1 / 0.4, abs=0.03
        )  # two fifths of each chunk, from its start
        assert first.tenths[6:] == [0.0] * 4
        assert max(first.stale_tenths) - min(first.stale_tenths) < 0.05
        assert 0 < first.evidence < 1  # one of two sentences is at the start of a chunk, the other at an end
        assert 0 < first.beside < 1

    def test_everything_selected_is_all_the_evidence(self, selected, tmp_path):
        everything, _ = selected.run(self.grid(0.999), tmp_path, 1)
        assert everything.evidence > 0.9
        assert everything.tenths == pytest.approx(everything.stale_tenths, abs=0.05)
        assert everything.fifths == pytest.approx(everything.stale_fifths, abs=0.05)

    def test_a_second_run_computes_only_an_incomplete_line(self, selected, tmp_path, monkeypatch):
        first = selected.run(self.grid(), tmp_path, 1)
        path = tmp_path / "twohop" / "selected.jsonl"
        path.write_bytes(path.read_bytes()[:-9])  # the last line is the last recipe's
        assert selected.run(self.grid(), tmp_path, 1) == first
        monkeypatch.setattr(selected, "prefill", None)
        assert selected.run(self.grid(), tmp_path, 1) == first

    def test_another_ratio_or_version_needs_another_folder(self, selected, tmp_path, monkeypatch):
        selected.run(self.grid(0.4), tmp_path, 1)
        with pytest.raises(InvalidRequest, match="differ in ratios; name another --output"):
            selected.run(self.grid(0.5), tmp_path, 1)
        monkeypatch.setattr(selected, "OUTCOMES_VERSION", 0)
        with pytest.raises(
            InvalidRequest, match="is not a results log of this version of kvweave; name another --output"
        ):
            selected.run(self.grid(0.4), tmp_path, 1)

    def test_gains_are_paired_and_leave_out_prompts_without_evidence(self, selected):
        def one(sample, evidence):
            return selected.Selected("a", sample, "x", [], [], [], [], evidence, 0.0)

        first = [one("p", 0.9), one("q", 0.5), one("r", None)]
        second = [one("q", 0.4), one("p", 0.6), one("r", 0.1)]
        found = selected.gain(first, second, lambda each: each.evidence)
        assert found.value == pytest.approx((0.3 + 0.1) / 2)


class TestCommand:
    @pytest.fixture
    def command(self, monkeypatch, tmp_path):
        """The script with a tiny model and equal scores."""
        module = importlib.import_module("claims")
        monkeypatch.setattr(module, "model", lambda name: tiny_adapter())
        papers = importlib.import_module("papers")
        quick = {
            name: replace(claim, measure=lambda grid, folder, processes: answers(grid, lambda *run: 0.5))
            for name, claim in papers.CLAIMS.items()
            if name in ("neighbours", "fusionrag-parts")
        }
        monkeypatch.setattr(module, "CLAIMS", quick)

        def run(*words):
            argv = [
                "claims.py",
                *words,
                "--work",
                str(tmp_path / "work"),
                "--output",
                str(tmp_path / "claims.json"),
            ]
            monkeypatch.setattr("sys.argv", argv)
            importlib.import_module("experiment").run_script(module.main)
            return json.loads((tmp_path / "claims.json").read_text())

        return run

    def test_claims_are_measured_one_by_one_into_one_file(self, command, capsys, tmp_path):
        assert list(command("fusionrag-parts", "--split", "dev")["claims"]) == ["fusionrag-parts"]
        output = capsys.readouterr()
        assert "fusionrag-parts: 800 prompts × 5 = at most 4,000 runs" in output.err
        both = command("neighbours", "--images", str(tmp_path / "images"))
        assert list(both["claims"]) == ["neighbours", "fusionrag-parts"]  # in the order of the page
        assert both["claims"]["neighbours"]["prompts"] == PROMPTS
        assert [both["claims"][name]["split"] for name in both["claims"]] == ["test", "dev"]
        images = sorted(path.name for path in (tmp_path / "images").iterdir())
        assert images == ["claims-fusionrag-parts.png", "claims-neighbours.png"]
        assert str(tmp_path) not in json.dumps(both)

    def test_another_models_numbers_are_not_mixed_in(self, command, tmp_path):
        command("neighbours")
        path = tmp_path / "claims.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"digest": "another"}))
        with pytest.raises(SystemExit, match="differs in digest"):
            command("neighbours")


class TestPage:
    @pytest.fixture
    def page(self, claims):
        made = importlib.import_module("claims_page").claims_page
        return lambda measured, images=(): made(claims, measured, images)

    def test_a_claim_without_results_has_no_statements(self, page, claims):
        text = page(None, ["claims-heads.png"])
        assert text.count("Not measured yet.") == len(claims)
        assert not re.search(r"\*(Held here|Not seen here|The opposite was seen here|Not judged)\.\*", text)
        assert "![" not in text
        for claim in claims.values():
            assert f"\n## {claim.title}\n" in text

    def test_measured_claims_have_verdicts_numbers_figure_and_command(self, page, claims, setting):
        claim = claims["fusionrag-parts"]
        scores = {
            "full": 1.0,
            "reuse": 0.0,
            "similar chunks alone": 0.2,
            "selection alone": 0.6,
            "fusionrag-alone": 0.5,
        }
        result = numbers_of(claim, setting, lambda recipe, ratio, size: scores[recipe])
        facts = {
            "split": "test",
            "prompts": 200,
            "command": "measure it",
            "date": "2026-01-02",
            "commit": "abc",
            "minutes": 3.2,
        }
        text = page({"claims": {"fusionrag-parts": result | facts}}, ["claims-fusionrag-parts.png"])
        assert "- *Held here.* Selection alone scores higher than plain reuse: +0.600" in text
        assert "- *The opposite was seen here.* Preparation adds to selection: -0.100" in text
        assert "\nFull attention scores 1.000 (1.000 to 1.000), plain reuse 0.000 (0.000 to 0.000).\n" in text
        assert "![FusionRAG component by component](images/claims-fusionrag-parts.png)" in text
        assert "`test` split, at least 200 prompts of each task" in text
        assert "`measure it`, 2026-01-02, commit abc, 3 minutes." in text
        assert "first look" not in text
        assert (
            "| [FusionRAG component by component](#fusionrag-component-by-component) | 3 | 0 | 2 | 0 |"
            in text
        )
        assert text.count("Not measured yet.") == len(claims) - 1
        equal = page({"claims": {"fusionrag-parts": numbers_of(claim, setting, equal_scores(claim)) | facts}})
        assert "plain reuse 0.500 (0.500 to 0.500): there is little to win back" in equal
        few = page({"claims": {"fusionrag-parts": result | facts | {"prompts": 20}}})
        assert "Some figures rest on 20 prompts" in few


class TestStoredPage:
    def test_its_figures_exist(self):
        page = (ROOT / "lab" / "docs" / "claims.md").read_text()
        for name in re.findall(r"\]\(images/(.+?)\)", page):
            assert (ROOT / "lab" / "docs" / "images" / name).exists(), name
