"""The figures and tables of DynaKV."""

from collections.abc import Mapping
from typing import Any

from figure_rows import (
    LONGER,
    NOT_MEASURED,
    Figure,
    Number,
    Results,
    Seen,
    above,
    number,
    reaches,
    shown,
    single,
    together,
    without_verdict,
)


def _where(found: Mapping[str, Any], tokens: int) -> str:
    about = found["about"]
    return f"{LONGER}, {about['prompt_tokens']} tokens and {tokens:,} decoded, {about['texts']} texts"


def _longest(results: Results) -> tuple[Mapping[str, Any], int, dict[str, Mapping[str, Any]]] | None:
    found = results("decoding")
    if found is None:
        return None
    tokens = max(row["decode_tokens"] for row in found["rows"])
    rows = {
        row["strategy"]: row
        for row in found["rows"]
        if row["task"] == "overall" and row["decode_tokens"] == tokens
    }
    return found, tokens, rows


def _accuracy(results: Results) -> Seen | None:
    seen = _longest(results)
    if seen is None:
        return None
    found, tokens, rows = seen
    share: dict[str, Number] = {
        name: number(rows[name], "score_of_dense") for name in ("dynakv", "local", "static")
    }
    held = together(above(share["dynakv"], share[other]) for other in ("local", "static"))
    text = ", ".join(f"`{name}` {shown(value)}" for name, value in share.items())
    seen = Seen(held, _where(found, tokens), f"of full attention's score: {text}")
    return without_verdict(seen, _more_bytes(rows))


def _more_bytes(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Return by how much more `dynakv` reads than the others, or nothing if it reads as little as each of them."""
    others = {
        name: rows["dynakv"]["bytes_per_token"] / rows[name]["bytes_per_token"]
        for name in ("local", "static")
    }
    more = [f"{times:.1f} times the bytes of `{name}`" for name, times in others.items() if times > 1]
    return f"`dynakv` reads {' and '.join(more)} for a token" if more else ""


def _latency(results: Results) -> Seen | None:
    found = results("decoding_ablations")
    if found is None:
        return None
    time = {row["strategy"]: row["latency_s_per_token"] for row in found["rows"]}
    gains = {other: time[other] / time["dynakv"] for other in ("entries", "static", "local")}
    least = {"entries": 2.0, "static": 1.47, "local": 1.31}
    held = together(reaches(gains[other], least[other]) for other in gains)
    text = ", ".join(f"than `{other}` {gain:.2f}×" for other, gain in gains.items())
    where = f"{_where(found, 2048)}; `static` and `local` read less and miss more"
    return Seen(held, where, f"{text} (paper 2.00, 1.47, 1.31)")


def _variance(results: Results) -> Seen | None:
    seen = _longest(results)
    if seen is None:
        return None
    found, tokens, rows = seen
    spread = {name: rows[name]["cluster_variance"] for name in ("static", "local", "dynakv")}
    held = spread["dynakv"] < min(spread["static"], spread["local"])
    text = ", ".join(f"`{name}` {value:.0f}" for name, value in spread.items())
    return Seen(held, f"{_where(found, tokens)}; `local` makes more clusters", text)


def _returns(results: Results) -> Seen | None:
    found = results("decoding")
    if found is None:
        return None
    (row,) = (row for row in found["returns"] if row["strategy"] == "dynakv")
    pairs = list(zip(found["about"]["retrieved_after_steps"], row["updated"], row["any"], strict=True))
    text = ", ".join(f"after {steps}: {updated:.0%} (any {any_:.0%})" for steps, updated, any_ in pairs)
    held = pairs[0][1] > pairs[0][2]
    return Seen(held, f"{LONGER}, all lengths", f"{text}; held means above any cluster at the next token")


def _ablation(results: Results, variant: str, what: str) -> tuple[float, float, Mapping[str, Any]] | None:
    found = results("decoding_ablations")
    if found is None:
        return None
    rows = {row["strategy"]: row for row in found["rows"]}
    return rows["dynakv"][what], rows[f"dynakv/{variant}"][what], found


def _delayed(results: Results) -> Seen | None:
    seen = _ablation(results, "immediate-split", "split_bytes_per_token")
    if seen is None:
        return None
    delayed, at_once, found = seen
    reads = _ablation(results, "immediate-split", "bytes_per_token")
    assert reads is not None
    text = (
        f"read for splits {delayed:,.0f} bytes a token against {at_once:,.0f} at once; of all reads {reads[0]:,.0f}"
        f" against {reads[1]:,.0f}"
    )
    return Seen(reaches(reads[1] / reads[0], 2.32), _where(found, 2048), text)


def _runs(results: Results) -> Seen | None:
    found = results("decoding_ablations")
    if found is None:
        return None
    run = {row["strategy"]: row["mean_run_entries"] for row in found["rows"]}
    held = reaches(run["dynakv"], 25.3, even=run["entries"])
    text = f"{run['dynakv']:.1f} entries in a run against {run['entries']:.1f} in sequence order (paper 25.3–40.8, 7.9)"
    return Seen(held, _where(found, 2048), text)


def _pools(results: Results) -> Seen | None:
    seen = _ablation(results, "packed", "moved_bytes_per_token")
    if seen is None:
        return None
    pools, packed, found = seen
    text = f"moves {pools:,.0f} bytes a token against {packed:,.0f} packed, {packed / pools:.0f} times fewer (paper over 10,000)"
    return Seen(reaches(packed / pools, 1e4), _where(found, 2048), text)


def _policy(results: Results) -> Seen | None:
    found = results("decoding_ablations")
    if found is None:
        return None
    rows = {row["strategy"]: row for row in found["rows"]}
    hit = {name: rows[name]["hit_rate"] for name in ("dynakv", "dynakv/lru")}
    faster = rows["dynakv/lru"]["latency_s_per_token"] / rows["dynakv"]["latency_s_per_token"]
    text = f"hits {hit['dynakv']:.0%} against LRU's {hit['dynakv/lru']:.0%}, {faster:.2f} times as fast (paper up to 1.12)"
    return Seen(
        together([hit["dynakv"] > hit["dynakv/lru"], reaches(faster, 1.12)]), _where(found, 2048), text
    )


def _shift(results: Results) -> Seen | None:
    found = results("decoding_ablations")
    if found is None:
        return None
    spread = {part["update"]: part for part in found["shift"]["groupings"]}
    gap = {name: part["variance"] / part["anew"] - 1 for name, part in spread.items()}
    held = gap["dynakv"] < min(gap["static"], gap["local"])
    text = ", ".join(f"`{name}` {value:+.0%}" for name, value in gap.items())
    seen = Seen(
        held,
        f"{LONGER}, one text, one layer and head",
        f"variance above a grouping anew into as many clusters: {text}",
    )
    return without_verdict(seen, single(1, "text, layer and head"))


def _lengths(results: Results) -> Seen | None:
    found = results("decoding")
    if found is None:
        return None
    rows = sorted(
        (row for row in found["rows"] if row["task"] == "overall" and row["strategy"] == "dynakv"),
        key=lambda row: int(row["decode_tokens"]),
    )
    first, last = rows[0], rows[-1]
    held = (
        last["latency_s_per_token"] / first["latency_s_per_token"]
        <= 1.1 * last["decode_tokens"] / first["decode_tokens"]
    )
    text = ", ".join(f"{row['decode_tokens']:,}: {1000 * row['latency_s_per_token']:.0f} ms" for row in rows)
    longest = last["decode_tokens"]
    label = f"held up to {longest:,} tokens" if held and longest < CLAIMED_TOKENS else ""
    return Seen(held, f"{LONGER}, {found['about']['texts']} texts", text, label)


CLAIMED_TOKENS = 16_384
"""The length up to which table 6 goes."""

_PHONES = "needs the telephones"

ROWS = (
    Figure("fig. 4", "Keys drift while decoding; only DynaKV's clusters follow them.", _shift),
    Figure("fig. 3b", "Flash reads small pieces at a fraction of its bandwidth.", "the flash of telephones is not at hand"),
    Figure("table 1", "KV outgrows 8-bit weights within a few ten thousand tokens.", "arithmetic on two models' shapes; nothing to measure"),
    Figure("fig. 7", "Some clusters are retrieved together often.", "co-retrieval counts are used for the layout and are not stored", NOT_MEASURED),
    Figure("table 2", "Clusters that were just changed are retrieved again soon: 30–59 % at the next token.", _returns),
    Figure("fig. 10a", "More accurate than PQCache and ClusterKV, close to no clusters.", _accuracy),
    Figure("fig. 10b", "2.00, 1.47 and 1.31 times as fast as no clusters, PQCache and ClusterKV.", _latency),
    Figure("fig. 10c", "1.6–2.1 times the effective bandwidth.", "bandwidth of a telephone's flash"),
    Figure("table 5", "The lowest variance in clusters.", _variance),
    Figure("fig. 11", "Delayed splits transfer 2.3 times less.", _delayed),
    Figure("fig. 12", "Runs of 25 to 41 entries on flash instead of 8.", _runs),
    Figure("fig. 13", "Pools of two clusters move 10,000 times fewer bytes.", _pools),
    Figure("fig. 14a", "Virtual cache space takes up to 2.2 times less memory.", "memory is a limit here that all strategies keep, not a result"),
    Figure("fig. 14b", "The cache hits more than LRU and is up to 1.12 times as fast.", _policy),
    Figure("table 6", "Time per token grows no faster than the length, up to 16K.", _lengths),
    Figure("fig. 15", "Faster than the others at every share retrieved.", "one share, 15 %, was measured", NOT_MEASURED),
    Figure("figs. 16–18", "The same at other precisions, on other telephones, with less energy.", _PHONES),
)  # fmt: skip
"""Figures 1, 2, 3a, 5, 6, 8 and 9 and tables 3 and 4 are drawings and settings."""
