"""lab/docs/claims.md: the claims of the papers, and whether they hold here.

It reads no files: `build.py` passes the results of `lab/experiments/claims.py`, or None if it did not run.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import figures_cacheclip
import figures_dynakv
import figures_fusionrag
import figures_percache
import figures_prophetkv
from figure_rows import NOT_JUDGED, Figure, Results, rests_on
from markdown_parts import NOT_MEASURED, Result, header, row

from kvweave_lab.report import few_prompts_warning
from papers.claim import Claim, Verdict, baseline_lines

_WORDS = {True: "Held here", False: "The opposite was seen here", None: "Not seen here"}
_UNJUDGED = "Not judged"

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
        " that the interval allows both; *not judged* means that the recipe that did better also recomputed more tokens. Differences are paired (the same prompts with both recipes) unless they are called unpaired. The model"
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
    held, unseen, opposite, unjudged = _counts([verdict for _, verdict in verdicts])
    lines = [
        f"Of {len(verdicts)} points, {held} held here, {unseen} were not seen, of {opposite} the opposite was seen, and {unjudged} were not judged. "
        "Context of 512 tokens, the shipped 10 MB model, generated prompts."
    ]
    for certain in (True, False):
        titles = Counter(claim.title for claim, verdict in verdicts if verdict.held is certain)
        named = "; ".join(f"[{title}](#{_anchor(title)}) ({points})" for title, points in titles.items())
        if named:
            lines.append(f"{_WORDS[certain]}, with the number of points: {named}.")
    lines.append(
        "A point that was not seen stays open. Where a section says that plain reuse loses little, these tasks could not have shown the "
        "claim."
    )
    return [*(f"- {line}" for line in lines), ""]


def _overview(claims: Claims, found: Result) -> list[str]:
    """Return a table with the number of points of each claim that held."""
    lines = header("claim", "held", "not seen", "the opposite", NOT_JUDGED)
    for name, claim in claims.items():
        counts = map(str, _counts(claim.verdicts(found[name]))) if name in found else "––––"
        lines.append(row(f"[{claim.title}](#{_anchor(claim.title)})", *counts))
    return lines


def _counts(verdicts: Sequence[Verdict]) -> tuple[int, int, int, int]:
    """Return how many verdicts held, were not seen, were contradicted, and were not judged."""
    judged = [verdict.held for verdict in verdicts if verdict.judged]
    return judged.count(True), judged.count(None), judged.count(False), len(verdicts) - len(judged)


def _figures(results: Results) -> list[str]:
    """Return a table for each paper, with a row for each of its figures and tables."""
    lines = [
        "## Figure by figure",
        "",
        "These tables have every figure and table of the five papers that shows a result, on the paper's own task where it was measured. If a"
        " figure makes several points, the column *here* counts them. *Not seen*"
        " also means that there is a gain but a smaller one than the paper's. If two scores have no paired interval, their own intervals are"
        " compared, which is more cautious. Measured times have no intervals. *Not judged* means that the numbers rest on one user, text or head,"
        " on another recipe, or on an advantage that the paper's method does not have; the row has the reason. *Not measured* means that it could"
        " be measured here and was not.",
        "",
        _models(results),
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


def _models(results: Results) -> str:
    """Return how many rows rest on which kind of model."""
    figures = [figure.seen for figures in PAPERS.values() for figure in figures]
    seen = [measure(results) for measure in figures if not isinstance(measure, str)]
    kinds = Counter(rests_on(one.where) for one in seen if one)
    counted = "; ".join(f"{rows} on {kind}" for kind, rows in kinds.most_common())
    return f"**What they rest on**: of the {len(figures)} rows, {kinds.total()} have numbers: {counted}."


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
    words = ((_WORDS[one.held] if one.judged else _UNJUDGED, one.statement) for one in verdicts)
    return [f"- *{word}.* {text}" for word, text in words]


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
