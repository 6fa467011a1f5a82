"""Generated pages are up to date, links have targets, and marked examples run as they are."""

import importlib.util
import json
import os
import re
import sys
from pathlib import Path

import pytest

import kvweave
from kvweave.cli.app import OWN
from kvweave.models.loading import load_model
from kvweave.recipes.methods import METHODS
from support.processes import run_program

ROOT = Path(__file__).parents[3]


def test_generated_parts_are_up_to_date():
    done = run_program([ROOT / "lab" / "pages" / "build.py", "--check"])
    assert done.returncode == 0, done.stderr


PAGES = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "lab/*.md", "lab/docs/*.md", "integrations/**/*.md")
    for path in ROOT.glob(pattern)
)
MARKED = re.compile(r"<!-- tested -->\n```python\n(.*?)```", re.S)
PAGES_WITH_EXAMPLES = [  # those of the integrations run in one process (integrations/tests)
    page for page in PAGES if "integrations" not in page.parts and MARKED.search(page.read_text())
]


HOMES = ("KVWEAVE_HOME", "HOME", "XDG_DATA_HOME")


def test_the_first_example_runs_as_a_program(tmp_path):
    home = dict.fromkeys(HOMES, str(tmp_path))
    code = "\n".join(MARKED.findall((ROOT / "README.md").read_text()))
    done = run_program(["-c", code], os.environ | home, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("walnut\n")


@pytest.mark.parametrize(
    "page", [page for page in PAGES_WITH_EXAMPLES if page.stem != "README"], ids=lambda page: page.stem
)
def test_marked_examples_run(page, tmp_path, monkeypatch):
    """In this process, with the models and the KV that it has already; the first example shows that a new one can."""
    for name in HOMES:
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.chdir(tmp_path)
    code = "\n".join(MARKED.findall(page.read_text()))
    exec(compile(code, str(page), "exec"), {"__name__": "__main__"})


def test_pages_for_users_have_examples_that_run():
    assert {"README", "getting-started", "own-retriever", "add-a-recipe"} <= {
        page.stem for page in PAGES_WITH_EXAMPLES
    }


def test_the_reference_lists_every_command():
    page = (ROOT / "docs" / "reference" / "command-line.md").read_text()
    assert all(f"`kvweave {name}" in page for name in OWN)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_have_targets(page):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, heading = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        if heading:
            assert heading in anchors(target), link


def anchors(page):
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_exported_name_is_there():
    for name in kvweave.__all__:
        assert getattr(kvweave, name) is not None


def test_every_method_has_the_fixed_headings():
    for name, make in METHODS.items():
        for heading in ("Paper", "Idea", "Parameters", "Differs from the paper", "Relations"):
            assert re.search(rf"^\s+{heading}: \S", make.__doc__ or "", re.M), (name, heading)
        paper = re.search(r"Paper: (.*?)\n    Idea:", make.__doc__ or "", re.S)
        assert paper is not None
        assert re.search(r"arXiv\s+\d{4}\.\d{5}|^none[;,]", paper[1]), name


@pytest.mark.parametrize("page", ["ARCHITECTURE.md", "docs/dev/architecture.md", "docs/dev/add-a-recipe.md"])
def test_python_files_named_in_the_architecture_exist(page):
    text = (ROOT / page).read_text()
    for path in re.findall(r"`((?:src/|tests/|lab/)?[a-z_]+/[a-z_/]+\.py)`", text):
        assert (ROOT / path).exists() or (ROOT / "src" / "kvweave" / path).exists(), path


class TestFiguresOfTheEvaluation:
    @pytest.fixture
    def build(self, tmp_path, monkeypatch):
        """lab/pages/build.py, reading results from a folder that is empty."""
        monkeypatch.syspath_prepend(ROOT / "lab" / "pages")
        spec = importlib.util.spec_from_file_location("docs_build", ROOT / "lab" / "pages" / "build.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        monkeypatch.setattr(module, "RESULTS", tmp_path)
        return module

    @staticmethod
    def row(task, length, recipe, ratio, score, samples=200):
        interval = [score - 0.05, score + 0.04]
        names = ("task", "context_tokens", "recipe", "ratio", "score", "score_interval", "samples")
        return dict(zip(names, (task, length, recipe, ratio, score, interval, samples), strict=True))

    @pytest.fixture
    def quality(self, tmp_path):
        """Two lengths, of which one has both tasks; naive ran on one task only, a selective recipe at two ratios."""
        rows = [
            self.row("coref", 512, "full", 1.0, 0.9),
            self.row("coref", 512, "naive", 0.0, 0.2),
            self.row("coref", 512, "reuse", 0.0, 0.5),
            self.row("coref", 512, "reuse", 1.0, 0.91),
            self.row("coref", 512, "some", 0.0, 0.51),
            self.row("coref", 512, "some", 1.0, 0.92),
            self.row("single", 512, "full", 1.0, 0.8),
            self.row("single", 512, "reuse", 0.0, 0.7),
            self.row("overall", 512, "full", 1.0, 0.85, 400),
            self.row("overall", 512, "naive", 0.0, 0.21),
            self.row("overall", 512, "reuse", 0.0, 0.6, 400),
            self.row("coref", 2048, "full", 1.0, 0.4, 1000),
            self.row("overall", 2048, "full", 1.0, 0.4, 1000),
        ]
        quality = {
            "command": "gather a b",
            "evaluations": ["evaluate a", "evaluate b"],
            "date": "2026-01-02",
            "split": "test",
            "chunk_tokens": 96,
            "dtype": "float32",
            "device": "cpu",
            "minutes": 61.4,
            "reference": {
                "tokens": 2_600_000,
                "hours": 1.25,
                "steps": 4321,
                "device": "CPU",
                "bytes": 9_960_000,
            },
            "rows": rows,
        }
        (tmp_path / "quality.json").write_text(json.dumps(quality))

    @pytest.mark.parametrize("told", [{"digest": "b"}, {"digest": "a"}, {"about": {"digest": "b"}}, {}])
    def test_dates_of_results_mark_those_of_earlier_weights(self, build, tmp_path, told):
        (tmp_path / "quality.json").write_text(json.dumps({"digest": "a", "date": "2026-02-02"}))
        about = {"date": "2026-01-01", **told.get("about", {})}
        claims = {"one": {"date": "2026-01-03"}}
        (tmp_path / "other.json").write_text(json.dumps({**told, "about": about, "claims": claims}))
        found = build.results("other.json")
        end = build.EARLIER if "b" in (told.get("digest"), about.get("digest")) else ""
        assert found["about"]["date"] == "2026-01-01" + end
        assert found["claims"]["one"]["date"] == "2026-01-03" + end
        assert build.results("quality.json")["date"] == "2026-02-02"

    def test_recorded_commands_have_todays_paths(self, build, tmp_path):
        commands = {
            "command": "benchmarks/quality.py a",
            "evaluations": ["kvweave eval --model training/runs/b"],
        }
        (tmp_path / "other.json").write_text(json.dumps({"about": commands, "parts": [commands]}))
        found = build.results("other.json")
        today = {
            "command": "lab/experiments/quality.py a",
            "evaluations": ["kvweave eval --model lab/training/runs/b"],
        }
        assert found == {"about": today, "parts": [today]}

    def test_recorded_evaluations_have_todays_options(self, build, tmp_path):
        recorded = "kvweave eval natural --kv-memory 6GB --answers --recipe reuse --answers"
        (tmp_path / "other.json").write_text(json.dumps({"command": recorded}))
        today = "kvweave eval natural --answers 24 --recipe reuse --answers 24"
        assert build.results("other.json") == {"command": today}

    def test_quality_against_time_has_a_table_for_each_run_sorted_by_time(self, build, tmp_path):
        def row(recipe, ratio, time, **more):
            numbers = {
                "answer_kl": 0.01,
                "same_first": 0.9,
                "agreed": 0.95,
                "same_answer": 0.75,
                "kept_right": None,
                "contains": 0.5,
            }
            own = {"time": time} | numbers
            own |= {f"{name}_interval": value and [value, value] for name, value in own.items()}
            fixed = {
                "context_tokens": 1024,
                "prompts": 4,
                "coverage": None,
                "offline_passes": 1.5,
                "bytes_per_token": 1e4,
            }
            return fixed | own | {"recipe": recipe, "ratio": ratio} | more

        unprepared = {"offline_passes": None, "bytes_per_token": None}
        rows = [row("full", 1.0, 1.0, **unprepared), row("weave", 0.3, 0.4), row("reuse", 0.0, 0.1)]
        about = {
            "command": "kvweave eval natural",
            "machine": "a machine",
            "threads": 2,
            "date": "2026-01-01",
        }
        about |= {"dtype": "bfloat16", "chunk_tokens": 160}
        (tmp_path / "kept_a-model_1024.json").write_text(json.dumps({"about": about, "rows": rows}))
        found = dict.fromkeys(build.REAL_MODEL_FILES) | {
            "kept_a-model_1024.json": build.results("kept_a-model_1024.json")
        }
        lines = build.real_model_parts(found)["kept"].split("\n")
        shown = [line for line in lines if line.startswith("| ")]
        assert [line.split(" | ")[0] for line in shown] == ["| recipe", "| reuse", "| weave", "| full"]
        assert shown[1].endswith(
            "| 0.010 (0.010–0.010) | 90% (90%–90%) | 95% (95%–95%) | 75% (75%–75%) | – | 50% (50%–50%) |"
        )
        assert lines[0] == "![answers of a-model kept against time](images/kept-a-model.png)"
        build.draw_kept(build.kept_runs(found), tmp_path)
        assert (tmp_path / "kept-a-model.png").read_bytes().startswith(b"\x89PNG")
        assert build.real_model_parts(dict.fromkeys(build.REAL_MODEL_FILES))["kept"] == "Not measured yet."

    def test_a_page_without_results_is_marked(self, build):
        for part in (build.scores_of_all_tasks, build.scores_of_the_model, build.replayed):
            assert part(None) == "Not measured yet."
        assert build.figure({}) == "Not measured yet."

    def test_every_task_has_its_intervals_and_conditions(self, build, quality):
        said, _, *table = build.scores_of_all_tasks(build.results("quality.json")).split("\n")
        table, (_, summary, _, *commands) = table[: table.index("")], table[table.index("") :]
        assert (
            "`test` split, 200 to 1,000 prompts for each task and length, chunks of up to 96 tokens" in said
        )
        assert "3 million tokens in 1.2 hours (4,321 steps, CPU); its weights are 10.0 MB" in said
        assert table == [
            "| context | task | full | naive | direct | reuse |",
            "|---|---|---|---|---|---|",
            "| 512 | `coref` | 0.900 (0.850–0.940) | 0.200 (0.150–0.240) | – | 0.500 (0.450–0.540) |",
            "| 512 | `single` | 0.800 (0.750–0.840) | – | – | 0.700 (0.650–0.740) |",
            # naive's mean is not over what the others' are over
            "| 512 | **mean** | 0.850 (0.800–0.890) | – | – | 0.600 (0.550–0.640) |",
            "| 2,048 | `coref` | 0.400 (0.350–0.440) | – | – | – |",
            "| 2,048 | **mean** | 0.400 (0.350–0.440) | – | – | – |",
        ]
        assert summary == "<details><summary>3 commands, 2026-01-02, 61 minutes</summary>"
        assert commands == ["```", "evaluate a", "evaluate b", "gather a b", "```", "", "</details>"]

    def test_the_model_card_has_the_scores_in_short(self, build, quality):
        _, _, *table = build.scores_of_the_model(build.results("quality.json")).split("\n")
        assert table == [
            "| task | full, 512 tokens | reuse, 512 tokens | full, 2,048 tokens | reuse, 2,048 tokens |",
            "|---|---|---|---|---|",
            "| `coref` | 0.90 | 0.50 | 0.40 | – |",
            "| `single` | 0.80 | 0.70 | – | – |",
            "| **mean** | 0.85 | 0.60 | 0.40 | – |",
        ]

    def test_the_readme_shows_what_is_kept_with_its_conditions(self, build):
        def one(recipe, ratio, time, kept, agreed, kl):
            values = {"time": time, "kept_right": kept, "agreed": agreed, "answer_kl": kl, "contains": 0.5}
            return values | {"recipe": recipe, "ratio": ratio, "prompts": 40, "context_tokens": 2048}

        rows = [
            one("full", 1.0, 1.0, 1.0, 1.0, 0.0),
            one("reuse", 0.0, 0.07, 0.3, 0.85, 0.3),
            one("weave-shifted", 0.1, 0.26, 0.9, 0.94, 0.06),
            one("weave-shifted", 0.2, 0.37, 0.95, 0.955, 0.04),
            one("woven-int8+weave-shifted", 0.2, 0.38, 1.0, 0.95, 0.04),
            one("weave", 0.1, 0.26, 0.4, 0.9, 0.01),
            one("woven+prophetkv", 0.2, 0.26, 0.4, 0.9, 0.01),
            one("prophetkv", 0.2, 0.36, 0.5, 0.88, 0.2),
            one("epic", 0.15, 0.2, 0.7, 0.8, 0.25),
        ]
        about = {"chunk_tokens": 512, "dtype": "bfloat16", "threads": 2, "machine": "x86_64, AVX512"}
        short, run = ({"about": about, "rows": each} for each in (rows[:1], rows))
        runs = {"gemma-3-270m": [run], "qwen2.5-coder-1.5b": [short, run]}
        lines = build.figure(runs).split("\n")
        assert [line.split("**")[1] for line in lines if "tokens in chunks" in line] == [
            "Qwen2.5-Coder 1.5B Instruct",
            "Gemma 3 270M",
        ]
        assert (
            "2,048 tokens in chunks of 512, bfloat16, 40 questions, 8-bit KV in the last column |" in lines[2]
        )
        assert lines[2].endswith("| 0.07 | 0.36 | **0.38** |")
        assert lines[3] == "|  | its 20 right answers that stay right | 6 | 10 (`prophetkv`) | 20 |"
        assert lines[4] == "|  | tokens of its answers | 85.0% | 88.0% | 95.0% |"
        assert "20% of the reused tokens" in lines[-1]
        assert "2 CPU threads (x86_64, AVX512)" in lines[-1]

    def test_replayed_times_have_a_row_for_each_recipe_and_ratio(self, build, tmp_path):
        trace = {"exact": 100.0, "stale": 400.5, "recomputed": 0.0, "fresh": 20.0, "decoded": 5.0}
        times = {
            "ttft_s": 0.05,
            "full_ttft_s": 0.5,
            "ttft_over_full": 0.1,
            "ttft_over_full_range": [0.09, 0.12],
        }
        rows = [
            {"context_tokens": 2048, "recipe": recipe, "ratio": ratio, "trace": trace, **times}
            for recipe, ratio in (("reuse", 0.0), ("some", 0.1))
        ]
        circumstances = {"threads": 2, "date": "2026-01-02", "command": "replay a", "device": "cpu"}
        replay = {"shape": "some shape", "dtype": "bfloat16", "scale": 2.0, "repeats": 3, "rows": rows}
        replay["evaluations"] = ["evaluate a"]
        (tmp_path / "replay.json").write_text(json.dumps(replay | circumstances))
        said, _, _, _, *lines = build.replayed(build.results("replay.json")).split("\n")
        table = lines[:2]
        assert (
            "shape of some shape (bfloat16, random weights, 2 CPU threads), with all token counts multiplied by 2"
            in said
        )
        assert table == [
            f"| 2,048 | {recipe} | 1,041 | 40 | 0.050 s | 0.500 s | 0.100 (0.090–0.120) |"
            for recipe in ("`reuse` | 0", "`some` | 0.1")
        ]
        assert lines[3:] == [
            "<details><summary>2 commands, 2026-01-02</summary>",
            *("", "```", "evaluate a", "replay a", "```", "", "</details>"),
        ]

    def test_targets_of_the_models_are_beside_their_results(self, build):
        targets = sys.modules["targets"].evaluation_targets
        assert targets(None, None) == "Not measured yet."
        scores = {
            "coref": (0.95, 0.5),
            "contradiction": (0.9, 0.6),
            "vartrack": (0.85, 0.6),
            "order": (0.84, 0.8),
        }
        scores |= dict.fromkeys(("single", "multikey", "twohop", "multivalue", "multiquery"), (0.96, 0.96))
        scores |= dict.fromkeys(("commonwords", "frequentwords"), (0.5, 0.5))
        rows = [
            self.row(task, 512, recipe, ratio, score) | {"agreement": 1.0, "kl": 0.0}
            for task, (full, reuse) in scores.items()
            for recipe, ratio, score in (("full", 1.0, full), ("reuse", 0.0, reuse), ("reuse", 1.0, full))
        ]
        quality = {"rows": rows, "reference": {"bytes": 20_000_001}}
        auxiliary = {
            "kl_difference": {"value": -2, "high": -1.5},
            "jaccard_difference": {"value": 0.1, "low": 0.05},
        }
        told = targets(quality, {"auxiliary": auxiliary, "context_tokens": 517.2}).splitlines()[2:]
        assert [line.split(" | ")[-2] for line in told] == [
            *("yes", "**no**", "**no**", "yes"),
            *("yes", "**no**", "yes"),
        ]
        assert told[0].endswith("| 0.960, 0.960, 0.960, 0.950 |")
        assert told[2].endswith("| 8 of 11 |")
        assert told[3].endswith("| 0.450, 0.000, 0.250, 0.300, 0.040 |")
        assert told[4].endswith("| `reuse`: every answer equal, KL below 1e-06 |")
        assert len(targets(quality, None).splitlines()) == len(told) + 1
        rows[-1]["kl"] = 1e-3
        second = {
            "rows": [
                {"context_tokens": 512, "first": (0.5, 0.4, 0.6), "second": (score, 0, 1)}
                for score in (0.4, 0.7)
            ]
        }
        told = targets(quality, None, second).splitlines()
        assert "| **no** | `reuse`: not every answer equal |" in told[-3]
        assert "| 512 | **no** | 1 of 2, its last stage" in told[-1]

    def test_a_row_that_misses_its_target_is_named(self, build):
        rows = [
            {
                "context_tokens": tokens,
                "recipe": recipe,
                "ratio": 0.15,
                "kv_from": kv_from,
                "efficiency": efficiency,
                "speedup": 6.0,
            }
            for tokens, recipe, kv_from, efficiency in (
                (4096, "weave", "memory", 0.86),
                (8192, "weave", "memory", 0.91),
                (8192, "prophetkv", "memory", 0.88),
                (8192, "prophetkv", "disk", 0.5),
                (8192, "cacheblend", "memory", 0.5),
            )
        ]
        told = sys.modules["targets"].ttft_targets([None, {"rows": rows}]).splitlines()
        assert told[3].endswith("| 0.86 to 0.86 | 1 of 1 |  |")
        assert told[4].endswith("| 0.880 to 0.910 | 1 of 2 | `prophetkv` at 0.15 over 8,192: 0.880 |")
        assert told[6].endswith("| not measured | 0 of 0 |  |")

    def test_missed_entries_and_reads_of_decoding_are_in_the_table(self, build):
        rows = [
            {
                "task": "story",
                "strategy": strategy,
                "decode_tokens": tokens,
                "budget": 0.15,
                "dense_score": 0.8,
                "pages_read_per_token": pages,
                "reads_per_token": pages / 2,
                "mean_run_entries": 4.0,
                "hit_rate": 0.5,
                "ahead_rate": 0.25,
                "resident_bytes": 2e6,
                "bytes_per_token": 4e3,
                "written_bytes_per_token": 1e3,
                "split_bytes_per_token": split_bytes,
                "moved_bytes_per_token": split_bytes / 10,
                "cluster_variance": None,
                "clusters": None,
            }
            | {
                name: value
                for named in ("recall", "attended_mass", "output_error", "score", "score_of_dense")
                for name, value in ((named, found), (f"{named}_interval", [found, found]))
            }
            | {"dense_score_interval": [0.8, 0.8]}
            for tokens, strategy, found, pages, split_bytes in (
                (512, "dynakv", 0.9, 10.0, 100.0),
                (1024, "dense", 1.0, 0.0, 0.0),
                (1024, "dynakv", 0.7, 30.0, 100.0),
                (1024, "static", 0.5, 40.0, 0.0),
                (1024, "entries", 1.0, 120.0, 0.0),
                (1024, "dynakv/immediate-split", 0.7, 30.0, 250.0),
                (1024, "dynakv/packed", 0.7, 30.0, 30_000.0),
            )
        ]
        about = {"texts": 1, "split": "dev", "seeds": [0], "prompt_tokens": 64, "resident_bytes": 1e6}
        about |= {"model": "m", "dtype": "float32", "command": "c", "date": "d", "retrieved_after_steps": [1]}
        returns = [{"strategy": "dynakv", "updated": [0.5], "any": [0.25]}]
        page = sys.modules["decoding_page"]
        beside = [
            {"task": "story", "strategy": "static", "decode_tokens": tokens}
            | {"missed": missed, "missed_interval": [0.4, 0.9], "pages": None, "reads": None}
            for tokens, missed in ((1024, 0.6), (512, 0.5))
        ]
        told = page.strategies({"rows": rows, "about": about, "returns": returns, "beside": beside})
        assert (
            "| 512 | `static` | 0.500 (0.400–0.900) |  |  |\n| 1,024 | `static` | 0.600 (0.400–0.900) |  |  |"
            in told
        )
        assert told.index("| 512 | `dynakv`") < told.index("| 1,024 | `dynakv`")
        assert "| `dynakv` | updated | 50% |" in told
        ablated = page.ablated({"rows": rows, "about": about})
        assert "| 512 |" not in ablated
        assert (
            "`immediate-split` reads for splits 2.50 times what `dynakv` does; `immediate-split` reads in all 1.00 times"
            " what `dynakv` does; `packed` moves 300.00 times what `dynakv` does." in ablated
        )
        none_read = [
            row | {"split_bytes_per_token": 0.0} if row["strategy"] == "dynakv" else row for row in rows
        ]
        told = page.ablated({"rows": none_read, "about": about})
        assert "`immediate-split` reads for splits 0.2 kB a token where `dynakv` does not;" in told
        assert page.costs([None] * len(page.COSTS)) == "Not measured yet."

    def test_a_page_without_its_markers_is_noticed(self, build, tmp_path):
        page = tmp_path / "page.md"
        page.write_text("a\n<!-- one:begin -->\nold\n<!-- one:end -->\nz\n")
        assert (
            build.with_parts(page, one=r"new \1") == "a\n<!-- one:begin -->\nnew \\1\n<!-- one:end -->\nz\n"
        )
        with pytest.raises(AssertionError, match="markers of two once"):
            build.with_parts(page, two="new")

    def test_every_method_has_a_section_whether_measured_or_not(self, build):
        page = build.methods_page(METHODS, None, None, None, None, [])
        assert page.count("Not measured yet.") == 6  # by task, bytes, permuted, matrix, fixed tasks, costs
        sections = dict(re.findall(r"^### `(.+?)`\n\n(.*?)(?=^### |\Z)", page, re.M | re.S))
        assert list(sections) == list(METHODS)
        for name, section in sections.items():
            said = [
                f"- **{heading}**: " for heading in ("Paper", "Idea", "Parameters", "Relations", "Measured")
            ]
            assert [heading for heading in said if heading not in section] == [], name
        assert "- **Prepared**: `similar`" in sections["fusionrag"]
        assert build.tasks_page(None).endswith("Not measured yet.\n")

    def test_the_methods_page_has_scores_matrix_and_costs(self, build, quality, tmp_path):
        result = json.loads((tmp_path / "quality.json").read_text())
        rows = [
            {"normalised": None, "normalised_interval": None, "coverage": None, "rows": 50.0, **row}
            for row in result["rows"]
        ]
        rows += [
            {**rows[-3], "recipe": "reuse", "ratio": 0.0, "normalised": 0.0, "normalised_interval": [0, 0]},
            {**rows[-3], "recipe": "reuse", "ratio": None, "coverage": 0.4, "score": 0.7},
            {**rows[-3], "recipe": "similar+reuse", "ratio": 0.0},
            {**rows[-3], "recipe": "naive", "ratio": 0.1},
        ]
        cell = {"score": 0.5, "score_interval": [0.4, 0.6], "normalised": None, "normalised_interval": None}
        cells = [
            {"selector": "reuse", "preparation": "isolated", **cell, "gain": None, "gain_interval": None},
            {
                "selector": "reuse",
                "preparation": "similar",
                **cell,
                "gain": 0.1,
                "gain_interval": [0.05, 0.2],
            },
        ]
        matrix = {"context_tokens": 512, "ratio": 0.15, "selectors": ["reuse"], "cells": cells}
        matrices = [{**matrix, "preparations": ["isolated", "similar"]}]
        cost = {
            "threads": 2,
            "device": "cpu",
            "prompt_tokens": 4096,
            "full_s": 9.0,
            "shape": "some shape",
            "dtype": "bfloat16",
            "chunk_tokens": 512,
            "ratio": 0.15,
            "repeats": 5,
            "left_out": {"x": "why"},
            "command": "cost",
            "date": "2026-01-02",
            "rows": [
                {
                    "recipe": "reuse",
                    "select_over_full": 0.031,
                    "select_over_full_range": [0.03, 0.04],
                    "ttft_over_full": 0.2,
                    "ttft_over_full_range": [0.19, 0.21],
                }
            ],
        }
        images = ["methods-matrix-0.15-512.png", "other.png"]
        compared = [
            {"context_tokens": 512, "recipe": recipe, "ratio": 0.1, "gain": gain, "gain_interval": interval}
            for recipe, gain, interval in (
                ("reuse", 0.2, [0.1, 0.3]),
                ("similar+reuse", -0.2, [-0.3, -0.1]),
                ("naive", 0.0, [-0.1, 0.1]),
            )
        ]
        measured = result | {"rows": rows, "matrices": matrices, "beside_own": compared}
        tasks = dict.fromkeys(row["task"] for row in rows if row["task"] != "overall")
        stored = {"reuse": 8192.0, "naive": 8192.0, "similar+reuse": 16384.0, "weave": 16388.0}
        costs = {
            "costs": [
                {"recipe": name, "passes": 1.0 + (size > 9000), "bytes_per_token": size}
                for name, size in stored.items()
            ],
            "completed": {
                "command": "completes",
                "chunks": 31,
                "without_context": dict.fromkeys(tasks, 0.25),
            },
        }
        page = build.methods_page(METHODS, measured | costs, None, measured, cost, images)
        assert re.search(
            r"\| `naive` \| 10% \| 8,192 \| 1\.00 \| .* \| \+0\.000 \(-0\.100–\+0\.100\) \|", page
        )
        assert "| no context | – | 0.250 |" in page
        assert (
            "10%, at equal stored bytes: `weave` scores higher than 0 of 1 other recipes, lower than `similar+reuse`."
        ) in page
        assert (
            "512 tokens of context, 10%: `weave` scores higher than 1 of 3 other recipes, lower than `similar+reuse`;"
            " there is no significant difference from `naive`."
        ) in page
        assert re.search(r"\| `reuse` \| 0% \|.* 0\.\d{3} \|", page)  # a column per task
        assert "| `reuse` | 3.1% (3.0%–4.0%) | 20.0% (19.0%–21.0%) |" in page
        assert "`x` was left out: why" in page
        assert "| `reuse` | 0.4 | 0.700 (0.550–0.640) | 50 |" in page  # a coverage, and the tokens it came to
        assert page.count("| `similar+reuse`") == 1  # by bytes; otherwise its place is the matrix
        line = (
            "| `reuse` | 0.500 (0.400–0.600)<br>n – | 0.500 (0.400–0.600)<br>n –<br>+0.100 (+0.050–+0.200) |"
        )
        assert line in page
        assert "- `similar`: 1 of 1 selectors score higher, 0 lower." in page
        assert "![methods matrix 0.15 512](images/methods-matrix-0.15-512.png)" in page
        assert "other.png" not in page
        assert "selecting costs 3.1% (3.0%–4.0%) of full prefill" in page

    def test_scores_against_the_order_of_the_text_stand_beside_those_in_it(self, build):
        def row(task, recipe, score, lost=(0.0, 0.0)):
            ratio = 1.0 if recipe == "full" else 0.0
            own = {"task": task, "recipe": recipe, "ratio": ratio, "context_tokens": 512, "samples": 40}
            return own | {"score": score, "score_interval": [0.1, 0.9], "lost_interval": list(lost)}

        both = ("coref", "vartrack")
        recipes = {"full": (0.3, (0, 0)), "reuse": (0.5, (-0.3, -0.1)), "naive": (0.2, (0.05, 0.2))}
        neutral = {"rows": [row(f"{task}-mixed", "full", 0.75) for task in both]}
        neutral["rows"] += [row("coref-mixed", "reuse", 0.5)]
        permuted = {
            "rows": [
                row(task, name, score)
                for name, (score, _) in recipes.items()
                for task in ("coref-permuted", "vartrack-permuted", "overall")
            ],
            "against": [row("overall", name, *found) | {"samples": 31} for name, found in recipes.items()],
            "costs": [{"recipe": "reuse", "passes": 1.0, "bytes_per_token": 8192.0}],
            "completed": {"command": "c", "without_context": {f"{task}-permuted": 0.1 for task in both}},
            "evaluations": ["e"],
            "command": "q",
            "date": "d",
        }
        text = "\n".join(sys.modules["neutral_tables"].against_the_text(permuted, neutral))
        assert "In 9 of the prompts one of the two chunks was not retrieved; the 31 others" in text
        assert (
            "| `full` | 100% | 0.300 | 0.300 | 0.300 (0.100–0.900) | 0.750 | 0.300 (0.100–0.900) | – | – |"
            in text
        )
        assert (
            "| 0.500 (0.100–0.900) | – | 0.500 (0.100–0.900) | 8,192 | 1.00 |" in text
        )  # one task has no score
        assert "| no context | – | 0.100 | 0.100 | 0.100 |" in text
        assert (
            "Of 2 recipes, 1 score significantly higher (`reuse`), 1 lower (`naive`), and 0 do not differ."
            in text
        )
        assert sys.modules["neutral_tables"].against_the_text(None, neutral)[0] == "Not measured yet."

    def test_figures_on_the_methods_page_are_there(self):
        page = (ROOT / "lab" / "docs" / "methods.md").read_text()
        for name in re.findall(r"\]\(images/(.+?)\)", page):
            assert (ROOT / "lab" / "docs" / "images" / name).exists(), name

    def test_stored_scores_are_those_of_the_shipped_weights(self):
        path = ROOT / "lab" / "results" / "quality.json"
        if not path.exists():
            pytest.skip("the shipped model was not measured yet")
        quality = json.loads(path.read_text())
        assert quality["digest"] == load_model(dtype=quality["dtype"]).fingerprint.digest
