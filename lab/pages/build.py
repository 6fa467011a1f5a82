"""Writes the generated parts of the documentation: tables and figures in README, docs, methods and the model card.

    .venv/bin/python lab/pages/build.py           write
    .venv/bin/python lab/pages/build.py --check   exit 1 if something is out of date

Numbers come from lab/results/, recipes from METHODS and their docstrings. What has no results yet says so.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterable
from inspect import signature
from pathlib import Path
from typing import Any

from answers_part import told_apart
from baselines import BASELINES, baseline_cells, lengths, prompts, score
from decoding_page import FILES as DECODING_FILES
from decoding_page import QUALITY as DECODING_QUALITY
from decoding_page import dense_scores
from decoding_page import parts as decoding_parts
from evaluation_targets import repeated, targets
from methods_page import headings, methods_page, tasks_page
from personas_page import whole_systems
from selection_page import selection_page
from store_page import counted_reuse, fetched, fewer_bits, loaded, overlapped
from tables import NOT_MEASURED, between, folded, header, row
from ttft_page import FILES as TTFT_FILES
from ttft_page import LIMITS as TTFT_LIMITS
from ttft_page import headline
from ttft_page import parts as ttft_parts

from kvweave.config import Config
from kvweave.recipes.methods import METHODS
from kvweave_lab.eval.summary import OVERALL

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "lab" / "results"
CARD, LONGER_CARD = (
    ROOT / "src" / "kvweave" / "models" / name / "README.md" for name in ("reference", "longer")
)

EARLIER = ", with the weights that the reference model had then"


def results(name: str) -> dict[str, Any] | None:
    """What a benchmark left, or None if it was not run; its dates say so where other weights shipped then."""
    found = _kept(name)
    present = (_kept("quality.json") or {}).get("digest")
    if found is not None and present is not None:
        parts = [found, found.get("about", {}), *found.get("claims", {}).values()]
        if any(part.get("digest", present) != present for part in parts):
            for part in parts:
                if "date" in part:
                    part["date"] += EARLIER
    return found


def _kept(name: str) -> dict[str, Any] | None:
    path = RESULTS / name
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def figure() -> str:
    """For README: the recipe that requests get when they name none."""
    recipe = signature(Config).parameters["recipe"].default
    measured = [told for told in map(results, TTFT_LIMITS) if told is not None]
    return headline(measured, results("all_tasks.json"), recipe, METHODS[recipe]().ratio)


def recipes() -> str:
    lines = ["| recipe | what it does | paper | relations |", "|---|---|---|---|"]
    for name, make in METHODS.items():
        said = headings(make)
        lines.append(row(f"`{name}`", said[""], said["Paper"], said["Relations"]))
    return "\n".join(lines)


def quality_of_the_methods() -> dict[str, Any] | None:
    """What every recipe scored; the baselines alone where no more was measured."""
    return results("methods.json") or results("quality.json")


def what_the_papers_saw(images: Iterable[str]) -> str:
    sys.path.append(str(ROOT / "lab" / "experiments"))  # where the claims are: scripts, no package
    from claims_page import claims_page

    from papers import CLAIMS

    return claims_page(CLAIMS, results("claims.json"), images)


def families() -> str:
    result = json.loads((RESULTS / "parity.json").read_text(encoding="utf-8"))
    versions = result["versions"]
    lines = [
        "# Model families",
        "",
        "Tiny models with random weights, float32, against plain transformers: the largest difference of the last logits when all rows are",
        "recomputed over a canvas full of garbage, and when 70 of 100 tokens come from stored KV. `tests/models/test_parity.py` also",
        "checks selected rows over stale KV against the library's attention with explicit masks, bit-identical placement, and generation.",
        "",
        f"`{result['command']}`, torch {versions['torch']}, transformers {versions['transformers']}. Logits are of magnitude "
        f"{min(f['largest_logit'] for f in result['families']):.1f} to {max(f['largest_logit'] for f in result['families']):.1f}.",
        "",
        "| family | class | recompute all | prefix reuse |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {f['family']} | {f['model_class']} | {f['recompute_all']:.1e} | {f['prefix_reuse']:.1e} |"
        for f in result["families"]
    ]
    lines += [
        "",
        "## Refused",
        "",
        "With an error that names the reason:",
        "",
        "| family | because of |",
        "|---|---|",
    ]
    lines += [f"| {name} | {reason} |" for name, reason in result["refused"].items()]
    return "\n".join(lines) + "\n"


def scores_of_all_tasks() -> str:
    """For lab/docs/evaluation.md."""
    result = results("quality.json")
    if result is None:
        return NOT_MEASURED
    made = result["reference"]
    cells = baseline_cells(result)
    places = dict.fromkeys((length, task) for length, task, _ in cells)
    lines = [
        f"Mean scores with 95 % intervals on the `{result['split']}` split, {prompts(cells)} for each task and length, chunks of up to "
        f"{result['chunk_tokens']} tokens ({result['dtype']}, {result['device']}). Naive, direct and reuse recompute nothing. "
        f"The model was trained on {made['tokens'] / 1e6:.0f} million tokens in {made['hours']:.1f} hours ({made['steps']:,} steps, "
        f"{made['device']}); its weights are {made['bytes'] / 1e6:.1f} MB.",
        "",
        *header("context", "task", *BASELINES),
    ]
    for length, task in places:
        named = "**mean**" if task == OVERALL else f"`{task}`"
        lines.append(row(f"{length:,}", named, *(score(cells, length, task, recipe) for recipe in BASELINES)))
    commands = [*result["evaluations"], result["command"]]
    lines += ["", *folded(commands, f"{result['date']}, {result['minutes']:.0f} minutes")]
    return "\n".join(lines)


def scores_of_the_model() -> str:
    """For the model card: what full attention and plain reuse score, without intervals."""
    result = results("quality.json")
    if result is None:
        return NOT_MEASURED
    cells = baseline_cells(result)
    tasks = dict.fromkeys(task for _, task, _ in cells)
    columns = [(length, recipe) for length in lengths(cells) for recipe in ("full", "reuse")]
    lines = [
        f"Scores on the `{result['split']}` split, {prompts(cells)} for each task and length; intervals and the commands "
        "stand in `lab/docs/evaluation.md`.",
        "",
        *header("task", *(f"{recipe}, {length:,} tokens" for length, recipe in columns)),
    ]
    for task in sorted(tasks, key=lambda name: name == OVERALL):
        numbers = (cells.get((length, task, recipe)) for length, recipe in columns)
        named = "**mean**" if task == OVERALL else f"`{task}`"
        lines.append(row(named, *("–" if found is None else f"{found['score']:.2f}" for found in numbers)))
    return "\n".join(lines)


def second_run() -> str:
    """For lab/training/README.md: another training beside the one that ships, on the same prompts."""
    result = results("second_run.json")
    if result is None:
        return NOT_MEASURED
    rows, made = result["rows"], result["training"]
    outside = [f"`{one['task']}` at {one['context_tokens']:,}" for one in rows if not repeated(one)]
    lines = [
        f"Scores under full attention on `test` with 95 % intervals, the same {min(one['prompts'] for one in rows)} prompts of each task, of what ships and "
        f"of settling with seed {made['seed']} ({made['steps']:,} steps, {made['hours']:.1f} hours). In {len(rows) - len(outside)} of {len(rows)} the second score "
        "lies in the first one's interval" + (f"; in {', '.join(outside)} it does not." if outside else "."),
        "",
        *header("context", "task", "ships", "second run"),
    ]
    for one in rows:
        told = (between(*one[name]) for name in ("first", "second"))
        lines.append(row(f"{one['context_tokens']:,}", f"`{one['task']}`", *told))
    return "\n".join([*lines, "", f"`{result['command']}`, {result['date']}."])


def written_requests() -> str:
    """For the model card: what becomes of the questions and key content that the model writes."""
    result = results("abilities.json")
    if result is None:
        return NOT_MEASURED
    said = {
        "ask": {
            "about_notes": "names something of the notes",
            "answered": "is answered right, asked over them",
        },
        "sum_up": {"facts_kept": "facts kept", "true_to_notes": "sentences that stand in the notes"},
        "ask_like": {
            "about_notes": "names something of the notes",
            "another": "and not what the earlier ones do",
            "answered": "is answered right",
        },
    }
    requests = {"ask": "a question", "sum_up": "key content", "ask_like": "the next question"}
    lines = [
        f"What it writes behind notes of {result['context_tokens']} tokens (`{result['split']}` split), mean shares over kinds of notes with 95 % intervals:",
        "",
        *header("written", "prompts", "", "share"),
    ]
    for name, columns in said.items():
        one = result["requests"][name]
        for column, words in columns.items():
            share = one["shares"][column]
            lines.append(row(requests[name], f"{one['prompts']:,}", words, between(**share)))
    return "\n".join([*lines, "", f"`{result['command']}`, {result['date']}."])


def scores_of_the_recipes() -> str:
    """For README: the mean over tasks."""
    result = results("quality.json")
    if result is None:
        return f"Answer quality: {NOT_MEASURED.lower()}"
    cells = baseline_cells(result)
    tasks = {task for _, task, _ in cells} - {OVERALL}
    lines = [
        f"Answer quality on the shipped reference model, mean score over {len(tasks)} tasks with its 95 % interval (`{result['split']}` "
        f"split, {prompts(cells)} for each, {result['date']}; [every task](lab/docs/evaluation.md#what-the-reference-model-scores)):",
        "",
        *header("context", *(f"`{recipe}`" for recipe in BASELINES)),
    ]
    for length in lengths(cells):
        lines.append(
            row(f"{length:,} tokens", *(score(cells, length, OVERALL, recipe) for recipe in BASELINES))
        )
    return "\n".join(lines)


def replayed() -> str:
    """For lab/docs/evaluation.md."""
    result = results("replay.json")
    if result is None:
        return NOT_MEASURED
    where = f"{result['threads']} CPU threads" if result["device"] == "cpu" else result["device"]
    lines = [
        f"The mean traces of the evaluation on the shape of {result['shape']} ({result['dtype']}, random weights, {where}), all counts "
        f"times {result['scale']:g}: median of {result['repeats']} repeats, interleaved with full prefill of as many tokens.",
        "",
        *header(
            "context", "recipe", "ratio", "tokens", "computed", "first token", "full prefill", "share of it"
        ),
    ]
    for one in result["rows"]:
        trace, scale = one["trace"], result["scale"]
        lines.append(
            row(
                f"{one['context_tokens']:,}",
                f"`{one['recipe']}`",
                f"{one['ratio']:g}",
                f"{scale * (trace['exact'] + trace['stale'] + trace['fresh']):,.0f}",
                f"{scale * (trace['recomputed'] + trace['fresh']):,.0f}",
                f"{one['ttft_s']:.3f} s",
                f"{one['full_ttft_s']:.3f} s",
                between(one["ttft_over_full"], *one["ttft_over_full_range"]),
            )
        )
    return "\n".join([*lines, "", *folded([*result["evaluations"], result["command"]], result["date"])])


def giving_way() -> str:
    """For lab/docs/prediction.md."""
    result = results("giving_way.json")
    if result is None:
        return NOT_MEASURED
    low, high = result["blocks_over_at_once_range"]
    return (
        f"{result['requests']} requests at random moments of prefill ({result['prompt_tokens']:,} tokens) and decoding, in the shape of "
        f"{result['shape']} on {result['threads']} CPU threads: the model was free after {result['median_s'] * 1e3:.0f} ms (median), "
        f"{result['p95_s'] * 1e3:.0f} ms (95 %), {result['longest_s'] * 1e3:.0f} ms (longest). A prefill in blocks of "
        f"{result['block_tokens']} takes {result['blocks_over_at_once']:.2f} times ({low:.2f}–{high:.2f}) as long as one at once. "
        f"`{result['command']}`, {result['date']}."
    )


def with_parts(path: Path, **parts: str) -> str:
    """The page with what stands between each part's markers replaced."""
    text = path.read_text(encoding="utf-8")
    for name, part in parts.items():
        pattern = re.compile(rf"(<!-- {name}:begin -->\n).*?(<!-- {name}:end -->)", re.S)
        assert len(pattern.findall(text)) == 1, f"{path} must have the markers of {name} once"
        text = pattern.sub(lambda found, part=part: f"{found[1]}{part}\n{found[2]}", text)
    return text


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    docs = ROOT / "lab" / "docs"
    evaluation, store, prediction = docs / "evaluation.md", docs / "store.md", docs / "prediction.md"
    measured, images = (
        quality_of_the_methods(),
        [path.name for path in (docs / "images").glob("*.png")],
    )
    pages = {
        ROOT / "README.md": with_parts(
            ROOT / "README.md", figure=figure(), recipes=recipes(), quality=scores_of_the_recipes()
        ),
        docs / "families.md": families(),
        docs / "methods.md": methods_page(
            METHODS,
            measured,
            results("all_tasks.json"),
            results("all_tasks_nearest.json"),
            results("selection_cost.json"),
            images,
        ),
        docs / "methods-by-task.md": tasks_page(measured),
        docs / "claims.md": what_the_papers_saw(images),
        docs / "selection.md": selection_page(results("selection.json"), images),
        evaluation: with_parts(
            evaluation,
            quality=scores_of_all_tasks(),
            targets=targets(results("quality.json"), results("selection.json"), results("second_run.json")),
            replay=replayed(),
        ),
        store: with_parts(
            store,
            load=loaded(results("store.json")),
            tiers=fetched(results("tiers.json")),
            layers=overlapped(results("layerwise.json")),
            bits=fewer_bits(results("storage.json")),
            reuse=counted_reuse(results("reuse.json")),
        ),
        docs / "answers.md": with_parts(
            docs / "answers.md", lookalikes=told_apart(results("lookalikes.json"))
        ),
        prediction: with_parts(prediction, **{"giving-way": giving_way()}),
        docs / "ttft.md": with_parts(
            docs / "ttft.md", **ttft_parts({name: results(name) for name in TTFT_FILES})
        ),
        docs / "decoding.md": with_parts(
            docs / "decoding.md", **decoding_parts({name: results(name) for name in DECODING_FILES})
        ),
        docs / "personas.md": with_parts(
            docs / "personas.md", personas=whole_systems(results("personas.json"))
        ),
        ROOT / "lab" / "training" / "README.md": with_parts(
            ROOT / "lab" / "training" / "README.md", **{"second-run": second_run()}
        ),
        CARD: with_parts(CARD, quality=scores_of_the_model(), requests=written_requests()),
        LONGER_CARD: with_parts(LONGER_CARD, longer=dense_scores(results(DECODING_QUALITY))),
    }
    stale = [
        path for path, text in pages.items() if not path.exists() or path.read_text(encoding="utf-8") != text
    ]
    if args.check and stale:
        sys.exit(f"out of date: {', '.join(path.name for path in stale)}; run `make docs`")
    for path in stale:
        path.write_text(pages[path], encoding="utf-8")


if __name__ == "__main__":
    main()
