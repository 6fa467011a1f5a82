"""The generated parts of lab/docs/answer-cache.md and lab/docs/personas.md: what whole systems and matchers measured."""

from collections.abc import Iterable, Sequence

from markdown_parts import NOT_MEASURED, Result, header, row

_SHOWN_THRESHOLDS = (0.6, 0.7, 0.8, 0.85, 0.9, 0.95)


def matched_questions(result: Result | None, figure: str = "") -> str:
    """Return each matcher at some thresholds, by kind of pairs at its own, and a figure; from `kvweave eval lookalikes`."""
    if result is None:
        return NOT_MEASURED
    about = result["about"]
    rows = [each for each in result["rows"] if each["is_default"] or each["threshold"] in _SHOWN_THRESHOLDS]
    return "\n\n".join(
        (
            f"{about['paraphrases']:,} paraphrases and {about['lookalikes']:,} look-alikes of {about['split']}, {about['embedding']}. "
            f"`{about['command']}`, {about['date']}, {about['commit']}. Bold: a matcher's default threshold.",
            "\n".join([*header("matcher", "threshold", "hit rate", "false-hit rate"), *map(_rates, rows)]),
            "\n".join(_kinds(result["kinds"])),
            *(["\n".join(_checked(result["checked"]))] if "checked" in result else []),
            *(
                [f"![Share of paraphrases that hit against share of look-alikes that hit]({figure})"]
                if figure
                else []
            ),
        )
    )


def _rates(rates: Result) -> str:
    threshold = f"{rates['threshold']:.2f}"
    return row(
        rates["matcher"],
        f"**{threshold}**" if rates["is_default"] else threshold,
        _share(rates, "hit_rate", 1),
        _share(rates, "false_hit_rate", 2),
    )


def _kinds(rows: Sequence[Result]) -> list[str]:
    matchers = list(dict.fromkeys(each["matcher"] for each in rows))
    lines = header("kind", "pairs", *matchers)
    for kind in dict.fromkeys(each["kind"] for each in rows):
        own = [each for each in rows if each["kind"] == kind]
        shares = (f"{each['accepted'] / each['pairs']:.1%}" for each in own)
        lines.append(row(kind, f"{own[0]['pairs']:,}", *shares))
    return lines


def _checked(rows: Sequence[Result]) -> list[str]:
    lines = header("near pairs", "hits", "false hits", "error", "hit rate", "false-hit rate")
    for each in rows:
        rates = f"{each['error']:.1%}", f"{each['hit_rate']:.1%}", f"{each['false_hit_rate']:.2%}"
        lines.append(row(each["rule"], f"{each['hits']:,}", f"{each['false_hits']:,}", *rates))
    return lines


def _share(rates: Result, name: str, digits: int) -> str:
    low, high = (f"{bound:.{digits}%}" for bound in rates[f"{name}_interval"])
    return f"{rates[name]:.{digits}%} ({low}–{high})"


def preemption(result: Result | None) -> str:
    """Return how soon background work frees the model for a request; from `lab/experiments/preemption_delay.py`."""
    if result is None:
        return NOT_MEASURED
    low, high = result["blocks_over_at_once_range"]
    return (
        f"{result['requests']} requests at random moments of prefill ({result['prompt_tokens']:,} tokens) and decoding, in the shape of "
        f"{result['shape']} on {result['threads']} CPU threads: the model was free after {result['median_s'] * 1e3:.0f} ms (median), "
        f"{result['p95_s'] * 1e3:.0f} ms (95 %), {result['longest_s'] * 1e3:.0f} ms (longest). A prefill in blocks of "
        f"{result['block_tokens']} takes {result['blocks_over_at_once']:.2f} times ({low:.2f}–{high:.2f}) as long as one at once. "
        f"`{result['command']}`, {result['date']}."
    )


def lookups(result: Result | None) -> str:
    """Return what looking a question up costs, by the number of stored answers; from `lab/experiments/answer_lookup.py`."""
    if result is None:
        return NOT_MEASURED
    lines = header(
        "stored answers",
        "a stored question",
        "with a typing error",
        "another question",
        "the first in a process",
    )
    for each in result["rows"]:
        shown = (
            f"{each[name]['median_ms']:.1f} ms ({each[name]['p95_ms']:.1f})"
            for name in ("stored", "mistyped", "other")
        )
        lines.append(row(f"{each['entries']:,}", *shown, f"{each['first_ms']:.0f} ms"))
    about = f"Median and 95th percentile, without embedding the question. `{result['command']}`, {result['date']}."
    return "\n\n".join(("\n".join(lines), about))


def whole_systems(result: Result | None) -> str:
    """Return both tables, pairs of systems, the further experiments, the scheduler, operations and items.

    The result is that of `kvweave eval personas`.
    """
    if result is None:
        return NOT_MEASURED
    about = result["about"]
    parts = [
        f"{about['users']:,} users with {about['questions']:,} questions; kvweave reuses KV by `{about['recipe of kvweave']}`. "
        f"`{about['command']}`, {about['date']}, {about['commit']}. Brackets: 95 % intervals over users.",
    ]
    for table, title in (("A", "A: projection reuse (priced)"), ("B", "B: ordinary reuse")):
        rows = [each for each in result["systems"] if each["table"] == table]
        parts += [f"**{title}**", "\n".join(_systems(rows))]
    parts += [_figure("mean latency of a question", "personas")]
    parts += ["**Who is faster**", "\n".join(_pairs(result["pairs"]))]
    for experiment in dict.fromkeys(each["experiment"] for each in result["further"]):
        rows = [each for each in result["further"] if each["experiment"] == experiment]
        ordinary = [each for each in rows if each["table"] == "B"]
        if experiment != "scheduler":
            parts += [
                f"**{experiment.capitalize()}** (B, {ordinary[0]['users']} users)",
                "\n".join(_systems(ordinary)),
                _figure(f"by {experiment}", f"personas-{experiment}"),
            ]
    if result["scheduler savings"]:
        parts += ["**The scheduler**", "\n".join(_savings(result["scheduler savings"]))]
        parts += [_figure("the scheduler, question by question", "personas-scheduler")]
    parts += ["**Operations and items**", "\n".join(_operations(result["operations"]))]
    return "\n\n".join(parts)


_SYSTEM_COLUMNS = (
    *("", "mean", "95 %", "QA hit", "other words", "QA ahead", "KV hit", "KV ahead", "ROUGE-L", "exact"),
    *("BLEU", "GFLOP", "idle TFLOP", "MB"),
)
_RATES = ("qa_hit", "other_words", "foreseen", "kv_hit", "kv_foreseen")


def _systems(rows: Sequence[Result]) -> Iterable[str]:
    yield from header(*_SYSTEM_COLUMNS)
    for each in rows:
        yield row(
            each["trial"],
            f"{_estimate(each['mean_s'], '.3f')} s",
            f"{each['tail_s']:.2f} s",
            *(f"{each[name]['value']:.1%}" for name in _RATES),
            _estimate(each["rouge_l"], ".3f"),
            f"{each['exact_match']['value']:.3f}",
            "" if each["bleu"] is None else f"{each['bleu']['value']:.3f}",
            f"{each['request_flops'] / 1e9:,.0f}",
            f"{each['idle_flops'] / 1e12:.2f}",
            f"{each['stored_bytes'] / 1e6:,.1f}",
        )


def _pairs(rows: Sequence[Result]) -> Iterable[str]:
    yield from header("table", "", "than", "faster", "ROUGE-L", "exact", "best user")
    for each in rows:
        yield row(
            each["table"],
            each["system"],
            each["other"],
            _estimate(each["faster"], "+.1%"),
            _estimate(each["rouge_l"], "+.3f"),
            _estimate(each["exact_match"], "+.3f"),
            f"{each['best_user']:+.1%}",
        )


def _savings(rows: Sequence[Result]) -> Iterable[str]:
    yield from header("", "idle operations saved", "latency saved after the change")
    for each in rows:
        yield row(each["experiment"], f"{each['idle_flops']:+.1%}", f"{each['latency']:+.1%}")


def _operations(rows: Sequence[Result]) -> Iterable[str]:
    yield from header("", "time", "bytes")
    for each in rows:
        seconds = "" if each["seconds"] is None else f"{1e3 * each['seconds']:,.2f} ms"
        size = "" if each["bytes"] is None else f"{each['bytes']:,.0f}"
        yield row(each["name"].replace("in the bank", "in the answer cache"), seconds, size)


def _figure(title: str, name: str) -> str:
    return f"![{title}](images/{name}.png)"


def _estimate(estimate: Result, form: str) -> str:
    low, high = (format(estimate[bound], form) for bound in ("low", "high"))
    return f"{estimate['value']:{form}} ({low}–{high})"
