"""lab/docs/claims.md: the claims of the papers, and whether they hold here.

It reads no files: `build.py` passes the results of `lab/experiments/claims.py`, or None if it did not run.
"""

from collections.abc import Iterable, Mapping, Sequence

import figures_cacheclip
import figures_dynakv
import figures_fusionrag
import figures_percache
import figures_prophetkv
from figure_rows import Figure, Results
from markdown_parts import NOT_MEASURED, Result, header, row

from kvweave_lab.report import few_prompts_warning
from papers.claim import Claim, Verdict, baseline_lines

_WORDS = {True: "Held here", False: "The opposite was seen here", None: "Not seen here"}

Claims = Mapping[str, Claim]

PAPERS: Mapping[str, Sequence[Figure]] = {
    "FusionRAG": figures_fusionrag.ROWS,
    "ProphetKV": figures_prophetkv.ROWS,
    "CacheClip": figures_cacheclip.ROWS,
    "PerCache": figures_percache.ROWS,
    "DynaKV": figures_dynakv.ROWS,
}
"""Every figure and table of the papers with a result."""


def claims_page(
    claims: Claims, measured: Result | None, images: Iterable[str], results: Results | None = None
) -> str:
    """Return the text of lab/docs/claims.md.

    Args:
        claims: the claims by name.
        measured: the results of the claims.
        images: names of the files in lab/docs/images.
        results: returns a file of lab/results by its name. Without it, the page has no tables of figures.
    """
    found, drawn = (measured or {}).get("claims", {}), set(images)
    lines = [
        "# Claims of the papers, checked here",
        "",
        *_what_follows(claims, found),
        "Each claim is an experiment of `lab/experiments/papers/`; `lab/pages/build.py` writes this page from the results. *Held here*"
        " and *the opposite was seen here* mean that the whole 95 % interval agrees with the claim or contradicts it; *not seen here* means"
        " that the interval allows both. Differences are paired (the same prompts with both recipes) unless they are called unpaired. The model"
        " is the one that ships with kvweave. The papers measured large models on long contexts, so a claim that is not seen here may still"
        " be true there.",
        "",
        "The command of each claim is below its table. `lab/experiments/claims.py NAME --work claims` repeats one claim.",
        "",
        *_overview(claims, found),
        "",
        *(_figures(results) if results else []),
    ]
    for name, claim in claims.items():
        lines += _section(
            claim, found.get(name), f"claims-{name}.png" if f"claims-{name}.png" in drawn else None
        )
    return "\n".join(lines)


def _what_follows(claims: Claims, found: Result) -> list[str]:
    """Return how many points held, and the claims whose points held or were contradicted."""
    verdicts = [
        (claim, verdict)
        for name, claim in claims.items()
        if name in found
        for verdict in claim.verdicts(found[name])
    ]
    if not verdicts:
        return []
    count = {held: sum(verdict.held is held for _, verdict in verdicts) for held in _WORDS}
    lines = [
        f"Of {len(verdicts)} points, {count[True]} held here, {count[None]} were not seen, and of {count[False]} the opposite was seen. "
        "Context of 512 tokens, the shipped 10 MB model, generated prompts."
    ]
    for held in (True, False):
        titles = dict.fromkeys(claim.title for claim, verdict in verdicts if verdict.held is held)
        named = "; ".join(
            f"[{title}](#{_anchor(title)}) ({sum(c.title == title and v.held is held for c, v in verdicts)})"
            for title in titles
        )
        if named:
            lines.append(f"{_WORDS[held]}, with the number of points: {named}.")
    lines.append(
        "A point that was not seen stays open. Where a section says that plain reuse loses little, these tasks could not have shown the "
        "claim."
    )
    return [*(f"- {line}" for line in lines), ""]


def _overview(claims: Claims, found: Result) -> list[str]:
    """Return a table with the number of points of each claim that held."""
    lines = ["| claim | held | not seen | the opposite |", "|---|---|---|---|"]
    for name, claim in claims.items():
        counts: tuple[str, ...] = ("–", "–", "–")
        if name in found:
            verdicts = [verdict.held for verdict in claim.verdicts(found[name])]
            counts = tuple(str(verdicts.count(held)) for held in (True, None, False))
        lines.append(f"| [{claim.title}](#{_anchor(claim.title)}) | {' | '.join(counts)} |")
    return lines


def _figures(results: Results) -> list[str]:
    """Return a table for each paper, with a row for each of its figures and tables."""
    lines = [
        "## Figure by figure",
        "",
        "These tables have every figure and table of the five papers that shows a result, on the paper's own task where it was measured. If a"
        " figure makes several points, the column *here* counts them. *Not seen*"
        " also means that there is a gain but a smaller one than the paper's. If two scores have no paired interval, their own intervals are"
        " compared, which is more cautious. Times have no intervals. *Not measured* means that it could be measured here and was not.",
        "",
    ]
    for paper, figures in PAPERS.items():
        lines += [
            f"### {paper}",
            "",
            *header("figure", "claim", "here", "model and length", "numbers or reason"),
        ]
        lines += [row(*_cells(figure, results)) for figure in figures]
        lines.append("")
    return lines


def _cells(figure: Figure, results: Results) -> tuple[str, ...]:
    if isinstance(figure.seen, str):
        return figure.name, figure.says, figure.unmeasured, "–", figure.seen
    seen = figure.seen(results)
    if seen is None:
        return figure.name, figure.says, "not measured yet", "–", "–"
    label = seen.label or {True: "held", False: "the opposite", None: "not seen"}[seen.held]
    return figure.name, figure.says, label, seen.where, seen.numbers


def _section(claim: Claim, result: Result | None, image: str | None) -> list[str]:
    lines = [
        f"## {claim.title}",
        "",
        f"**{claim.paper}**: {claim.finding}",
        "",
        f"**Here**: {claim.setup}",
        "",
    ]
    if result is None:
        return [*lines, NOT_MEASURED, "", f"`lab/experiments/claims.py {claim.name} --work claims`", ""]
    lines += [
        *_points(claim.verdicts(result)),
        "",
        *(line for text in baseline_lines(result) for line in (text, "")),
    ]
    if image:
        lines += [f"![{claim.title}](images/{image})", ""]
    return [*lines, *claim.table(result), "", _source(result), ""]


def _points(verdicts: Sequence[Verdict]) -> list[str]:
    return [f"- *{_WORDS[held]}.* {text}" for held, text in verdicts]


def _source(result: Result) -> str:
    """Return the conditions and the command of a result, with a warning if there are few prompts."""
    warning = few_prompts_warning(result["prompts"])
    return (
        f"`{result['split']}` split, at least {result['prompts']} prompts of each task, 512 tokens of context; intervals are 95 %, by bootstrap over"
        f" prompts. `{result['command']}`, {result['date']}, commit {result['commit']}, {result['minutes']:.0f} minutes."
        + (f" {warning}" if warning else "")
    )


def _anchor(title: str) -> str:
    return title.lower().replace(" ", "-")
