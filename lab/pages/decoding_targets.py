"""What lab/docs/decoding.md aims at, and how far the measurements beside it come."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tables import header, row, spread

from kvweave_lab.eval.decoding.rows import OVERALL, budget_text

Row = Mapping[str, Any]
FoundChunk = Mapping[str, Mapping[str, Any] | None]
Line = tuple[str, str, str]
"""What is aimed at, what was measured, and which file the measurement is in."""

OURS = "dynakv"
"""DynaKV's, among the strategies."""


def targets(found: FoundChunk) -> str:
    """A line for each that was measured."""
    return "\n".join([*header("aimed at", "measured", "results"), *(row(*line) for line in _lines(found))])


def _lines(found: FoundChunk) -> Iterator[Line]:
    for said, name, ours in (
        (
            "at most 0.7 of what the better baseline misses of recall, at the longest length",
            "decoding.json",
            "missed",
        ),
        ("at most half the pages of single entries", "decoding_entries.json", "pages"),
        ("at most a third of their reads", "decoding_entries.json", "reads"),
    ):
        rows = _last(found, name, "beside")
        if rows:
            yield (
                said,
                f"{max(one[ours] for one in rows if one[ours] is not None and _counts(one, ours)):.3f}",
                name,
            )
    for one in _last(found, "decoding.json", "rows"):
        if one["strategy"] == OURS:
            yield (
                "at least 0.97 of dense decoding's score at 15 %",
                f"{one['score_of_dense']:.3f}",
                "decoding.json",
            )
    for name in ("decoding_ablations.json", "decoding_ablations_far.json"):
        rows = {one["strategy"]: one for one in _last(found, name, "rows")}
        if rows:
            own, tokens = rows[OURS], _stretch(found, name)
            yield (
                "delayed splits read at most half of what immediate ones do for splits",
                f"{own['split_bytes_per_token'] / rows[f'{OURS}/immediate-split']['split_bytes_per_token']:.3f} {tokens}",
                name,
            )
            packed = rows[f"{OURS}/packed"]
            yield (
                "two clusters to a pool: at least 100 times less data moved than packed",
                f"{packed['moved_bytes_per_token'] / own['moved_bytes_per_token']:.0f} times {tokens}, "
                f"{_moved(found, name, f'{OURS}/packed') / _moved(found, name, OURS):.0f} over all",
                name,
            )
    yield from _costs(found)


def _costs(found: FoundChunk) -> Iterator[Line]:
    name = "decode_cost_absolute.json"
    ours = _ours(found, name)
    if ours:
        shares = [one["resident_bytes"] / one["dense_kv_bytes"] for one in ours]
        held = [one["resident_bytes"] for one in ours]
        yield "under 30 % of all KV in memory in a 3B shape at 16K", f"{shares[-1]:.1%}", name
        between = f"{min(held) / 1e6:,.1f} to {max(held) / 1e6:,.1f} MB"
        yield "flat in the length under a number of entries", f"{between} at {_lengths(ours)} tokens", name
    for one in ("decode_cost.json", "decode_cost_plenty.json", name):
        for budget, rows in _by_budget(_ours(found, one)).items():
            longer = rows[-1]["decode_tokens"] / rows[0]["decode_tokens"]
            slower = rows[-1]["latency_s_per_token"]["median"] / rows[0]["latency_s_per_token"]["median"]
            yield (
                "latency grows no faster than the length",
                f"{slower:.2f} times at {longer:.0f} times the length, {budget}",
                one,
            )
    for budget, rows in _by_budget(_ours(found, "decode_cost_plenty.json")).items():
        yield (
            "from 8K on it grows less than dense decoding's, with memory for all",
            f"{spread(rows[-1]['growth_of_dense'])} of its growth, {budget}",
            "decode_cost_plenty.json",
        )


def over_all(rows: Sequence[Row]) -> list[Row]:
    """Those over all kinds of text, or all where there is one kind."""
    return [one for one in rows if one["task"] == OVERALL] or list(rows)


def _last(found: FoundChunk, name: str, part: str) -> list[Row]:
    """Rows over all kinds of text at the last length."""
    told = found[name]
    if told is None:
        return []
    rows = over_all(told[part])
    last = max(one["decode_tokens"] for one in rows)
    return [one for one in rows if one["decode_tokens"] == last]


def _stretch(found: FoundChunk, name: str) -> str:
    """Which tokens a row at the last length is of: those since the length before it."""
    told = found[name]
    assert told is not None
    *before, last = sorted({one["decode_tokens"] for one in told["rows"]})
    return f"from {before[-1]:,} to {last:,} tokens" if before else f"to {last:,} tokens"


def _moved(found: FoundChunk, name: str, strategy: str) -> float:
    """Bytes moved in all, from the prompt's end to the last length."""
    told = found[name]
    assert told is not None
    rows = sorted(
        (one for one in over_all(told["rows"]) if one["strategy"] == strategy),
        key=lambda one: one["decode_tokens"],
    )
    starts = [told["about"]["prompt_tokens"], *(one["decode_tokens"] for one in rows)]
    moved: float = sum(
        one["moved_bytes_per_token"] * (one["decode_tokens"] - start)
        for one, start in zip(rows, starts[:-1], strict=True)
    )
    return moved


def _counts(one: Row, what: str) -> bool:
    """Single entries miss nothing: recall is beside those that do."""
    return what != "missed" or one["strategy"] != "entries"


def _ours(found: FoundChunk, name: str) -> list[Row]:
    told = found[name]
    return [] if told is None else [one for one in told["rows"] if one["strategy"] == OURS]


def _by_budget(rows: Sequence[Row]) -> dict[str, list[Row]]:
    return {
        budget_text(budget): [one for one in rows if one["budget"] == budget]
        for budget in dict.fromkeys(one["budget"] for one in rows)
    }


def _lengths(rows: Sequence[Row]) -> str:
    return ", ".join(f"{one['decode_tokens']:,}" for one in rows)
