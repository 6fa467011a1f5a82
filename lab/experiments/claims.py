"""Repeats experiments of papers: runs those in `lab/experiments/papers/` and stores their numbers.

    .venv/bin/python lab/experiments/claims.py --work claims --output lab/results/claims.json --images docs/images
    .venv/bin/python lab/experiments/claims.py fragments heads --split dev --samples 20 --work first-look

Without names, all claims run. lab/pages/build.py writes the page lab/docs/claims.md from the results. `--work` is the folder
of outcomes, from which an interrupted command resumes. The output keeps the numbers of claims that are not named; it has
to be about the same model. `--tuned` is the folder that `kvweave train-selector` wrote; without it, the point about
fine-tuning is not measured. The defaults are 200 prompts of each task and 512 tokens of context.
"""

import argparse
import json
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

from experiment import environment, rounded, run_script
from kvweave.errors import InvalidRequest
from kvweave_lab.report import few_prompts_warning
from kvweave_lab.report.figures import LIGHT, rc_params, to_png
from kvweave_lab.results_log import dtype_name
from papers import CLAIMS
from papers.claim import Claim, Setting
from recipe_grid import model


def estimate_runs(claims: Sequence[Claim], setting: Setting) -> list[str]:
    """Return a line for each claim: its prompts, and the recipes and budgets that run on each."""
    lines = []
    for claim in claims:
        grids = claim.grids(setting).values()
        prompts, answers = sum(grid.prompts for grid in grids), sum(grid.answers for grid in grids)
        runs = max(1 + len(grid.candidates()) for grid in grids)
        lines.append(f"{claim.name}: {prompts:,} prompts × {runs} = at most {answers:,} runs")
    return lines


def measure(claim: Claim, setting: Setting, work: Path, processes: int, command: str) -> dict[str, Any]:
    """Return one claim's numbers and how they were measured."""
    start = time.monotonic()
    found = {}
    for part, grid in claim.grids(setting).items():
        folder = work / claim.name / part if part else work / claim.name
        found[part] = claim.measure(grid, folder, processes)
    return {
        **environment(command),
        "split": setting.split,
        "prompts": fewest_prompts(found),
        "minutes": round((time.monotonic() - start) / 60, 1),
        **claim.numbers(found),
    }


def fewest_prompts(found: Mapping[str, Sequence[Any]]) -> int:
    """Return the number of prompts of the task with the fewest."""
    prompts: dict[tuple[str, str], set[str]] = {}
    for part, results in found.items():
        for result in results:
            prompts.setdefault((part, result.task), set()).add(result.sample)
    return min(map(len, prompts.values()))


def read_claims(output: Path, about: Mapping[str, Any]) -> dict[str, Any]:
    """Return the claims that an earlier run wrote; raises InvalidRequest for another model's."""
    if not output.exists():
        return {}
    before = json.loads(output.read_text(encoding="utf-8"))
    changed = [name for name in about if before[name] != about[name]]
    if changed:
        raise InvalidRequest(
            f"{output} differs in {', '.join(changed)}; measure all claims into another file"
        )
    return dict(before["claims"])


def text(result: Mapping[str, Any]) -> str:
    """Return JSON with a line for each row, so that diffs of measurements are readable."""
    return json.dumps(rounded(result), indent=1, ensure_ascii=False) + "\n"


def draw(claims: Mapping[str, Any], images: Path) -> None:
    """Write a figure for each claim."""
    images.mkdir(parents=True, exist_ok=True)
    for name, result in claims.items():
        with matplotlib.rc_context(rc_params(LIGHT)):
            (images / f"claims-{name}.png").write_bytes(to_png(CLAIMS[name].draw(result, LIGHT)))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"claims to measure: {', '.join(CLAIMS)}; default all"
    )
    parser.add_argument("--split", default="test", choices=["dev", "test"])
    parser.add_argument("--samples", type=int, default=200, help="prompts of each task")
    parser.add_argument(
        "--tuned", help="folder that kvweave train-selector wrote; another model needs another --work"
    )
    parser.add_argument("--processes", type=int, default=2, help="each runs one task at a time")
    parser.add_argument(
        "--work",
        type=Path,
        required=True,
        help="folder of outcomes, from which an interrupted command resumes",
    )
    parser.add_argument("--output", type=Path, help="JSON file, the source of the page")
    parser.add_argument("--images", type=Path, help="folder for figures")
    return parser.parse_args()


def main() -> None:
    args = _arguments()
    if unknown := [name for name in args.names if name not in CLAIMS]:
        sys.exit(f"there is no claim {unknown[0]!r}; choose from {', '.join(CLAIMS)}")
    chosen = [CLAIMS[name] for name in args.names or CLAIMS]
    setting = Setting(args.split, args.samples, args.tuned)
    print("\n".join(estimate_runs(chosen, setting)), file=sys.stderr)
    command = shlex.join(["lab/experiments/claims.py", *_without_parents(sys.argv[1:])])
    adapter = model(None)
    about = {
        "model": adapter.fingerprint.name,
        "digest": adapter.fingerprint.digest,
        "dtype": dtype_name(adapter),
    }
    found = read_claims(args.output, about) if args.output else {}
    for claim in chosen:
        found[claim.name] = measure(claim, setting, args.work, args.processes, command)
        if args.output:
            ordered = {name: found[name] for name in CLAIMS if name in found}
            args.output.write_text(text({**about, "claims": ordered}), encoding="utf-8")
        for verdict in claim.verdicts(found[claim.name]):
            print(f"{claim.name}: {verdict.held} {verdict.statement}")
    if args.images:
        draw(found, args.images)
    print(few_prompts_warning(min(found[claim.name]["prompts"] for claim in chosen)) or "", file=sys.stderr)


def _without_parents(words: Sequence[str]) -> list[str]:
    """Return the command with absolute paths reduced to names."""
    return [Path(word).name if word.startswith("/") else word for word in words]


if __name__ == "__main__":
    run_script(main)
