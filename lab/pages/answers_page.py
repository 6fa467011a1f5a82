"""The generated parts of lab/docs/answer-cache.md and lab/docs/personas.md: measurements of matchers and of whole systems."""

from collections.abc import Iterable, Sequence

from markdown_parts import NOT_MEASURED, Result, header, if_measured, row

from kvweave.config import AnswersConfig

JUDGING_FILES = tuple(
    f"judged_{model}.json" for model in ("gemma-3-270m", "qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b")
)
_LARGER_BOUND = 0.05
_SHOWN_THRESHOLDS = (0.6, 0.7, 0.8, 0.85, 0.9, 0.95)


@if_measured
def matched_questions(result: Result, figure: str = "") -> str:
    """Return the tables of `kvweave eval lookalikes`: rates by matcher and threshold, shares by kind of pairs, and a figure."""
    about = result["about"]
    rows = [each for each in result["rows"] if each["is_default"] or each["threshold"] in _SHOWN_THRESHOLDS]
    return "\n\n".join(
        (
            f"{about['paraphrases']:,} paraphrases and {about['lookalikes']:,} look-alikes of {about['split']}, {about['embedding']}. "
            f"`{about['command']}`, {about['date']}, {about['commit']}. Bold: a matcher's default threshold.",
            "\n".join([*header("matcher", "threshold", "hit rate", "false-hit rate"), *map(_rates, rows)]),
            "\n".join(_kinds([each for each in result["kinds"] if each["is_default"]])),
            "\n".join(["kvweave / cosine, by threshold:", "", *_kinds_by_threshold(result["kinds"])]),
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


def _kinds_by_threshold(rows: Sequence[Result]) -> list[str]:
    """Return the shares of each kind of pairs that kvweave and plain cosine accept, at their common thresholds."""
    compared = [each for each in rows if each["matcher"] in ("kvweave", "cosine")]
    thresholds = sorted({each["threshold"] for each in compared})
    lines = header("kind", *(f"{each:.2f}" for each in thresholds))
    for kind in dict.fromkeys(each["kind"] for each in compared):
        shares = {
            (each["matcher"], each["threshold"]): each["accepted"] / each["pairs"]
            for each in compared
            if each["kind"] == kind
        }
        cells = (f"{shares['kvweave', each]:.0%} / {shares['cosine', each]:.0%}" for each in thresholds)
        lines.append(row(kind, *cells))
    return lines


def _share(rates: Result, name: str, digits: int) -> str:
    low, high = (f"{bound:.{digits}%}" for bound in rates[f"{name}_interval"])
    return f"{rates[name]:.{digits}%} ({low}–{high})"


def all_rules(people: Result | None, measured: Iterable[Result | None]) -> str:
    """Return one table of every matcher at its default on the people's pairs, and of guard and judge by model."""
    if people is None:
        return NOT_MEASURED
    lines = header("rule", "threshold", "paraphrases", "look-alikes", "of the served, wrong")
    shown = [
        (each["matcher"], f"{each['threshold']:.2f}", each) for each in people["rows"] if each["is_default"]
    ]
    for judging in (result["judging"] for result in measured if result is not None):
        shown += [
            (f"kvweave, judged by {judging['model']}", f"bound {each['bound']:.0%}", each)
            for each in judging["rows"]
            if each["bound"] in (AnswersConfig().answer_error_bound, _LARGER_BOUND)
        ]
    about = people["about"]
    for name, threshold, each in shown:
        right, wrong = (
            each[rate] * about[of]
            for rate, of in (("hit_rate", "paraphrases"), ("false_hit_rate", "lookalikes"))
        )
        among = f"{wrong / (right + wrong):.1%}" if right + wrong else "–"
        lines.append(
            row(name, threshold, _share(each, "hit_rate", 1), _share(each, "false_hit_rate", 2), among)
        )
    return "\n".join(
        [
            *lines,
            "",
            f"Pairs: {about['split']}. Rows of judges: commands below. Others: `{about['command']}`, {about['date']}, {about['commit']}.",
        ]
    )


def judged_questions(measured: Iterable[Result | None]) -> str:
    """Return the tables of `kvweave eval lookalikes --model`: what each measured model serves by bound, and by kind."""
    results = [result for result in measured if result is not None]
    if not results:
        return NOT_MEASURED
    lines = header(
        "model", "AUC", "bound", "paraphrases", "look-alikes", "served on its word", "of these wrong"
    )
    for result in results:
        judging = result["judging"]
        for each in judging["rows"]:
            bound = f"{each['bound']:.1%}"
            lines.append(
                row(
                    judging["model"],
                    f"{judging['auc']:.2f}",
                    f"**{bound}**" if each["bound"] == AnswersConfig().answer_error_bound else bound,
                    _share(each, "hit_rate", 1),
                    _share(each, "false_hit_rate", 2),
                    f"{each['judged_hits']}",
                    "–" if each["wrong"] is None else _share(each, "wrong", 1),
                )
            )
    lines += ["", *header("model", "fit", "first pair", "a pair", "machine", "measured by")]
    for result in results:
        judging, about = result["judging"], result["about"]
        lines.append(
            row(
                judging["model"],
                f"{judging['fit_s']:.0f} s",
                f"{judging['first_s']:.2f} s",
                f"{judging['pair_s'] * 1e3:.0f} ms",
                f"{about['machine']}, {about['threads']} threads",
                f"`{about['command']}`, {about['date']}, {about['commit']}",
            )
        )
    bounds = [f"{each['bound']:g}" for each in results[0]["judging"]["rows"]]
    lines += [
        "",
        *header("model", "kind", "pairs", "sure", "judged", *(f"served at {bound}" for bound in bounds)),
    ]
    for result in results:
        lines += [
            row(
                result["judging"]["model"],
                each["kind"],
                *(f"{each[name]}" for name in ("pairs", "sure", "judged")),
                *(f"{each['served'][bound]}" for bound in bounds),
            )
            for each in result["judging"]["kinds"]
            if each["judged"] or each["sure"]
        ]
    return "\n".join(lines)


@if_measured
def repeated_questions(result: Result) -> str:
    """Return the table of `lab/experiments/repeated_questions.py`: how often a question is found again, by way of typing."""
    lines = header("typed with", "questions", "found again")
    lines += [
        row(each["variant"], f"{each['questions']}", _share(each, "share", 1)) for each in result["rows"]
    ]
    lines += ["", *_missed(result["missed"])]
    apart, of = result["one_letter_apart"], result["lookalikes"]
    kinds = ", ".join(f"{kind}s: {apart[kind]}" for kind in ("name", "number", "word") if kind in apart)
    total = sum(apart.values())
    lines += [
        "",
        f"Look-alikes that are one letter per word away, in up to three words: {total} of {of:,}, {total / of:.1%} ({kinds}).",
    ]
    return "\n".join([*lines, "", f"`{result['command']}`, {result['date']}, {result['commit']}."])


def _missed(rows: Sequence[Result]) -> list[str]:
    """Return a table of the reasons why questions with typing errors are missed."""
    counts = {(each["reason"], each["errors"]): each["questions"] for each in rows}
    examples = {each["reason"]: each["example"] for each in reversed(rows)}
    lines = header("why it is missed", "with one error", "with two", "example")
    return lines + [
        row(reason, *(f"{counts.get((reason, errors), 0)}" for errors in (1, 2)), example or "–")
        for reason, example in reversed(examples.items())
    ]


@if_measured
def preemption(result: Result) -> str:
    """Return a sentence on the time until background work frees the model (`lab/experiments/preemption_delay.py`)."""
    low, high = result["blocks_over_at_once_range"]
    return (
        f"{result['requests']} requests at random moments of prefill ({result['prompt_tokens']:,} tokens) and decoding, in the shape of "
        f"{result['shape']} on {result['threads']} CPU threads: the model was free after {result['median_s'] * 1e3:.0f} ms (median), "
        f"{result['p95_s'] * 1e3:.0f} ms (95 %), {result['longest_s'] * 1e3:.0f} ms (longest). A prefill in blocks of "
        f"{result['block_tokens']} takes {result['blocks_over_at_once']:.2f} times ({low:.2f}–{high:.2f}) as long as one at once. "
        f"`{result['command']}`, {result['commit']}, {result['date']}."
    )


@if_measured
def lookups(result: Result) -> str:
    """Return the look-up times by number of stored answers (`lab/experiments/answer_lookup.py`)."""
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
    noted = f" {result['note']}." if "note" in result else ""
    return "\n\n".join(("\n".join(lines), about + noted))


_TABLES = {"A": "projection reuse (priced)", "B": "ordinary reuse"}
_WAYS = {"token": "token by token", "lookup": "prompt lookup"}


@if_measured
def whole_systems(result: Result) -> str:
    """Return the tables of `kvweave eval personas`.

    For each length of answers there are two tables of systems and one of pairs of systems; then come the executed requests and
    further experiments.
    """
    about = result["about"]
    parts = [
        f"{about['users']:,} users with {about['questions']:,} questions; kvweave reuses KV by `{about['recipe of kvweave']}`. "
        f"`{about['command']}`, {about['date']}, {about['commit']}. Brackets: 95 % intervals over users.",
    ]
    if about["earlier costs"]:
        earlier = about["earlier costs"]
        parts.append(
            f"Prices come from the times of operations, measured with {earlier['commit']} on {earlier['date']} with {earlier['threads']} threads."
        )
    for answers in about["answers"]:
        for table, title in _TABLES.items():
            rows = [
                each for each in result["systems"] if (each["answers"], each["table"]) == (answers, table)
            ]
            parts += [f"**{answers.capitalize()} answers, {table}: {title}**", "\n".join(_systems(rows))]
        pairs = [each for each in result["pairs"] if each["answers"] == answers]
        parts += [f"**Who is faster, {answers} answers**", "\n".join(_pairs(pairs))]
    parts.append(_figure("mean latency of a question", "personas"))
    if result["executed"]:
        parts += ["**Executed**", _executed_about(result), "\n".join(_executed(result["executed"]))]
    for experiment in dict.fromkeys(each["experiment"] for each in result["further"]):
        rows = [
            each for each in result["further"] if each["experiment"] == experiment and each["table"] == "B"
        ]
        if experiment != "scheduler":
            parts += [
                f"**{experiment.capitalize()}** (B, {rows[0]['answers']} answers, {rows[0]['users']} users)",
                "\n".join(_systems(rows)),
                _figure(f"by {experiment}", f"personas-{experiment}"),
            ]
    if result["scheduler savings"]:
        rows = [each for each in result["further"] if each["experiment"] == "scheduler"]
        title = f"**The scheduler** ({rows[0]['answers']} answers, {rows[0]['users']} users)"
        parts += [title, "\n".join(_savings(result["scheduler savings"]))]
        parts += [_figure("the scheduler, question by question", "personas-scheduler")]
    parts += ["**Operations and items**", "\n".join(_operations(result["operations"]))]
    return "\n\n".join(parts)


@if_measured
def systems_summary(result: Result) -> str:
    """Return the main results of `kvweave eval personas` as a list."""
    about, rows = result["about"], {}
    for each in result["systems"]:
        rows[each["answers"], each["decoding"], each["table"], each["trial"]] = each
    pairs = {
        (each["answers"], each["decoding"], each["table"], each["system"], each["other"]): each["faster"]
        for each in result["pairs"]
    }
    points = [
        f"For {about['users']} generated users with {about['questions']} questions, with prices for the shape of {about['shape']}. All systems "
        "decode in the same way."
    ]
    for answers in about["answers"]:
        for way in about["decodings"]:
            means = ", ".join(
                f"{name} {rows[answers, way, 'B', name]['mean_s']['value']:.2f} s" for name in _NAMED
            )
            against = "; ".join(
                f"{_faster(pairs[answers, way, 'B', 'kvweave', name])} than {name}" for name in _NAMED[1:]
            )
            points.append(
                f"{answers.capitalize()} answers, {_WAYS[way]}, ordinary reuse (B): {means}; kvweave is {against}."
            )
    answers, way = about["answers"][-1], about["decodings"][0]
    named = {name: rows[answers, way, "B", name] for name in ("kvweave", "MeanCache", "PerCache")}
    words = ", ".join(f"{name} {each['other_words']['value']:.1%}" for name, each in named.items())
    ahead = ", ".join(f"{name} {named[name]['foreseen']['value']:.1%}" for name in ("kvweave", "PerCache"))
    points.append(
        f"Share of questions answered with the answer to an earlier or predicted question in other words ({answers} answers): {words}. Share "
        f"of all questions answered with the answer to a predicted question: {ahead}."
    )
    points.append(
        f"With projection reuse (A, priced and not executed), {answers} answers, {_WAYS[way]}, kvweave is "
        f"{_faster(pairs[answers, way, 'A', 'kvweave', 'PerCache'])} than PerCache. With projection reuse every row runs through the model."
    )
    if result["scheduler savings"]:
        saved = ", ".join(
            f"{each['experiment']} {each['idle_flops']:+.1%}" for each in result["scheduler savings"]
        )
        points.append(
            f"Share of the operations at idle time that the scheduler saves ({answers} answers): {saved}. The PerCache paper reports 14.12 % where τ "
            "rises."
        )
    ratios = [each["ratio"] for each in result["executed"]]
    points.append(
        f"Where requests were executed ({about['users executed']} users), the latency is {min(ratios):.2f} to {max(ratios):.2f} times the price, by "
        "system. " + _executed_beside(result)
        if ratios
        else "These latencies are calculated from prices; no request was executed yet."
    )
    return "\n".join(f"- {point}" for point in points)


def _executed_beside(result: Result) -> str:
    """Return a sentence on the measured latency of kvweave and PerCache, which few questions were executed for."""
    rows = result["executed"]
    took = {(row["answers"], row["decoding"], row["system"]): row for row in rows}
    pairs = [
        f"{took[answers, way, 'PerCache']['executed_s']:.2f} and {took[answers, way, 'kvweave']['executed_s']:.2f} s ({answers}, {_WAYS[way]})"
        for answers, way in dict.fromkeys((row["answers"], row["decoding"]) for row in rows)
    ]
    return (
        f"PerCache and kvweave took {', '.join(pairs)}. These are means of {rows[0]['requests']} requests, "
        f"{result['about']['questions executed']} question of each user. They check the prices and are too few to rank the systems."
    )


_NAMED = ("kvweave", "PerCache", "RAGCache + MeanCache", "no cache")


def _faster(saved: Result) -> str:
    """Return a saving of latency in words, with its interval."""
    low, high = sorted((abs(saved["low"]), abs(saved["high"])))
    if saved["low"] < 0 < saved["high"]:
        return f"{abs(saved['value']):.1%} {'faster' if saved['value'] > 0 else 'slower'} (not significant)"
    return f"{abs(saved['value']):.1%} {'faster' if saved['value'] > 0 else 'slower'} ({low:.1%}–{high:.1%})"


_RATES = ("qa_hit", "other_words", "foreseen", "kv_hit", "kv_foreseen")


def _systems(rows: Sequence[Result]) -> Iterable[str]:
    """Yield a table with a row for every trial and a latency column for each way of decoding."""
    ways = list(dict.fromkeys(each["decoding"] for each in rows))
    yield from header(
        *("", *(_WAYS[way] for way in ways), *(f"95 %, {way}" for way in ways)),
        *("QA hit", "other words", "QA ahead", "KV hit", "KV ahead", "ROUGE-L", "exact", "BLEU"),
        *("reply tokens", "drafted", "GFLOP", "idle TFLOP", "MB"),
    )
    for trial in dict.fromkeys(each["trial"] for each in rows):
        own = [each for each in rows if each["trial"] == trial]
        each = own[0]
        yield row(
            trial,
            *(f"{_estimate(one['mean_s'], '.3f')} s" for one in own),
            *(f"{one['tail_s']:.2f} s" for one in own),
            *(f"{each[name]['value']:.1%}" for name in _RATES),
            _estimate(each["rouge_l"], ".3f"),
            f"{each['exact_match']['value']:.3f}",
            "" if each["bleu"] is None else f"{each['bleu']['value']:.3f}",
            f"{each['reply_tokens']:.1f}",
            f"{each['drafted']:.0%}",
            f"{each['request_flops'] / 1e9:,.0f}",
            f"{each['idle_flops'] / 1e12:.2f}",
            f"{each['stored_bytes'] / 1e6:,.1f}",
        )


def _pairs(rows: Sequence[Result]) -> Iterable[str]:
    """Yield a table with a row for every pair of systems and a column for each table and way of decoding."""
    kinds = sorted(
        {(each["table"], each["decoding"]) for each in rows}, key=lambda kind: (kind[0], kind[1] != "token")
    )
    yield from header("", "than", *(f"{table}, {_WAYS[way]}" for table, way in kinds), "ROUGE-L", "exact")
    for pair in dict.fromkeys((each["system"], each["other"]) for each in rows):
        own = {
            (each["table"], each["decoding"]): each
            for each in rows
            if (each["system"], each["other"]) == pair
        }
        each = own[kinds[0]]
        yield row(
            *pair,
            *(_estimate(own[kind]["faster"], "+.1%") for kind in kinds),
            _estimate(each["rouge_l"], "+.3f"),
            _estimate(each["exact_match"], "+.3f"),
        )


def _executed_about(result: Result) -> str:
    about, first = result["about"], result["executed"][0]
    return (
        f"{about['users executed']} users, {about['questions executed']} question each, so {first['requests']} requests of each system, in "
        f"the shape of {about['shape']} on {about['threads']} threads, in one process. Stored KV is read from files that are not in the page "
        "cache. The column *priced* has the same requests with the prices of table B, whose loads are warm."
    )


def _executed(rows: Sequence[Result]) -> Iterable[str]:
    parts = ("load", "prefill", "decode")
    yield from header("answers", "decoding", "", "executed", "priced", "ratio", *parts)
    for each in rows:
        yield row(
            each["answers"],
            _WAYS[each["decoding"]],
            each["system"],
            f"{each['executed_s']:.3f} s",
            f"{each['priced_s']:.3f} s",
            f"{each['ratio']:.2f}",
            *(f"{each[f'{part}_s']:.3f} s ({each[f'priced_{part}_s']:.3f})" for part in parts),
        )


def _savings(rows: Sequence[Result]) -> Iterable[str]:
    yield from header("", "idle operations saved", "latency saved after the change")
    for each in rows:
        yield row(each["experiment"], f"{each['idle_flops']:+.1%}", f"{each['latency']:+.1%}")


def _operations(rows: Sequence[Result]) -> Iterable[str]:
    yield from header("answers", "", "time", "bytes")
    for each in rows:
        seconds = "" if each["seconds"] is None else f"{1e3 * each['seconds']:,.2f} ms"
        size = "" if each["bytes"] is None else f"{each['bytes']:,.0f}"
        yield row(each["answers"], each["name"].replace("in the bank", "in the answer cache"), seconds, size)


def _figure(title: str, name: str) -> str:
    return f"![{title}](images/{name}.png)"


def _estimate(estimate: Result, form: str) -> str:
    low, high = (format(estimate[bound], form) for bound in ("low", "high"))
    return f"{estimate['value']:{form}} ({low}–{high})"
