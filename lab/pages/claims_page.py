"""lab/docs/claims.md: what the papers saw, and whether it was seen here.

Reads no files: `build.py` hands over what `lab/experiments/claims.py` left, None if it was not run.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tables import NOT_MEASURED

from kvweave_lab.eval.report import first_look
from papers.claim import Claim, Verdict, room

_WORDS = {True: "Held here", False: "The opposite was seen here", None: "Not seen here"}

Claims = Mapping[str, Claim]
Result = Mapping[str, Any]


def claims_page(claims: Claims, measured: Result | None, images: Iterable[str]) -> str:
    """The page; `images` are the names of files in docs/images."""
    found, drawn = (measured or {}).get("claims", {}), set(images)
    lines = [
        "# What the papers saw, seen here or not",
        "",
        "Each claim is an experiment of `lab/experiments/papers/`; this page is written by `lab/pages/build.py` from their numbers. *Held here*"
        " and *the opposite was seen here* are said where the 95 % interval allows nothing else, *not seen here* where it leaves both"
        " open. Differences are paired, the same prompts under both recipes, unless they are called unpaired. The model that answers is the one that ships with kvweave;"
        " papers measured large models on long contexts, so that what is not seen here may still be true there.",
        "",
        *_overview(claims, found),
        "",
    ]
    for name, claim in claims.items():
        lines += _section(
            claim, found.get(name), f"claims-{name}.png" if f"claims-{name}.png" in drawn else None
        )
    return "\n".join(lines)


def _overview(claims: Claims, found: Result) -> list[str]:
    """How many points of each claim held."""
    lines = ["| claim | held | not seen | the opposite |", "|---|---|---|---|"]
    for name, claim in claims.items():
        counts: tuple[str, ...] = ("–", "–", "–")
        if name in found:
            verdicts = [verdict.held for verdict in claim.verdicts(found[name])]
            counts = tuple(str(verdicts.count(held)) for held in (True, None, False))
        lines.append(f"| [{claim.title}](#{_anchor(claim.title)}) | {' | '.join(counts)} |")
    return lines


def _section(claim: Claim, result: Result | None, image: str | None) -> list[str]:
    lines = [
        f"## {claim.title}",
        "",
        f"**{claim.paper}**: {claim.says}",
        "",
        f"**Here**: {claim.tried}",
        "",
    ]
    if result is None:
        return [*lines, NOT_MEASURED, "", f"`lab/experiments/claims.py {claim.name} --work claims`", ""]
    lines += [*_said(claim.verdicts(result)), "", *(line for said in room(result) for line in (said, ""))]
    if image:
        lines += [f"![{claim.title}](images/{image})", ""]
    return [*lines, *claim.table(result), "", _how(result), ""]


def _said(verdicts: Sequence[Verdict]) -> list[str]:
    return [f"- *{_WORDS[held]}.* {said}" for held, said in verdicts]


def _how(result: Result) -> str:
    """Where the numbers come from, and how much they can carry."""
    warning = first_look(result["prompts"])
    return (
        f"`{result['split']}` split, {result['prompts']} prompts and more of each task, 512 tokens of context; intervals are 95 %, by bootstrap over"
        f" prompts. `{result['command']}`, {result['date']}, commit {result['commit']}, {result['minutes']:.0f} minutes."
        + (f" {warning}" if warning else "")
    )


def _anchor(title: str) -> str:
    return title.lower().replace(" ", "-")
