"""The figures and tables of PerCache."""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from figure_rows import (
    REFERENCE,
    Figure,
    Results,
    Seen,
    above,
    in_words,
    number,
    reaches,
    shown,
    single,
    together,
    without_verdict,
)

BEST_OTHER = "RAGCache + MeanCache"


def _personas(results: Results) -> Mapping[str, Any] | None:
    """Return the result with only the rows of the paper's setting: the longest answers, decoded token by token."""
    found = results("personas")
    if found is None:
        return None
    answers = found["about"]["answers"][-1]
    kept = {
        name: [row for row in found[name] if (row["answers"], row["decoding"]) == (answers, "token")]
        for name in ("systems", "pairs", "further")
    }
    return {**found, **kept}


def _users(found: Mapping[str, Any]) -> str:
    about = found["about"]
    return f"{REFERENCE}, {about['users']} generated users of {about['questions of a user']} questions, {about['answers'][-1]} answers, times priced from the shape of {about['shape']}"


def _of_users(found: Mapping[str, Any], count: str) -> str:
    return f"{REFERENCE}, {found['about'][count]} of those users"


def _trials(found: Mapping[str, Any], experiment: str) -> dict[str, Mapping[str, Any]]:
    """Return the trials of an experiment with PerCache's own reuse of projections, by name.

    Table B of the result lets every system skip stored tokens altogether, which PerCache does not do.
    """
    rows = [*found["systems"], *found["further"]]
    return {row["trial"]: row for row in rows if (row["table"], row["experiment"]) == ("A", experiment)}


def _latency(results: Results) -> Seen | None:
    found = _personas(results)
    if found is None:
        return None
    pairs = [row for row in found["pairs"] if row["system"] == "PerCache" and "kvweave" not in row["other"]]
    gains = {(row["table"], row["other"]): number(row["faster"]) for row in pairs}
    own = [gain for (table, _), gain in gains.items() if table == "A"]
    held = together(above(gain, 0.0) for gain in own)
    best = gains["A", BEST_OTHER], gains["B", BEST_OTHER]
    text = f"{'faster than every other' if held else 'not faster than every other'}; than `{BEST_OTHER}` by {shown(best[0], '.1%')}, where every system skips stored tokens {shown(best[1], '.1%')} (paper 12.6 %)"
    return Seen(held, _users(found), text)


def _ablation(results: Results) -> Seen | None:
    found = _personas(results)
    if found is None:
        return None
    rows = _trials(found, "ablation")
    whole = number(rows["PerCache"]["mean_s"])
    parts = {
        name: number(rows[f"PerCache without {name}"]["mean_s"]) for name in ("answers", "KV", "prediction")
    }
    points = [above(part, whole) for part in parts.values()]
    text = ", ".join(f"without {name} {shown(part, '.2f')} s" for name, part in parts.items())
    where = f"{_of_users(found, 'users of ablations')}; without intervals for pairs"
    return Seen(together(points), where, f"{shown(whole, '.2f')} s; {text}", in_words(points))


def _hits(results: Results) -> Seen | None:
    found = _personas(results)
    if found is None:
        return None
    rows = _trials(found, "ablation")
    gains = {
        kind: rows["PerCache"][kind]["value"] - rows["PerCache without prediction"][kind]["value"]
        for kind in ("kv_hit", "qa_hit")
    }
    where = _of_users(found, "users of ablations")
    text = (
        f"hits of KV +{gains['kv_hit']:.1%}, of answers +{gains['qa_hit']:.1%} (paper up to 37.6 and 13.8 %)"
    )
    held = together([reaches(gains["kv_hit"], 0.1163, even=0.0), reaches(gains["qa_hit"], 0.0678, even=0.0)])
    return Seen(held, where, text)


def _scheduler(results: Results) -> Seen | None:
    found = _personas(results)
    if found is None:
        return None
    saved = {row["experiment"]: row["idle_flops"] for row in found["scheduler savings"]}
    text = ", ".join(f"{name}: {value:.1%}" for name, value in saved.items())
    where = _of_users(found, "users of ablations")
    return Seen(
        reaches(saved["τ rises"], 0.1412, even=0.0),
        where,
        f"computation saved at idle time, {text} (paper 14.1 %)",
    )


def _stride(results: Results) -> Seen | None:
    return _series(results, "stride", "PerCache ", "strides 1 to 5")


def _storage(results: Results) -> Seen | None:
    return _series(results, "storage", "PerCache ", "limits of 6 to 48 MB")


def _series(results: Results, experiment: str, name: str, label: str) -> Seen | None:
    found = _personas(results)
    if found is None:
        return None
    rows = _trials(found, experiment)
    if not rows:
        return _not_swept(found)
    times = [row["mean_s"]["value"] for trial, row in rows.items() if trial.startswith(name)]
    held = times[-1] < times[0] and all(later < 1.01 * earlier for earlier, later in pairwise(times))
    seen = Seen(
        held,
        _of_users(found, "users of further experiments"),
        f"{label}: {', '.join(f'{value:.3f}' for value in times)} s",
    )
    return without_verdict(seen, _one_user(found))


def _one_user(found: Mapping[str, Any]) -> str:
    return single(found["about"]["users of further experiments"], "user")


def _not_swept(found: Mapping[str, Any]) -> Seen:
    users = found["about"]["users of further experiments"]
    return Seen(
        None,
        f"{REFERENCE}, {found['about']['answers'][-1]} answers",
        f"{users} users ran it",
        "not measured yet",
    )


def _threshold(results: Results) -> Seen | None:
    found = _personas(results)
    if found is None:
        return None
    if not _trials(found, "threshold"):
        return _not_swept(found)
    rows = [row for name, row in _trials(found, "threshold").items() if name.startswith("PerCache ")]
    slower = rows[-1]["mean_s"]["value"] > rows[0]["mean_s"]["value"]
    fewer = rows[-1]["qa_hit"]["value"] < rows[0]["qa_hit"]["value"]
    better = rows[-1]["rouge_l"]["value"] > rows[0]["rouge_l"]["value"]
    text = (
        f"τ 0.6 to 0.95: {rows[0]['mean_s']['value']:.3f} to {rows[-1]['mean_s']['value']:.3f} s, hits"
        f" {rows[0]['qa_hit']['value']:.0%} to {rows[-1]['qa_hit']['value']:.0%}, ROUGE-L {rows[0]['rouge_l']['value']:.3f} to"
        f" {rows[-1]['rouge_l']['value']:.3f}"
    )
    seen = Seen(together([slower, fewer, better]), _of_users(found, "users of further experiments"), text)
    return without_verdict(seen, _one_user(found))


def _quality(results: Results) -> Seen | None:
    found = _personas(results)
    if found is None:
        return None
    (pair,) = (
        row
        for row in found["pairs"]
        if (row["table"], row["system"], row["other"]) == ("A", "PerCache", "no cache")
    )
    change = number(pair["rouge_l"])
    held = None if change.low <= 0 <= change.high else change.low > -0.05
    return Seen(
        held, _users(found), f"ROUGE-L against no cache {shown(change, '+.3f')}; stable means −0.05 or better"
    )


_VOLUNTEERS = "recordings and mail of volunteers are not public; users here are generated"
_PHONES = "needs the telephones"

ROWS = (
    Figure("figs. 2, 3, 5, 6", "A user's questions are alike now and then, chunks are retrieved again, caches that react hit rarely.", _VOLUNTEERS),
    Figure("figs. 4, 11–13", "Where the time of single questions goes.", _PHONES),
    Figure("fig. 14", "Lowest latency, 12.6 % below the best other pair.", _latency),
    Figure("fig. 15", "The scheduler saves 14.1 % of the computation when τ rises.", _scheduler),
    Figure("fig. 16a", "Without answers, KV or prediction it is slower.", _ablation),
    Figure("fig. 16b", "Prediction raises the hits of both layers.", _hits),
    Figure("fig. 17 (stride)", "Latency falls a little with the stride.", _stride),
    Figure("fig. 18 (storage)", "Latency falls with the storage limit.", _storage),
    Figure("fig. 19", "A higher threshold answers better, later, with fewer hits.", _threshold),
    Figure("fig. 20", "51 fills of the cache take a tenth of the battery.", _PHONES),
    Figure("figs. 21, 22", "The same on other telephones and with Qwen 1.8B.", _PHONES),
    Figure("fig. 23", "The quality of answers stays about the same.", _quality),
    Figure("table 1", "Prefill takes 78 % and decoding 14 % of the time.", "times here are priced from another machine's, so their shares say nothing about the telephone's"),
)  # fmt: skip
"""Figures 1, 7 to 10 and 24 to 28 are drawings and prompts."""
