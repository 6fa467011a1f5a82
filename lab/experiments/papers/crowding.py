"""Tokens that the question needs are crowded out by others (ProphetKV)."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from matplotlib.figure import Figure

from kvweave.recipes.methods import recipe_named
from kvweave.recipes.recipe import Recipe
from kvweave_lab.report.figures import Theme
from papers import selected
from papers.claim import (
    SUITE,
    Claim,
    Result,
    Setting,
    Verdict,
    better,
    estimate,
    estimate_json,
    with_interval,
)
from papers.plots import bars
from papers.selected import Selected
from recipe_grid import Grid

RATIO = 0.2
MAIN, BLIND, CHANCE = "prophetkv", ("epic", "cacheblend", "kvshare"), "random"
HARDLY_MORE = 0.1  # share of the evidence
NAMES = (MAIN, "fusionrag-alone", "qcfuse", "cacheclip-windows", *BLIND, CHANCE)


def variants() -> Mapping[str, Recipe]:
    """Return recipes with the same stale KV and exact rows, which differ only in their selection."""
    return {name: recipe_named(name, "isolated") for name in NAMES}


def grids(setting: Setting) -> Mapping[str, Grid]:
    """Return tasks whose evidence is a few sentences that share a name or value with question and answer."""
    tasks = ("multikey", "multiquery", "twohop", "coref")
    suite = replace(SUITE, tasks=tasks, ratios=(RATIO,), samples=setting.samples)
    return {"": Grid(variants, suite, setting.split)}


def numbers(found: Mapping[str, Sequence[Selected]]) -> Result:
    """Return by recipe the selected share of the evidence and the selection's share without it, and the gains."""
    by_recipe = {name: [one for one in found[""] if one.recipe == name] for name in NAMES}
    shares = [
        {
            "recipe": name,
            "samples": len(ones),
            **estimate_json("evidence", selected.over_tasks(ones, lambda one: one.evidence)),
            **estimate_json("beside", selected.over_tasks(ones, lambda one: one.beside)),
        }
        for name, ones in by_recipe.items()
    ]
    pairs = [(MAIN, other) for other in BLIND] + [(other, CHANCE) for other in BLIND]
    gains = [
        {
            "mine": first,
            "theirs": second,
            **estimate_json(
                "gain", selected.gain(by_recipe[first], by_recipe[second], lambda one: one.evidence)
            ),
        }
        for first, second in pairs
    ]
    return {"shares": shares, "gains": gains}


def verdicts(result: Result) -> list[Verdict]:
    """Compare selections without the question with chance, and ProphetKV with them."""
    beside = {one["recipe"]: estimate(one, "beside") for one in result["shares"]}
    found = []
    for row in result["gains"]:
        gain, other = estimate(row, "gain"), row["theirs"]
        if row["mine"] == MAIN:
            found += better(f"`{MAIN}` selects more of the tokens that the answer needs than `{other}`", gain)
            continue
        blind = row["mine"]
        held = True if gain.high < HARDLY_MORE else False if gain.low > HARDLY_MORE else None
        statement = (
            f"`{blind}` finds hardly more of them than chance ({with_interval(gain, '+.3f')} of the evidence, {HARDLY_MORE:g} being hardly more);"
            f" {with_interval(beside[blind], '.0%')} of its selection is no evidence."
        )
        found.append(Verdict(held, statement))
    return found


def table(result: Result) -> list[str]:
    """Return a table with a line for each recipe."""
    lines = [
        "| recipe | share of the evidence selected | share of the selection that is no evidence |",
        "|---|---|---|",
    ]
    for one in result["shares"]:
        shares = (with_interval(estimate(one, name), ".1%") for name in ("evidence", "beside"))
        lines.append(f"| `{one['recipe']}` | {' | '.join(shares)} |")
    return lines


def draw(result: Result, theme: Theme) -> Figure:
    """Return a figure with a bar for each recipe."""
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
    finding="EPIC, CacheBlend and KVShare spend a budget of 20 % on tokens that are unrelated to the question, and miss those that"
    " its answer needs; the question's attention finds them.",
    setup=f"Rows selected at ratio {RATIO:g} over isolated chunks. Evidence are the sentences that share a name with the question, or a name or value with the"
    " reference answer; exact rows do not count. Prompts without selected rows count only for the share of the evidence.",
    grids=grids,
    numbers=numbers,
    verdicts=verdicts,
    table=table,
    draw=draw,
    measure=selected.run,
)
