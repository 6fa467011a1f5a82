"""The generated parts of lab/docs/natural.md: recipes beside full attention on a real model, and what retrieval found."""

from collections.abc import Sequence
from typing import Any

from markdown_parts import NOT_MEASURED, Result, between, table

from kvweave_lab.eval.rows import OVERALL

_OWN, _PREPARATION, _BYTES = "own", "preparation", "bytes"
_TITLES = {
    _OWN: "each on its own preparation",
    _PREPARATION: "at equal preparation",
    _BYTES: "at equal stored bytes",
}


def parts(
    runs: Sequence[Result | None],
    ratios: Result | None,
    retrieved: Result | None,
    asked: Result | None,
    checked: Result | None,
    answered: Result | None,
    others: Sequence[Result | None],
    budgets: Sequence[Result | None],
    neutral: Result | None,
) -> dict[str, str]:
    """Return the page's parts by the names of their markers.

    Each run is about one length, `ratios` about QCFuse at its own budgets, `others` about recipes and storages that are not in the runs,
    `budgets` about other budgets than theirs, `neutral` about generated tasks on another model.
    """
    found = [run for run in runs if run is not None]
    if not found or not all((ratios, retrieved, asked, checked, answered, neutral)):
        names = (
            "findings",
            "defaults",
            "kinds",
            "recipes",
            "comparisons",
            "others",
            "budgets",
            "ratios",
            "retrieval",
            "languages",
            "check",
            "answers",
        )
        return dict.fromkeys(names, NOT_MEASURED)
    return {
        "findings": "\n".join(map(findings, found)),
        "recipes": "\n\n".join(map(recipes, found)),
        "comparisons": "\n\n".join(map(comparisons, found)),
        "defaults": defaults(found, neutral),
        "kinds": kinds(found[0]),
        "others": "\n\n".join(map(other_recipes, others)),
        "budgets": "\n\n".join(map(at_budgets, budgets)),
        "ratios": at_ratios(ratios),
        "retrieval": retrieval(retrieved),
        "languages": languages(asked),
        "check": answer_check(checked),
        "answers": answers(answered),
    }


def _conditions(found: Result) -> str:
    row, chunk = found["rows"][0], found["about"]["chunk_tokens"]
    return f"{row['context_tokens']:,} tokens of context in chunks of up to {chunk}, {row['prompts']} prompts"


def findings(found: Result) -> str:
    """Return what the comparisons say of the method that all others are compared with."""
    lines = [*_gap(found)]
    own = found["comparisons"][0]["against"].rpartition("+")[2]
    for title, compared in _compared(found["comparisons"], own):
        for measure, worse, better in (
            ("kl", "farther from", "nearer to"),
            ("nll", "worse than", "better than"),
        ):
            lines.append(f"  - {measure.upper()}, {title}: {_counted(compared, measure, worse, better)}")
    return "\n".join(lines)


def _compared(comparisons: Sequence[Result], own: str) -> list[tuple[str, list[Result]]]:
    """Return comparisons with our own method: on every preparation, and at the bytes of its own and of isolated chunks."""
    found = {
        _TITLES[_OWN]: [one for one in comparisons if one["by"] == _OWN],
        _TITLES[_PREPARATION]: [one for one in comparisons if one["by"] == _PREPARATION],
        f"{_TITLES[_BYTES]} as `{own}`": [
            one for one in comparisons if (one["by"], one["against"]) == (_BYTES, own)
        ],
        f"{_TITLES[_BYTES]} as `isolated+{own}`": [
            one for one in comparisons if (one["by"], one["against"]) == (_BYTES, f"isolated+{own}")
        ],
    }
    return [(title, rows) for title, rows in found.items() if rows]


def _gap(found: Result) -> list[str]:
    """Return what reuse loses, and what the compared method wins back of it."""
    length = found["rows"][0]["context_tokens"]  # that of `_conditions`
    rows = {row["recipe"]: row for row in found["rows"] if row["context_tokens"] == length}
    full, reuse, nothing = rows["full"], rows["reuse"], rows["no context"]
    own = rows.get(found["comparisons"][0]["against"].rpartition("+")[2])
    lines = [
        f"- {_conditions(found)}: NLL is {full['nll']:.3f} with full attention, {reuse['nll']:.3f} with plain reuse and "
        f"{nothing['nll']:.3f} without any context, so reuse loses {(reuse['nll'] - full['nll']) / (nothing['nll'] - full['nll']):.0%} "
        f"of what the context gives. The first token is full attention's in {reuse['same_first']:.0%} of the prompts."
    ]
    if own:
        of_its_kind = [row for row in rows.values() if row["method"] == own["method"]]
        lines += map(_recovered, [own, *(row for row in of_its_kind if row != own)])
    return lines


def _recovered(row: Result) -> str:
    return (
        f"  - `{row['recipe']}` at {row['ratio']:.0%}, {row['offline_passes']:.2f} passes offline, recovers "
        f"{_between(row, 'kl_recovery', 2)} of the gap in KL and {_between(row, 'nll_recovery', 2)} of that in NLL; the first token "
        f"is the same in {row['same_first']:.0%}."
    )


def _counted(rows: list[Result], measure: str, worse: str, better: str) -> str:
    interval = f"{measure}_interval"
    above = sum(one[interval][0] > 0 for one in rows)
    below = [f"`{one['recipe']}`" for one in rows if one[interval][1] < 0]
    against = {one["against"] for one in rows}
    method = (
        f"`{against.pop()}`"
        if len(against) == 1
        else f"`{rows[0]['against'].rpartition('+')[2]}` on the same chunks"
    )
    than = f"full attention than {method}" if measure == "kl" else method
    return (
        f"of the {len(rows)} others measured, {above} {worse} {than}, {len(below)} {better.split()[0]}"
        f"{' (' + ', '.join(below) + ')' if below else ''}, {len(rows) - above - len(below)} open."
    )


def recipes(found: Result) -> str:
    """Return a row per length, recipe and budget, nearest to full attention first."""
    lines = []
    for length in dict.fromkeys(row["context_tokens"] for row in found["rows"]):
        rows = [row for row in found["rows"] if row["context_tokens"] == length]
        lines += [f"{_conditions(found | {'rows': rows})}:", ""]
        lines += table(
            (
                "recipe",
                "recomputed",
                "bytes/token",
                "passes",
                "NLL",
                "KL",
                "KL recovered",
                "NLL recovered",
                "PGR",
                "KL, first token",
                "same first",
            ),
            [_recipe(row) for row in sorted(rows, key=lambda row: row["kl"])],
        )
        lines.append("")
    about = found["about"]
    lines += [
        f"{about['model']}, {about['dtype']}, {about['split']} split, {about['date']}, {about['machine']}.",
        "",
        "```",
        about["command"],
        "```",
    ]
    return "\n".join(lines)


def _recipe(row: Result) -> list[str]:
    stored = row["bytes_per_token"]
    return [
        f"`{row['recipe']}`",
        "–" if row["ratio"] is None else f"{row['ratio']:.0%}",
        "–" if stored is None else f"{stored:,.0f}",
        "–" if row["offline_passes"] is None else f"{row['offline_passes']:.2f}",
        _between(row, "nll"),
        _between(row, "kl", 4),
        _between(row, "kl_recovery", 2),
        _between(row, "nll_recovery", 2),
        _between(row, "nll_pgr", 2),
        _between(row, "first_kl"),
        _between(row, "same_first", 2),
    ]


def answers(found: Result) -> str:
    """Return how right each recipe's generated answers are, and how often they are full attention's."""
    against = {one["recipe"]: one for one in found["comparisons"] if one["by"] == _OWN}
    ours = found["comparisons"][0]["against"].rpartition("+")[2]
    columns = ("recipe", "F1", "contains a reference", "full attention's answer", f"F1 − `{ours}`")
    rows = [
        [
            f"`{row['recipe']}`",
            _between(row, "f1"),
            _between(row, "contains", 2),
            _between(row, "same_answer", 2),
            _between(against[row["recipe"]], "f1") if row["recipe"] in against else "–",
        ]
        for row in sorted(found["rows"], key=lambda row: -row["same_answer"])
    ]
    return "\n".join(
        [f"{_conditions(found)}:", "", *table(columns, rows), "", "```", found["about"]["command"], "```"]
    )


def comparisons(found: Result) -> str:
    """Return the paired differences: with what both have in common, and both differences with their intervals."""
    rows = [
        [
            _TITLES[one["by"]],
            one["group"],
            f"`{one['recipe']}` − `{one['against']}`",
            _between(one, "kl", 4),
            _between(one, "nll"),
        ]
        for one in found["comparisons"]
    ]
    lines = table(("compared", "on", "difference", "KL", "NLL"), rows)
    return "\n".join([f"{_conditions(found)}:", "", *lines])


def _tables(found: Result, rows: list[Result], pairs: list[Result]) -> str:
    """Return the tables of some of a run's rows and comparisons."""
    return "\n\n".join(
        (recipes(found | {"rows": rows}), comparisons(found | {"rows": rows, "comparisons": pairs}))
    )


_DEFAULTS = ("reuse", "following+reuse", "following+weave", "woven+prophetkv", "weave")


def defaults(found: Sequence[Result], neutral: Result | None) -> str:
    """Return what recipes that could be the default cost, and what they reach on natural and on generated text."""
    assert neutral is not None
    scores = {row["recipe"]: row for row in neutral["rows"] if row["task"] == OVERALL}
    runs = [{row["recipe"]: row for row in run["rows"]} for run in found]
    lengths = [f"{run['rows'][0]['context_tokens']:,}" for run in found]
    columns = (
        "recipe",
        "recomputed",
        "bytes/token",
        "passes",
        *(f"{measure} recovered, {length}" for measure in ("KL", "NLL") for length in lengths),
        "neutral tasks",
    )
    rows = []
    for name in _DEFAULTS:
        own, first = [run.get(name) for run in runs], runs[0][name]
        cells = (
            "–" if row is None else f"{row[measure]:.2f}"
            for measure in ("kl_recovery", "nll_recovery")
            for row in own
        )
        score = scores.get(name)
        rows.append(
            [
                f"`{name}`",
                f"{first['ratio']:.0%}",
                f"{first['bytes_per_token']:,.0f}",
                f"{first['offline_passes']:.2f}",
                *cells,
                "–" if score is None else _between(score, "score"),
            ]
        )
    full = scores["full"]
    return "\n".join(
        [
            *table(columns, rows),
            "",
            f"Bytes and passes at {lengths[0]} tokens. Neutral tasks: the shipped model, {full['context_tokens']:,} tokens, {full['samples']:,} prompts; "
            f"full attention {full['score']:.3f}.",
        ]
    )


_KINDS = {
    "within": "within a paragraph",
    "paragraphs": "across paragraphs",
    "documents": "across two documents",
    "revised": "revised facts",
    "number": "numbers",
    "all evidence": "all evidence in the context",
}


def kinds(found: Result) -> str:
    """Return what reuse loses and `weave` wins back, by kind of question."""
    rows = []
    for kind, title in _KINDS.items():
        own = {row["recipe"]: row for row in found["subsets"][kind]}
        full, reuse, weave = own["full"], own["reuse"], own["weave"]
        rows.append(
            [
                title,
                f"{weave['prompts']}",
                f"{full['nll']:.3f}",
                f"{reuse['nll']:.3f}",
                f"{reuse['kl']:.4f}",
                _between(weave, "nll_recovery", 2),
                _between(weave, "kl_recovery", 2),
                _between(weave, "same_first", 2),
            ]
        )
    columns = (
        "questions",
        "prompts",
        "NLL, full",
        "NLL, reuse",
        "KL, reuse",
        "NLL recovered by `weave`",
        "KL recovered",
        "same first",
    )
    return "\n".join([f"{_conditions(found)}:", "", *table(columns, rows)])


def other_recipes(found: Result | None) -> str:
    """Return recipes and storages that the tables above leave out, beside `weave` on the same prompts."""
    if found is None:
        return NOT_MEASURED
    pairs = [one for one in found["comparisons"] if one["by"] != _BYTES]
    return _tables(found, found["rows"], pairs)


_AT_RATIOS = ("qcfuse", "following+weave", "isolated+weave")


def at_ratios(found: Result) -> str:
    """Return QCFuse and `weave` at several budgets, and their differences at each."""
    rows = [row for row in found["rows"] if row["recipe"] in ("full", "reuse", *_AT_RATIOS)]
    pairs = [one for one in found["comparisons"] if one["recipe"] == "qcfuse" and one["by"] != _BYTES]
    return _tables(found, rows, list(map(_with_ratio, pairs)))


def at_budgets(found: Result | None) -> str:
    """Return recipes on their own preparation at several budgets, and their differences at each."""
    if found is None:
        return NOT_MEASURED
    pairs = [one for one in found["comparisons"] if one["by"] == _OWN]
    return _tables(found, found["rows"], list(map(_with_ratio, pairs)))


def _with_ratio(pair: Result) -> Result:
    return pair | {"group": f"{pair['group']}, {pair['ratio']:.0%}"}


def retrieval(found: Result) -> str:
    """Return how often evidence is among the best chunks, by ranking, and how often neighbours meet in a context."""
    figures = found["retrieval"]
    columns = ("ranking", *(f"recall@{depth}" for depth in figures["depths"]), "MRR")
    rows = [
        [one["name"], *(_estimate(each) for each in one["recall"]), _estimate(one["mrr"])]
        for one in figures["rankings"]
    ]
    counts = figures["neighbours"]
    met = (
        "context",
        *(f"any of {count}" for count in counts),
        *(f"of {count}" for count in counts),
        "by chance",
    )
    shares = [
        [
            f"{one['context_tokens']:,}",
            *(f"{share['value']:.3f}" for share in (*one["any_together"], *one["together"])),
            f"{one['by_chance']:.4f}",
        ]
        for one in figures["contexts"]
    ]
    return "\n".join(
        [
            f"Evidence of {figures['questions']} questions among {figures['library_chunks']:,} chunks:",
            "",
            *table(columns, rows),
            "",
            "Chunks with one of their nearest neighbours in the same context, and the share of these neighbours (FusionRAG fig. 7a):",
            "",
            *table(met, shares),
            "",
            "Chunks to be computed again when one document changes, on average:",
            "",
            *table(
                ("the document's own", *(f"of others, {count} nearest" for count in counts)),
                [
                    [
                        _estimate(figures["change"]["own"]),
                        *(_estimate(each) for each in figures["change"]["others"]),
                    ]
                ],
            ),
            "",
            "```",
            found["about"]["command"],
            "```",
        ]
    )


_LANGUAGES = {"de": "German", "fr": "French", "es": "Spanish", "zh": "Chinese", "ar": "Arabic"}


def languages(found: Result) -> str:
    """Return how often each language's evidence is among the best chunks, by ranking."""
    rankings, depths = ("words", "vectors", "hybrid"), found["depths"]
    columns = (
        "language",
        "questions",
        *(f"{ranking}, recall@{depth}" for ranking in rankings for depth in depths),
    )
    rows = [
        [
            _LANGUAGES[one["language"]],
            f"{one['questions']}",
            *(f"{share:.2f}" for ranking in rankings for share in one[ranking]),
        ]
        for one in found["languages"]
    ]
    return "\n".join(
        [
            f"Vectors are those of {found['embedding']}; the languages' {found['chunks']} chunks are in one knowledge base:",
            "",
            *table(columns, rows),
            "",
            "```",
            found["command"],
            "```",
        ]
    )


def answer_check(found: Result) -> str:
    """Return what checking answers against their passages gives and refuses."""
    rows = [
        [title, str(one["questions"]), str(one["right"]), str(one["given"]), str(one["right_and_given"])]
        for title, one in (
            ("not in the documents", found["unanswerable"]),
            ("in the documents", found["answerable"]),
        )
    ]
    columns = ("answer", "questions", "right", "given by the check", "right among these")
    return "\n".join(
        [
            f"{found['model']}, full attention, {found['split']} split:",
            "",
            *table(columns, rows),
            "",
            f"`{found['command']}`, {found['date']}.",
        ]
    )


def _between(row: Result, name: str, digits: int = 3) -> str:
    if row[name] is None:
        return "–"
    return between(row[name], *row[f"{name}_interval"], digits)


def _estimate(value: Any) -> str:
    return between(value["value"], value["low"], value["high"], 2)
