"""What the papers saw, measured here: runs the experiments of `lab/experiments/papers/` and keeps their numbers.

    .venv/bin/python lab/experiments/claims.py --work claims --output lab/results/claims.json --images docs/images
    .venv/bin/python lab/experiments/claims.py fragments heads --split dev --samples 20 --work first-look

Without names, all of them; the page lab/docs/claims.md is then made by lab/pages/build.py. `--work` is the folder of outcomes:
interrupted, the same command goes on where it stopped. Claims that are not named keep what the output says of them,
unless it is about another model. `--tuned` is what `kvweave train-selector` left; without it, the point about
fine-tuning is not measured. 200 prompts of each task and 512 tokens of context.
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

from kvweave.errors import InvalidRequest
from kvweave_lab.eval.report import first_look
from kvweave_lab.eval.report.sheet import png
from kvweave_lab.eval.report.style import LIGHT, settings
from kvweave_lab.eval.subject import dtype_of
from measured import circumstances, started
from papers import CLAIMS
from papers.claim import Claim, Setting
from side_by_side import model

DIGITS = 6


def estimated(claims: Sequence[Claim], setting: Setting) -> list[str]:
    """A line for each claim: how many prompts it has, and under how many recipes and budgets each runs."""
    lines = []
    for claim in claims:
        grids = claim.grids(setting).values()
        prompts, answers = sum(grid.prompts for grid in grids), sum(grid.answers for grid in grids)
        runs = max(1 + len(grid.candidates()) for grid in grids)
        lines.append(f"{claim.name}: {prompts:,} prompts × {runs} = at most {answers:,} runs")
    return lines


def measured(claim: Claim, setting: Setting, work: Path, processes: int, command: str) -> dict[str, Any]:
    """One claim's numbers and how they were come by."""
    began = time.monotonic()
    found = {}
    for part, grid in claim.grids(setting).items():
        folder = work / claim.name / part if part else work / claim.name
        found[part] = claim.measure(grid, folder, processes)
    return {
        **circumstances(command),
        "split": setting.split,
        "prompts": least(found),
        "minutes": round((time.monotonic() - began) / 60, 1),
        **claim.figures(found),
    }


def least(found: Mapping[str, Sequence[Any]]) -> int:
    """Prompts behind the task that has the fewest."""
    prompts: dict[tuple[str, str], set[str]] = {}
    for part, ones in found.items():
        for one in ones:
            prompts.setdefault((part, one.task), set()).add(one.sample)
    return min(map(len, prompts.values()))


def kept(output: Path, about: Mapping[str, Any]) -> dict[str, Any]:
    """What an earlier run left of claims that this one does not name; raises InvalidRequest for another model's."""
    if not output.exists():
        return {}
    before = json.loads(output.read_text(encoding="utf-8"))
    changed = [name for name in about if before[name] != about[name]]
    if changed:
        raise InvalidRequest(
            f"{output} differs in {', '.join(changed)}; measure all claims anew, into another file"
        )
    return dict(before["claims"])


def text(result: Mapping[str, Any]) -> str:
    """JSON with a line for each row, so that a new measurement reads well as a diff."""
    rounded = json.loads(json.dumps(result), parse_float=lambda number: round(float(number), DIGITS))
    return json.dumps(rounded, indent=1, ensure_ascii=False) + "\n"


def draw(claims: Mapping[str, Any], images: Path) -> None:
    """A figure for each claim."""
    images.mkdir(parents=True, exist_ok=True)
    for name, result in claims.items():
        with matplotlib.rc_context(settings(LIGHT)):
            (images / f"claims-{name}.png").write_bytes(png(CLAIMS[name].draw(result, LIGHT)))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(CLAIMS)}; all without one")
    parser.add_argument("--split", default="test", choices=["dev", "test"])
    parser.add_argument("--samples", type=int, default=200, help="prompts of each task")
    parser.add_argument(
        "--tuned", help="folder that kvweave train-selector left; trained anew, it needs another --work"
    )
    parser.add_argument("--processes", type=int, default=2, help="each takes a task at a time")
    parser.add_argument(
        "--work", type=Path, required=True, help="folder of outcomes; goes on where it stopped"
    )
    parser.add_argument("--output", type=Path, help="JSON file that the page is made from")
    parser.add_argument("--images", type=Path, help="folder for figures")
    return parser.parse_args()


def main() -> None:
    args = _arguments()
    if unknown := [name for name in args.names if name not in CLAIMS]:
        sys.exit(f"there is no claim {unknown[0]!r}; choose from {', '.join(CLAIMS)}")
    chosen = [CLAIMS[name] for name in args.names or CLAIMS]
    setting = Setting(args.split, args.samples, args.tuned)
    print("\n".join(estimated(chosen, setting)), file=sys.stderr)
    command = shlex.join(["lab/experiments/claims.py", *_said(sys.argv[1:])])
    adapter = model(None)
    about = {
        "model": adapter.fingerprint.name,
        "digest": adapter.fingerprint.digest,
        "dtype": dtype_of(adapter),
    }
    found = kept(args.output, about) if args.output else {}
    for claim in chosen:
        found[claim.name] = measured(claim, setting, args.work, args.processes, command)
        if args.output:
            ordered = {name: found[name] for name in CLAIMS if name in found}
            args.output.write_text(text({**about, "claims": ordered}), encoding="utf-8")
        for verdict in claim.verdicts(found[claim.name]):
            print(f"{claim.name}: {verdict.held} {verdict.said}")
    if args.images:
        draw(found, args.images)
    print(first_look(min(found[claim.name]["prompts"] for claim in chosen)) or "", file=sys.stderr)


def _said(words: Sequence[str]) -> list[str]:
    """The command without where folders lie, which means nothing to others."""
    return [Path(word).name if word.startswith("/") else word for word in words]


if __name__ == "__main__":
    started(main)
