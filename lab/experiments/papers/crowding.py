"""Tokens that the question needs, crowded out by others (ProphetKV)."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from matplotlib.figure import Figure

from kvweave.recipes.methods import recipe_named
from kvweave.recipes.recipe import Recipe
from kvweave_lab.eval.report.style import Theme
from papers import selected
from papers.claim import SUITE, Claim, Result, Setting, Verdict, better, estimate, plain, spoken
from papers.figures import bars
from papers.selected import Selected
from side_by_side import Grid

RATIO = 0.2
MINE, BLIND, CHANCE = "prophetkv", ("epic", "cacheblend", "kvshare"), "random"
HARDLY = 0.1  # of the evidence
NAMES = (MINE, "fusionrag", "qcfuse", "cacheclip", *BLIND, CHANCE)


def variants() -> Mapping[str, Recipe]:
    """All on the same stale KV and with the same exact rows, so that they differ in their selection alone."""
    return {name: recipe_named(name, "isolated") for name in NAMES}


def grids(setting: Setting) -> Mapping[str, Grid]:
    """Tasks whose evidence is a few sentences that share a name or a value with question and answer."""
    tasks = ("multikey", "multiquery", "twohop", "coref")
    suite = replace(SUITE, tasks=tasks, ratios=(RATIO,), samples=setting.samples)
    return {"": Grid(variants, suite, setting.split)}


def figures(found: Mapping[str, Sequence[Selected]]) -> Result:
    """By recipe: the share of the evidence selected, the share of the selection beside it; and what ProphetKV finds more."""
    own = {name: [one for one in found[""] if one.recipe == name] for name in NAMES}
    shares = [
        {
            "recipe": name,
            "samples": len(ones),
            **plain("evidence", selected.over_tasks(ones, lambda one: one.evidence)),
            **plain("beside", selected.over_tasks(ones, lambda one: one.beside)),
        }
        for name, ones in own.items()
    ]
    pairs = [(MINE, other) for other in BLIND] + [(other, CHANCE) for other in BLIND]
    gains = [
        {
            "mine": mine,
            "theirs": theirs,
            **plain("gain", selected.gain(own[mine], own[theirs], lambda one: one.evidence)),
        }
        for mine, theirs in pairs
    ]
    return {"shares": shares, "gains": gains}


def verdicts(result: Result) -> list[Verdict]:
    """The blind selections against chance, and ProphetKV against them."""
    beside = {one["recipe"]: estimate(one, "beside") for one in result["shares"]}
    found = []
    for kept in result["gains"]:
        gain, other = estimate(kept, "gain"), kept["theirs"]
        if kept["mine"] == MINE:
            found += better(
                f"`{MINE}` selects more of the tokens that the answer rests on than `{other}`", gain
            )
            continue
        blind = kept["mine"]
        held = True if gain.high < HARDLY else False if gain.low > HARDLY else None
        said = (
            f"`{blind}` finds hardly more of them than chance ({spoken(gain, '+.3f')} of the evidence, {HARDLY:g} being hardly more);"
            f" {spoken(beside[blind], '.0%')} of what it selects is something else."
        )
        found.append(Verdict(held, said))
    return found


def table(result: Result) -> list[str]:
    """By recipe."""
    lines = [
        "| recipe | share of the evidence selected | share of the selection that is no evidence |",
        "|---|---|---|",
    ]
    for one in result["shares"]:
        shares = (spoken(estimate(one, name), ".1%") for name in ("evidence", "beside"))
        lines.append(f"| `{one['recipe']}` | {' | '.join(shares)} |")
    return lines


def draw(result: Result, theme: Theme) -> Figure:
    """A bar for each recipe."""
    panels = {
        title: {one["recipe"]: estimate(one, name) for one in result["shares"]}
        for title, name in (
            ("of the evidence, selected", "evidence"),
            ("of the selection, no evidence", "beside"),
        )
    }
    heading = (f"What a budget of {RATIO:.0%} is spent on", "512 tokens of context · lines: 95 % interval")
    return bars(heading, panels, NAMES, "share", theme)


CLAIM = Claim(
    name="crowding",
    title="Crowding-out",
    paper="ProphetKV §3.1, figs. 2 and 3",
    says="EPIC, CacheBlend and KVShare spend a budget of 20 % on tokens that have nothing to do with the question, and miss those that"
    " its answer rests on; attention of the question finds them.",
    tried=f"Rows selected at ratio {RATIO:g} over isolated chunks. Evidence are the sentences that share a name with the question, or a name or value with the"
    " reference answer; exact rows do not count. Where nothing was selected, only the share of the evidence is counted.",
    grids=grids,
    figures=figures,
    verdicts=verdicts,
    table=table,
    draw=draw,
    measure=selected.run,
)
