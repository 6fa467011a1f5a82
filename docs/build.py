"""Writes the generated parts of the documentation: README tables and figure, docs/families.md.

    .venv/bin/python docs/build.py           write
    .venv/bin/python docs/build.py --check   exit 1 if something is out of date

Numbers come from benchmarks/results/, recipes from METHODS and their docstrings.
"""

import argparse
import inspect
import json
import re
import sys
from pathlib import Path

from kvweave.recipes.methods import METHODS

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def figure() -> str:
    row = json.loads((RESULTS / "ttft.json").read_text(encoding="utf-8"))
    low, high = sorted(1 / ratio for ratio in row["reuse_over_full_range"])
    return (
        f"**{1 / row['reuse_over_full']:.0f}× faster to the first token** ({low:.0f}–{high:.0f}× over {row['repeats']} interleaved "
        f"repeats): {row['reuse_s']:.2f} s instead of {row['full_s']:.2f} s for a prompt of {row['prompt_tokens']:,} tokens whose chunks are "
        f"stored, in the shape of {row['shape']} ({row['dtype']}, random weights, {row['threads']} CPU threads, warm). "
        f"`{row['command']}`, {row['date']}; the baseline is the faster of transformers' own prefill and ours. No token is "
        "recomputed here; see Limits for what that costs."
    )


def recipes() -> str:
    lines = ["| recipe | what it does | paper | relations |", "|---|---|---|---|"]
    for name, make in METHODS.items():
        doc = inspect.getdoc(make) or ""
        headings = dict(re.findall(r"^(Paper|Idea|Relations): (.*?)(?=\n\w[\w ]*:|\Z)", doc, re.M | re.S))
        cells = (doc.split("\n")[0], headings["Paper"], headings["Relations"])
        lines.append(f"| `{name}` | " + " | ".join(" ".join(cell.split()) for cell in cells) + " |")
    return "\n".join(lines)


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


def with_part(text: str, name: str, part: str) -> str:
    pattern = re.compile(rf"(<!-- {name}:begin -->\n).*?(<!-- {name}:end -->)", re.S)
    return pattern.sub(lambda found: f"{found[1]}{part}\n{found[2]}", text)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    pages = {
        ROOT / "README.md": with_part(with_part(readme, "figure", figure()), "recipes", recipes()),
        ROOT / "docs" / "families.md": families(),
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
