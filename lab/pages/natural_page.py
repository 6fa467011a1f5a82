"""The generated parts of lab/docs/natural.md: every recipe compared with full attention on a real model, and retrieval."""

from collections.abc import Mapping, Sequence
from typing import Any

from markdown_parts import NOT_MEASURED, Result, between, if_measured, table

from kvweave_lab.eval.rows import OVERALL

RUNS = ("natural_1k.json", "natural.json", "natural_4k.json", "natural_8k.json")
"""The main runs, one for each length of context."""
RATIOS, RETRIEVAL, LANGUAGES = "natural_ratios.json", "natural_retrieval.json", "languages.json"
CHECK, ANSWERS, NEUTRAL = "answer_check.json", "natural_answers.json", "neutral.json"
OTHERS = ("natural_others.json", "natural_storage.json")
"""Recipes and storages that the main runs leave out."""
BUDGETS = ("natural_budgets.json", "natural_budgets_4k.json")
FILES = (*RUNS, RATIOS, RETRIEVAL, LANGUAGES, CHECK, ANSWERS, NEUTRAL, *OTHERS, *BUDGETS)

_OWN, _PREPARATION, _BYTES = "own", "preparation", "bytes"
_TITLES = {
    _OWN: "each on its own preparation",
    _PREPARATION: "at equal preparation",
    _BYTES: "at equal stored bytes",
}
_GAPS = {"kl": "KL", "nll": "NLL"}


def parts(results: Mapping[str, Result | None]) -> dict[str, str]:
    """Return the page's parts by the names of their markers."""
    runs = [run for run in map(results.get, RUNS) if run is not None]
    found = {
        name: result
        for name in (RATIOS, RETRIEVAL, LANGUAGES, CHECK, ANSWERS, NEUTRAL)
        if (result := results[name])
    }
    if not runs or len(found) < 6:
        names = "findings preparations recipes comparisons defaults kinds others budgets ratios retrieval languages check answers"
        return dict.fromkeys(names.split(), NOT_MEASURED)
    return {
        "findings": findings(runs),
        "preparations": preparations(runs),
        "recipes": "\n\n".join(map(recipes, runs)),
        "comparisons": "\n\n".join(map(comparisons, runs)),
        "defaults": defaults(runs, found[NEUTRAL]),
        "kinds": kinds(runs[0]),
        "others": "\n\n".join(other_recipes(results[name]) for name in OTHERS),
        "budgets": "\n\n".join(at_budgets(results[name]) for name in BUDGETS),
        "ratios": at_ratios(found[RATIOS]),
        "retrieval": retrieval(found[RETRIEVAL]),
        "languages": languages(found[LANGUAGES]),
        "check": answer_check(found[CHECK]),
        "answers": answers(found[ANSWERS]),
    }


def _conditions(found: Result) -> str:
    row, chunk = found["rows"][0], found["about"]["chunk_tokens"]
    return f"{row['context_tokens']:,} tokens of context in chunks of up to {chunk}, {row['prompts']} prompts"


def _length(run: Result) -> int:
    return int(run["rows"][0]["context_tokens"])


def _by_recipe(run: Result) -> dict[str, Result]:
    return {row["recipe"]: row for row in run["rows"] if row["context_tokens"] == _length(run)}


def _own_method(run: Result) -> str:
    """Return the method that the run compares all others with."""
    return str(run["comparisons"][0]["against"].rpartition("+")[2])


def findings(runs: Sequence[Result]) -> str:
    """Return the summary: a column per length of context, the main numbers, then the counts of the comparisons."""
    own, rows = _own_method(runs[0]), [_by_recipe(run) for run in runs]
    nll = ("full", "reuse", own, "no context")
    lines = [
        ["prompts", *(f"{found[own]['prompts']}" for found in rows)],
        [
            f"NLL: full attention, plain reuse, `{own}`, no context",
            *(", ".join(f"{found[name]['nll']:.3f}" for name in nll) for found in rows),
        ],
        [
            f"full attention's first token: plain reuse, `{own}`",
            *(", ".join(f"{found[name]['same_first']:.0%}" for name in ("reuse", own)) for found in rows),
        ],
        *(
            [
                f"gap in {title} that `{own}` recovers",
                *(_between(found[own], f"{gap}_recovery", 2) for found in rows),
            ]
            for gap, title in _GAPS.items()
        ),
        *(
            [f"{title}, {how}", *(_counts(_against(run, by, own), gap) for run in runs)]
            for gap, title in _GAPS.items()
            for by, how in _TITLES.items()
        ),
    ]
    return "\n".join(table(("tokens of context", *(f"{_length(run):,}" for run in runs)), lines))


def _against(run: Result, by: str, own: str) -> list[Result]:
    """Return the comparisons of one sort; at equal bytes, only those with the recipe `own`."""
    return [one for one in run["comparisons"] if one["by"] == by and (by != _BYTES or one["against"] == own)]


def _counts(pairs: Sequence[Result], measure: str) -> str:
    """Return how many recipes are worse, level and better, with the names of one or two better ones."""
    low, high = ([pair[f"{measure}_interval"][end] for pair in pairs] for end in (0, 1))
    worse, better = sum(value > 0 for value in low), sum(value < 0 for value in high)
    names = ", ".join(f"`{pair['recipe']}`" for pair, value in zip(pairs, high, strict=True) if value < 0)
    counts = f"{worse} / {len(pairs) - worse - better} / {better}"
    return f"{counts} ({names})" if 0 < better < 3 else counts


def preparations(runs: Sequence[Result]) -> str:
    """Return our own method on each preparation: costs, recovered shares and first tokens, a column per length."""
    own, found = _own_method(runs[0]), [_by_recipe(run) for run in runs]
    measures = {
        "kl_recovery": "gap in KL recovered",
        "nll_recovery": "gap in NLL recovered",
        "same_first": "full attention's first token",
    }
    lines = []
    for name in dict.fromkeys(name for rows in found for name, row in rows.items() if row["method"] == own):
        cells = (f"{rows[name]['offline_passes']:.2f}" if name in rows else "–" for rows in found)
        lines.append([f"`{name}`", "offline passes", *cells])
        for measure, title in measures.items():
            shares = (_between(rows[name], measure, 2) if name in rows else "–" for rows in found)
            lines.append(["", title, *shares])
        for measure, title in _GAPS.items():
            pairs = (_against(run, _BYTES, name) for run in runs)
            counts = (_counts(each, measure) if each else "–" for each in pairs)
            lines.append(["", f"{title}, others {_TITLES[_BYTES]}", *counts])
    return "\n".join(table(("recipe", "measure", *(f"{_length(run):,}" for run in runs)), lines))


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
    """Return the scores of each recipe's generated answers, and how often they equal full attention's."""
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
    """Return the paired differences in KL and NLL with their intervals, by kind of comparison."""
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
    """Return the costs of the recipes that could be the default, and their results on natural and on generated text."""
    assert neutral is not None
    scores = {row["recipe"]: row for row in neutral["rows"] if row["task"] == OVERALL}
    runs = [{row["recipe"]: row for row in run["rows"]} for run in found]
    lengths = [f"{run['rows'][0]['context_tokens']:,}" for run in found]
    columns = (
        *("recipe", "recomputed", "bytes/token", "passes"),
        *(f"recovered, {length} tokens: KL, NLL" for length in lengths),
        "neutral tasks",
    )
    rows = []
    for name in _DEFAULTS:
        own, first = [run.get(name) for run in runs], runs[0][name]
        cells = (
            "–" if row is None else f"{row['kl_recovery']:.2f}, {row['nll_recovery']:.2f}" for row in own
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
    """Return the gap of plain reuse and the share that `weave` recovers, by kind of question."""
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


@if_measured
def other_recipes(found: Result) -> str:
    """Return the results of recipes and storages that the main runs leave out, with `weave` on the same prompts."""
    pairs = [one for one in found["comparisons"] if one["by"] != _BYTES]
    return _tables(found, found["rows"], pairs)


_AT_RATIOS = ("qcfuse", "following+weave", "isolated+weave")


def at_ratios(found: Result) -> str:
    """Return QCFuse and `weave` at several budgets, and their differences at each."""
    rows = [row for row in found["rows"] if row["recipe"] in ("full", "reuse", *_AT_RATIOS)]
    pairs = [one for one in found["comparisons"] if one["recipe"] == "qcfuse" and one["by"] != _BYTES]
    return _tables(found, rows, list(map(_with_ratio, pairs)))


@if_measured
def at_budgets(found: Result) -> str:
    """Return recipes on their own preparation at several budgets, and their differences at each."""
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
    """Return how many answers the check against their passages lets through."""
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
