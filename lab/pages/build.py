"""Write the generated parts of the documentation: README's table, docs/reference, lab/docs and the model cards.

    .venv/bin/python lab/pages/build.py           write
    .venv/bin/python lab/pages/build.py --check   exit 1 if something is out of date

Numbers come from lab/results/, recipes from METHODS and their docstrings. A part without results says that it was not measured.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from answers_page import (
    JUDGING_FILES,
    all_rules,
    judged_questions,
    lookups,
    matched_questions,
    preemption,
    repeated_questions,
    systems_summary,
    whole_systems,
)
from ceilings_page import reader_predictions
from decoding_page import FILES as DECODING_FILES
from decoding_page import QUALITY as DECODING_QUALITY
from decoding_page import dense_scores
from decoding_page import parts as decoding_parts
from evaluation_page import replayed, scores_of_all_tasks, scores_of_the_model, second_run, written_requests
from faults_page import counted_faults
from fuzz_page import fuzz_counts, fuzz_findings
from methods_page import methods_page, tasks_page
from natural_page import FILES as NATURAL_FILES
from natural_page import parts as natural_parts
from prediction_page import FUNNEL_FILES, predicted_questions, prediction_funnels
from real_models_page import FILES as REAL_MODEL_FILES
from real_models_page import KEPT, kept_image, kept_runs
from real_models_page import parts as real_model_parts
from reference import reference_pages
from selection_page import selection_page
from serving_page import FILES as SERVING_FILES
from serving_page import parts as serving_parts
from store_page import counted_reuse, draw_sizes, fetched, fewer_bits, loaded, overlapped, sizes
from targets import evaluation_targets
from ttft_page import FILES as TTFT_FILES
from ttft_page import parts as ttft_parts
from user_tables import kept_of_full_prefill, recipe_scores
from vllm_page import FILES as VLLM_FILES
from vllm_page import parts as vllm_parts

from kvweave.recipes.methods import METHODS
from kvweave.recipes.names import UNCALIBRATED

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "lab" / "results"
CARD = ROOT / "src" / "kvweave" / "models" / "reference" / "README.md"
LONGER_CARD = ROOT / "lab" / "src" / "kvweave_lab" / "models" / "longer" / "README.md"

EARLIER = ", with the weights that the reference model had then"


def results(name: str) -> dict[str, Any] | None:
    """Return a file of results, or None if the file does not exist.

    Dates say if the reference model had other weights than now. Recorded commands have today's paths. The note on a commit, for
    example that it is not on main, follows the commit.
    """
    found = _read(name)
    if found is not None and "commit_note" in found:
        found["commit"] += f" ({found['commit_note']})"
    shipped = (_read("quality.json") or {}).get("digest")
    if found is not None and shipped is not None:
        parts = [found, found.get("about", {}), *found.get("claims", {}).values()]
        if any(part.get("digest", shipped) != shipped for part in parts):
            for part in parts:
                if "date" in part:
                    part["date"] += EARLIER
    return found


def _read(name: str) -> Any:
    path = RESULTS / name
    return _with_current_paths(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None


MOVED = re.compile(r"(?<![\w/.])(benchmarks|training)/")
CURRENT_FOLDERS = {"benchmarks": "lab/experiments/", "training": "lab/training/"}
CURRENT_SCRIPTS = {"giving_way.py": "preemption_delay.py"}
CURRENT_OPTIONS = {r" --kv-memory \S+": "", r" --answers(?= --|$)": " --answers 24"}
"""Options of `kvweave eval natural` that recorded commands have in an earlier form."""


def _with_current_paths(value: Any) -> Any:
    """Return results whose commands name the current paths of scripts and folders."""
    if isinstance(value, dict):
        return {
            name: _current_commands(part) if name in ("command", "evaluations") else _with_current_paths(part)
            for name, part in value.items()
        }
    return [_with_current_paths(part) for part in value] if isinstance(value, list) else value


def _current_commands(commands: str | list[str]) -> str | list[str]:
    if isinstance(commands, list):
        return [_current_command(command) for command in commands]
    return _current_command(commands)


def _current_command(command: str) -> str:
    command = MOVED.sub(lambda found: CURRENT_FOLDERS[found[1]], command)
    for earlier, current in CURRENT_SCRIPTS.items():
        command = command.replace(f"/{earlier}", f"/{current}")
    if "eval natural" in command:
        for earlier, current in CURRENT_OPTIONS.items():
            command = re.sub(earlier, current, command)
    return command


def figure(runs: Mapping[str, list[Any]]) -> str:
    """Return README's table, for the default recipe; `runs` as of `kept_runs`."""
    return kept_of_full_prefill(runs, UNCALIBRATED)


def quality_of_the_methods() -> dict[str, Any] | None:
    """Return the scores of all recipes, or of the baselines if only these were measured."""
    return results("methods.json") or results("quality.json")


def papers_claims(images: Iterable[str]) -> str:
    sys.path.append(str(ROOT / "lab" / "experiments"))  # the claims are scripts, no package
    from claims_page import claims_page

    from papers import CLAIMS

    return claims_page(CLAIMS, results("claims.json"), images, lambda name: results(f"{name}.json"))


def with_parts(path: Path, **parts: str) -> str:
    """Return the page with the text between each part's markers replaced."""
    text = path.read_text(encoding="utf-8")
    for name, part in parts.items():
        pattern = re.compile(rf"(<!-- {name}:begin -->\n).*?(<!-- {name}:end -->)", re.S)
        assert len(pattern.findall(text)) == 1, f"{path} must have the markers of {name} once"
        text = pattern.sub(lambda found, part=part: f"{found[1]}{part}\n{found[2]}", text)
    return text


def draw_kept(runs: dict[str, list[Any]], folder: Path) -> None:
    """Draw the figure of each model's evaluation by budget."""
    if runs:
        from kvweave_lab.eval.natural.plots import kept_plot

        for model, own in runs.items():
            (folder / kept_image(model)).write_bytes(kept_plot(model, own))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    docs = ROOT / "lab" / "docs"
    evaluation, store, answers = docs / "evaluation.md", docs / "store.md", docs / "answer-cache.md"
    guide = ROOT / "docs" / "guide" / "recipes.md"
    measured, images = (quality_of_the_methods(), [path.name for path in (docs / "images").glob("*.png")])
    parity = results("parity.json")
    assert parity is not None
    kept = sorted(path.name for path in RESULTS.glob(KEPT))
    real_models = {name: _read(name) for name in (*REAL_MODEL_FILES, *kept)}
    pages = {
        ROOT / "README.md": with_parts(ROOT / "README.md", figure=figure(kept_runs(real_models))),
        guide: with_parts(
            guide, scores=recipe_scores(results("neutral.json"), results("selection_cost.json"))
        ),
        **{ROOT / "docs" / "reference" / name: text for name, text in reference_pages(parity).items()},
        docs / "methods.md": methods_page(
            METHODS,
            results("neutral.json"),
            results("permuted.json"),
            measured,
            results("selection_cost.json"),
            images,
        ),
        docs / "methods-by-task.md": tasks_page(measured),
        docs / "claims.md": papers_claims(images),
        docs / "selection.md": selection_page(results("selection.json"), images),
        evaluation: with_parts(
            evaluation,
            quality=scores_of_all_tasks(results("quality.json")),
            targets=evaluation_targets(
                results("quality.json"), results("selection.json"), results("second_run.json")
            ),
            replay=replayed(results("replay.json")),
        ),
        store: with_parts(
            store,
            load=loaded(results("store.json")),
            tiers=fetched(results("tiers.json")),
            layers=overlapped(results("layerwise.json")),
            bits=fewer_bits(results("storage.json")),
            reuse=counted_reuse(results("reuse.json")),
            sizes=sizes(results("store_size.json")),
        ),
        answers: with_parts(
            answers,
            lookalikes=matched_questions(results("lookalikes.json"), "images/lookalikes.png"),
            people=matched_questions(results("lookalikes_people.json"), "images/lookalikes-people.png"),
            rules=all_rules(results("lookalikes_rules.json"), map(results, JUDGING_FILES)),
            judging=judged_questions(map(results, JUDGING_FILES)),
            funnel=prediction_funnels(map(results, FUNNEL_FILES)),
            prediction=predicted_questions(results("prediction.json")),
            reader=reader_predictions(results("reader_predictions.json")),
            lookups=lookups(results("answer_lookup.json")),
            repeated=repeated_questions(results("repeated_questions.json")),
            **{"preemption-delay": preemption(results("preemption_delay.json"))},
        ),
        docs / "faults.md": with_parts(docs / "faults.md", faults=counted_faults(results("faults.json"))),
        docs / "ttft.md": with_parts(
            docs / "ttft.md", **ttft_parts({name: results(name) for name in TTFT_FILES})
        ),
        docs / "decoding.md": with_parts(
            docs / "decoding.md", **decoding_parts({name: results(name) for name in DECODING_FILES})
        ),
        docs / "real-models.md": with_parts(docs / "real-models.md", **real_model_parts(real_models)),
        docs / "natural.md": with_parts(
            docs / "natural.md", **natural_parts({name: results(name) for name in NATURAL_FILES})
        ),
        docs / "serving.md": with_parts(
            docs / "serving.md", **serving_parts({name: results(name) for name in SERVING_FILES})
        ),
        docs / "vllm.md": with_parts(
            docs / "vllm.md", **vllm_parts({name: results(name) for name in VLLM_FILES})
        ),
        docs / "fuzz.md": with_parts(
            docs / "fuzz.md",
            counts=fuzz_counts(results("fuzz.json")),
            findings=fuzz_findings(results("fuzz.json")),
        ),
        docs / "personas.md": with_parts(
            docs / "personas.md",
            summary=systems_summary(results("personas.json")),
            personas=whole_systems(results("personas.json")),
        ),
        ROOT / "lab" / "training" / "README.md": with_parts(
            ROOT / "lab" / "training" / "README.md", **{"second-run": second_run(results("second_run.json"))}
        ),
        CARD: with_parts(
            CARD,
            quality=scores_of_the_model(results("quality.json")),
            requests=written_requests(results("abilities.json")),
        ),
        LONGER_CARD: with_parts(LONGER_CARD, longer=dense_scores(results(DECODING_QUALITY))),
    }
    stale = [
        path for path, text in pages.items() if not path.exists() or path.read_text(encoding="utf-8") != text
    ]
    if args.check and stale:
        sys.exit(f"out of date: {', '.join(path.name for path in stale)}; run `make docs`")
    for path in stale:
        path.write_text(pages[path], encoding="utf-8")
    if not args.check:
        draw_kept(kept_runs(real_models), docs / "images")
        if (grown := results("store_size.json")) is not None:
            draw_sizes(grown, docs / "images")


if __name__ == "__main__":
    main()
