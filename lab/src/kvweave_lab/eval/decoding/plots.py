"""The evaluation of decoding as figures, in the looks that all of evaluation shares."""

from collections.abc import Callable, Mapping, Sequence

import matplotlib
from matplotlib.axes import Axes

from kvweave_lab.eval.decoding.measure import DENSE, Quality
from kvweave_lab.eval.decoding.rows import Row, budget_text
from kvweave_lab.eval.decoding.shift import GLOBAL, UPDATES, Shift
from kvweave_lab.eval.decoding.tables import summary
from kvweave_lab.eval.report.sheet import legend_below, png, sheet, sign
from kvweave_lab.eval.report.style import LIGHT, Look, looks, settings
from kvweave_lab.eval.results import Estimate

Label = tuple[str, str, float]
"""Variant, storage, budget."""


def figures(done: Quality) -> dict[str, bytes]:
    """PNG by name; those of the shift only where it was measured."""
    note = f"{done.model} · {len({run.text for run in done.runs}):,} texts, {len(done.request.seeds)} seeds"
    rows = summary(done.rows)
    found = {
        "missed": _lines(rows, "Entries that retrieval misses", "1 − recall", note, _missed),
        "error": _lines(
            rows, "How far attention's output is off", "output error", note, lambda row: row.output_error
        ),
    }
    if any(row.score is not None for row in rows):
        found["score"] = _lines(
            rows, "Answers whose evidence is far back", "score", note, lambda row: row.score
        )
    if done.shift is not None:
        found["variance"] = _variance(done.shift, done.model)
        found["shift"] = _shift(done.shift, done.model)
    return found


def _missed(row: Row) -> Estimate | None:
    if row.recall is None:
        return None
    return Estimate(1 - row.recall.value, 1 - row.recall.high, 1 - row.recall.low)


def _lines(
    rows: Sequence[Row], title: str, axis: str, note: str, value: Callable[[Row], Estimate | None]
) -> bytes:
    """A line per variant, storage and budget by decode length, with its interval."""
    labels: list[Label] = list(dict.fromkeys((row.strategy, row.storage, row.budget) for row in rows))
    names = [_named(label) for label in labels]
    with matplotlib.rc_context(settings(LIGHT)):
        figure = sheet(7.2, 4.2, title, note, LIGHT)
        axes = figure.subplots()
        chosen = looks(names, LIGHT)
        for label, name in zip(labels, names, strict=True):
            own = [row for row in rows if (row.strategy, row.storage, row.budget) == label]
            found = [(row.decode_tokens, one) for row in own if (one := value(row)) is not None]
            _line(axes, found, chosen[name])
        axes.set_xlabel("tokens decoded")
        axes.set_ylabel(axis)
        axes.set_ylim(bottom=0)
        legend_below(figure, [(sign(chosen[name], LIGHT, line=True), name) for name in names])
        return png(figure)


def _line(axes: Axes, found: Sequence[tuple[int, Estimate]], look: Look) -> None:
    lengths = [length for length, _ in found]
    axes.plot(
        lengths,
        [one.value for _, one in found],
        color=look.color,
        linestyle=look.dashes,
        marker=look.marker,
        markerfacecolor=look.color if look.filled else LIGHT.ground,
    )
    low, high = [one.low for _, one in found], [one.high for _, one in found]
    axes.fill_between(lengths, low, high, color=look.color, alpha=0.12, linewidth=0)


def _named(label: Label) -> str:
    variant, storage, budget = label
    if variant == DENSE:
        return variant
    return " ".join([variant, budget_text(budget), *([] if storage == "exact" else [storage])])


def _variance(shift: Shift, model: str) -> bytes:
    """Each update's variance by decode length, beside as many clusters of all keys grouped anew."""
    with matplotlib.rc_context(settings(LIGHT)):
        note = f"{model} · {shift.text} · dashed: as many clusters of all keys, grouped anew"
        figure = sheet(7.2, 3.6, "Variance inside clusters", note, LIGHT)
        axes = figure.subplots()
        chosen = looks(UPDATES, LIGHT)
        for update in UPDATES:
            own = [part for part in shift.groupings if part.update == update]
            lengths, color = [part.decode_tokens for part in own], chosen[update].color
            axes.plot(lengths, [part.variance for part in own], color=color, marker=chosen[update].marker)
            axes.plot(lengths, [part.anew for part in own], color=color, linestyle="--", linewidth=1)
        axes.set_xlabel("tokens decoded")
        axes.set_ylabel("mean squared distance")
        axes.set_ylim(bottom=0)
        legend_below(figure, [(sign(chosen[update], LIGHT, line=True), update) for update in UPDATES])
        return png(figure)


def _shift(shift: Shift, model: str) -> bytes:
    """One head's keys on two axes, coloured by cluster, a panel per update (DynaKV figure 4)."""
    panels: Mapping[str, str] = {GLOBAL: GLOBAL, **{update: f"{update} update" for update in UPDATES}}
    with matplotlib.rc_context(settings(LIGHT)):
        note = f"{model} · {shift.text} · layer {shift.layer + 1}, KV head {shift.head + 1} · two principal components"
        figure = sheet(9.6, 2.9, "Keys by cluster at the end of the text", note, LIGHT)
        drawn = figure.subplots(1, len(panels), sharex=True, sharey=True)
        for axes, (name, title) in zip(drawn, panels.items(), strict=True):
            points = shift.points.get(name, ())
            axes.scatter(
                [x for x, _, _ in points],
                [y for _, y, _ in points],
                c=[LIGHT.palette[number % len(LIGHT.palette)] for *_, number in points],
                s=3,
                linewidths=0,
            )
            axes.set_title(title)
            axes.tick_params(labelbottom=False, labelleft=False)
        return png(figure)
