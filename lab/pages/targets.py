"""The project's targets and whether they are reached: quality of the models, first token, long decoding."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from evaluation_page import Cells, baseline_cells, within_interval
from markdown_parts import NOT_MEASURED, Result, header, if_measured, row, spread

from kvweave_lab.eval.decoding.results import OVERALL as ALL_KINDS
from kvweave_lab.eval.decoding.results import budget_text
from kvweave_lab.eval.outcomes import FULL
from kvweave_lab.eval.rows import OVERALL

# The shipped models on the evaluation's tasks

_LENGTHS = (512, 2048)
_EASY_TASKS = ("single", "multikey", "twohop", "coref")
_OTHER_TASKS = ("multivalue", "multiquery", "vartrack", "contradiction", "order")
_DEPENDENT_TASKS = ("coref", "twohop", "vartrack", "contradiction", "order")
"""Tasks in which chunks depend on one another."""

_EASY_SCORE, _SCORE, _TASKS = 0.95, 0.85, 9
_FALL, _FALLING_TASKS = 0.25, 3
_MODEL_BYTES = 20_000_000
_EXACT_KL = 1e-6


@if_measured
def evaluation_targets(quality: Result, selection: Result | None, second: Result | None = None) -> str:
    """Return a table with a row for each target and length; `second` has the scores of a second training run."""
    lines = [*header("target", "context", "reached", "measured")]
    cells = baseline_cells(quality)
    for length in _LENGTHS:
        if _scores(cells, length, FULL):
            lines += _length_targets(quality, cells, length)
    size = quality["reference"]["bytes"]
    lines.append(row("weights of at most 20 MB", "", _yes(size <= _MODEL_BYTES), f"{size / 1e6:.1f} MB"))
    auxiliary = (selection or {}).get("auxiliary")
    if auxiliary:
        kl, jaccard = auxiliary["kl_difference"], auxiliary["jaccard_difference"]
        lines.append(
            row(
                "the auxiliary model predicts the last layer better than the first layer does",
                f"{selection['context_tokens']:.0f}" if selection else "",
                _yes(kl["high"] < 0 < jaccard["low"]),
                f"KL {kl['value']:+.2f}, Jaccard {jaccard['value']:+.3f} ([selection](selection.md#the-auxiliary-model))",
            )
        )
    if second:
        lines.append(_second_run(second["rows"]))
    return "\n".join(lines)


def _length_targets(quality: Result, cells: Cells, length: int) -> Iterator[str]:
    full, reuse = (_scores(cells, length, recipe) for recipe in ("full", "reuse"))

    def line(target: str, reached: bool, measured: str) -> str:
        return row(target, f"{length:,}", _yes(reached), measured)

    def listed(scores: Mapping[str, float], tasks: Iterable[str]) -> str:
        return ", ".join(f"{scores[task]:.3f}" if task in scores else "–" for task in tasks)

    for tasks, least in ((_EASY_TASKS, _EASY_SCORE), (_OTHER_TASKS, _SCORE)):
        reached = all(full.get(task, 0) >= least for task in tasks)
        yield line(f"at least {least:.2f} on {_names(tasks)}", reached, listed(full, tasks))
    enough = sum(score >= _SCORE for score in full.values())
    target = f"at least {_SCORE:.2f} on {_TASKS} of all tasks"
    yield line(target, enough >= _TASKS, f"{enough} of {len(full)}")
    falls = {task: full[task] - reuse[task] for task in _DEPENDENT_TASKS if task in full and task in reuse}
    target = f"`reuse` falls by at least {_FALL:.2f} on {_FALLING_TASKS} of {_names(_DEPENDENT_TASKS)}"
    reached = sum(fall >= _FALL for fall in falls.values()) >= _FALLING_TASKS
    yield line(target, reached, listed(falls, falls))
    whole = [one for one in quality["rows"] if one["ratio"] == 1 and one["recipe"] != FULL]
    whole = [one for one in whole if one["context_tokens"] == length]
    if whole:
        exact = all(one["agreement"] == 1 and one["kl"] < _EXACT_KL for one in whole)
        recipes = _names(sorted({one["recipe"] for one in whole}))
        measured = f"every answer equal, KL below {_EXACT_KL:g}" if exact else "not every answer equal"
        yield line("recomputing 100 % restores full attention", exact, f"{recipes}: {measured}")


def _scores(cells: Cells, length: int, recipe: str) -> dict[str, float]:
    """Return the scores by task."""
    return {
        task: one["score"]
        for (tokens, task, name), one in cells.items()
        if (tokens, name) == (length, recipe) and task != OVERALL
    }


def _second_run(rows: Sequence[Result]) -> str:
    inside = [one for one in rows if within_interval(one)]
    lengths = ", ".join(f"{length:,}" for length in sorted({one["context_tokens"] for one in rows}))
    return row(
        "a second training run scores within the first one's interval",
        lengths,
        _yes(len(inside) == len(rows)),
        f"{len(inside)} of {len(rows)}, its last stage run again ([training](../training/README.md#a-second-run))",
    )


def _names(tasks: Iterable[str]) -> str:
    return ", ".join(f"`{task}`" for task in tasks)


def _yes(reached: bool) -> str:
    return "yes" if reached else "**no**"


# Time to first token

_TIMED_RECIPES = ("prophetkv", "weave")


@dataclass(frozen=True, slots=True)
class SpeedTarget:
    """A bound for `value` in all rows with `shortest` to `longest` tokens of context and one of the ratios."""

    text: str
    shortest: int
    longest: float
    ratios: tuple[float, ...]
    value: Callable[[Result], float]
    bound: float
    at_least: bool
    form: str

    def concerns(self, one: Result) -> bool:
        return self.shortest <= one["context_tokens"] <= self.longest and one["ratio"] in self.ratios

    def holds(self, one: Result) -> bool:
        found = self.value(one)
        return found >= self.bound if self.at_least else found <= self.bound

    def format(self, value: float) -> str:
        return format(value, self.form)


def _efficiency(one: Result) -> float:
    return float(one["efficiency"])


def _speedup(one: Result) -> float:
    return float(one["speedup"])


def _share_of_full(one: Result) -> float:
    return 1 / float(one["speedup"])


_SHORT, _LONG = (4096, 4096), (8192, float("inf"))
_TO_30 = (0.1, 0.15, 0.2, 0.3)

SPEED_TARGETS = (
    SpeedTarget("efficiency at least 0.75 at 4K, ratio 0.1", *_SHORT, (0.1,), _efficiency, 0.75, True, ".2f"),
    SpeedTarget(
        "efficiency at least 0.85 at 4K, ratios 0.15 to 0.3",
        *_SHORT,
        _TO_30[1:],
        _efficiency,
        0.85,
        True,
        ".2f",
    ),
    SpeedTarget(
        "efficiency at least 0.90 from 8K on, ratios 0.1 to 0.3",
        *_LONG,
        _TO_30,
        _efficiency,
        0.90,
        True,
        ".3f",
    ),
    SpeedTarget("at least 5.5× at ratio 0.15 from 8K on", *_LONG, (0.15,), _speedup, 5.5, True, ".2f"),
    SpeedTarget("at least 4.3× at ratio 0.2 from 8K on", *_LONG, (0.2,), _speedup, 4.3, True, ".2f"),
    SpeedTarget(
        "ratio 0 at most 0.03 of full prefill at 4K", *_SHORT, (0.0,), _share_of_full, 0.03, False, ".3f"
    ),
    SpeedTarget(
        "ratio 1 at most 1.02 of full prefill at 4K", *_SHORT, (1.0,), _share_of_full, 1.02, False, ".3f"
    ),
)


def ttft_targets(measured: Iterable[Result | None]) -> str:
    """Return a table with a row for each target, over all rows of the timed recipes with KV in memory."""
    rows = [
        one
        for result in measured
        if result is not None
        for one in result["rows"]
        if one["recipe"] in _TIMED_RECIPES and one["kv_from"] == "memory"
    ]
    if not rows:
        return NOT_MEASURED
    lines = header("target", "measured", "reached", "missed by")
    for target in SPEED_TARGETS:
        own = [one for one in rows if target.concerns(one)]
        missed = [one for one in own if not target.holds(one)]
        values = sorted(map(target.value, own))
        measured_range = " to ".join(map(target.format, (values[0], values[-1]))) if own else "not measured"
        misses = (
            f"`{one['recipe']}` at {one['ratio']:g} over {one['context_tokens']:,}: {target.format(target.value(one))}"
            for one in missed
        )
        lines.append(
            row(target.text, measured_range, f"{len(own) - len(missed)} of {len(own)}", "; ".join(misses))
        )
    return "\n".join(lines)


# Long decoding

Results = Mapping[str, Result | None]
"""Results by file name, or None for a missing file."""

OURS = "dynakv"
"""DynaKV's strategy."""


def decoding_targets(results: Results) -> str:
    """Return a table with a row for each measured target."""
    lines = [*_baseline_targets(results), *_ablation_targets(results), *_cost_targets(results)]
    return "\n".join([*header("target", "measured", "results"), *(row(*line) for line in lines)])


def over_all_kinds(rows: Sequence[Result]) -> list[Result]:
    """Return the rows that are means over all kinds of text, or all rows if there is one kind."""
    return [one for one in rows if one["task"] == ALL_KINDS] or list(rows)


_Line = tuple[str, str, str]
"""A target, the measured value, and the file with the measurement."""


def _baseline_targets(results: Results) -> Iterator[_Line]:
    for target, name, measure in (
        (
            "at most 0.7 of what the better baseline misses of recall, at the longest length",
            "decoding.json",
            "missed",
        ),
        ("at most half the pages of single entries", "decoding_entries.json", "pages"),
        ("at most a third of their reads", "decoding_entries.json", "reads"),
    ):
        rows = _last_rows(results, name, "beside")
        # Single entries miss nothing: recall is compared with strategies that do.
        counted = [one for one in rows if measure != "missed" or one["strategy"] != "entries"]
        if rows:
            yield target, f"{max(one[measure] for one in counted if one[measure] is not None):.3f}", name
    for one in _last_rows(results, "decoding.json", "rows"):
        if one["strategy"] == OURS:
            measured = f"{one['score_of_dense']:.3f}"
            yield "at least 0.97 of dense decoding's score at 15 %", measured, "decoding.json"


def _ablation_targets(results: Results) -> Iterator[_Line]:
    for name in ("decoding_ablations.json", "decoding_ablations_far.json"):
        rows = {one["strategy"]: one for one in _last_rows(results, name, "rows")}
        if rows:
            own, tokens = rows[OURS], _last_stretch(results, name)
            immediate, packed = rows[f"{OURS}/immediate-split"], rows[f"{OURS}/packed"]
            yield (
                "delayed splits read at most half of what immediate ones do for splits",
                f"{own['split_bytes_per_token'] / immediate['split_bytes_per_token']:.3f} {tokens}",
                name,
            )
            yield (
                "two clusters to a pool: at least 100 times less data moved than packed",
                f"{packed['moved_bytes_per_token'] / own['moved_bytes_per_token']:.0f} times {tokens}, "
                f"{_moved_bytes(results, name, f'{OURS}/packed') / _moved_bytes(results, name, OURS):.0f} over all",
                name,
            )


def _cost_targets(results: Results) -> Iterator[_Line]:
    absolute = "decode_cost_absolute.json"
    ours = _our_rows(results, absolute)
    if ours:
        share = ours[-1]["resident_bytes"] / ours[-1]["dense_kv_bytes"]
        sizes = [one["resident_bytes"] for one in ours]
        yield "under 30 % of all KV in memory in a 3B shape at 16K", f"{share:.1%}", absolute
        lengths = ", ".join(f"{one['decode_tokens']:,}" for one in ours)
        measured = f"{min(sizes) / 1e6:,.1f} to {max(sizes) / 1e6:,.1f} MB at {lengths} tokens"
        yield "flat in the length under a number of entries", measured, absolute
    for name in ("decode_cost.json", "decode_cost_plenty.json", absolute):
        for budget, rows in _by_budget(_our_rows(results, name)).items():
            longer = rows[-1]["decode_tokens"] / rows[0]["decode_tokens"]
            slower = rows[-1]["latency_s_per_token"]["median"] / rows[0]["latency_s_per_token"]["median"]
            measured = f"{slower:.2f} times at {longer:.0f} times the length, {budget}"
            yield "latency grows no faster than the length", measured, name
    for budget, rows in _by_budget(_our_rows(results, "decode_cost_plenty.json")).items():
        yield (
            "from 8K on it grows less than dense decoding's, with memory for all",
            f"{spread(rows[-1]['growth_of_dense'])} of its growth, {budget}",
            "decode_cost_plenty.json",
        )


def _last_rows(results: Results, name: str, part: str) -> list[Result]:
    """Return the rows at the last length that are means over all kinds of text."""
    result = results[name]
    if result is None:
        return []
    rows = over_all_kinds(result[part])
    last = max(one["decode_tokens"] for one in rows)
    return [one for one in rows if one["decode_tokens"] == last]


def _last_stretch(results: Results, name: str) -> str:
    """Return the range of tokens that a row at the last length covers, which starts at the length before it."""
    result = results[name]
    assert result is not None
    *before, last = sorted({one["decode_tokens"] for one in result["rows"]})
    return f"from {before[-1]:,} to {last:,} tokens" if before else f"to {last:,} tokens"


def _moved_bytes(results: Results, name: str, strategy: str) -> float:
    """Return the bytes moved from the end of the prompt to the last length."""
    result = results[name]
    assert result is not None
    rows = sorted(
        (one for one in over_all_kinds(result["rows"]) if one["strategy"] == strategy),
        key=lambda one: int(one["decode_tokens"]),
    )
    starts = [result["about"]["prompt_tokens"], *(one["decode_tokens"] for one in rows)]
    moved: float = sum(
        one["moved_bytes_per_token"] * (one["decode_tokens"] - start)
        for one, start in zip(rows, starts[:-1], strict=True)
    )
    return moved


def _our_rows(results: Results, name: str) -> list[Result]:
    result = results[name]
    return [] if result is None else [one for one in result["rows"] if one["strategy"] == OURS]


def _by_budget(rows: Sequence[Result]) -> dict[str, list[Result]]:
    return {
        budget_text(budget): [one for one in rows if one["budget"] == budget]
        for budget in dict.fromkeys(one["budget"] for one in rows)
    }
