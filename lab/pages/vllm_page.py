"""The generated parts of lab/docs/vllm.md: first tokens, throughput, the same answers as the transformers engine, and what a causal mask costs."""

from collections.abc import Mapping, Sequence

from markdown_parts import Result, between, folded, if_measured, table

THROUGHPUT, QUALITY, MASK = "vllm_throughput.json", "vllm_quality.json", "causal_mask_cost.json"
TTFT = ("vllm_ttft_bfloat16.json", "vllm_ttft_float32.json")
LIMIT = "vllm_throughput_limit.json"
FILES = (*TTFT, THROUGHPUT, LIMIT, QUALITY, MASK)


def parts(results: Mapping[str, Result | None]) -> dict[str, str]:
    """Return the page's parts by the names of their markers."""
    return {
        "ttft": "\n\n".join(_ttft(results[name]) for name in TTFT),
        "throughput": "\n\n".join(_throughput(results[name]) for name in (THROUGHPUT, LIMIT)),
        "quality": _quality(results[QUALITY]),
        "mask": _mask(results[MASK]),
    }


@if_measured
def _ttft(measured: Result) -> str:
    own = {row["way"]: row for row in measured["rows"]}
    (tokens,) = measured["tokens"]
    rows = [
        ("vLLM's own prefill, nothing cached", own["vllm"], None),
        ("vLLM's prefix cache, after the same chunks in another order", own["prefix"], None),
        *(
            (f"{ratio:.0%} of rows", own[f"rows {ratio:g}"], own.get(f"alone {ratio:g}"))
            for ratio in measured["ratio"]
        ),
    ]
    lines = [
        f"{measured['model']}, {measured['dtype']}, {tokens:,} tokens, {measured['prompts']} prompts:",
        "",
        *table(
            ("way", "median, quartiles", "as many tokens alone", "vLLM's own prefill, times as long"),
            [
                (
                    name,
                    _seconds(row),
                    "" if alone is None else _seconds(alone),
                    f"{row['vllm_over_way']:.2f}",
                )
                for name, row, alone in rows
            ],
        ),
        "",
    ]
    return _with_source(lines, measured)


def _seconds(row: Result) -> str:
    low, middle, high = row["quartiles"]
    return f"{middle:.2f} s ({low:.2f}–{high:.2f})"


@if_measured
def _throughput(measured: Result) -> str:
    corpus = measured["corpus"]
    lines = [
        f"{measured['model']}, {measured['dtype']}: questions to {corpus['documents']} documents ({corpus['chunks']} chunks), "
        f"{measured['tokens']:,} tokens of chunks each, popularity n^-{measured['exponent']:g}, at most {measured['new_tokens']} tokens "
        f"of answer; {measured['requests']} Poisson arrivals a rate.{_prepared(measured)}",
        "",
    ]
    for order, found in measured["orders"].items():
        lines += [
            f"Chunks {order}:",
            "",
            *table(
                ("requests/s", "system", "answered", "served/s", "TTFT p50", "p95", "tokens cached"),
                [_phase(each) for each in found["phases"]],
            ),
            "",
        ]
    return _with_source(lines, measured)


def _prepared(measured: Result) -> str:
    made = measured.get("preparation")
    return f" kvweave's chunks were prepared before, in {made['seconds']:,.0f} s." if made else ""


def _phase(phase: Result) -> tuple[str, ...]:
    ttft = phase["ttft"]
    return (
        f"{phase['rate']:g}",
        f"`{phase['system']}`",
        f"{phase['answered']} of {phase['requests']}",
        f"{phase['requests_per_s']:.3f}",
        "–" if ttft is None else f"{ttft['p50']:.1f} s",
        "–" if phase["ttft_p95_of_all"] is None else f"{phase['ttft_p95_of_all']:.1f} s",
        f"{phase['cached_tokens'] / max(1, phase['prompt_tokens']):.0%}",
    )


@if_measured
def _quality(measured: Result) -> str:
    rows = [
        (f"`{row['recipe']}`", against, *_compared(row[name]))
        for row in measured["rows"]
        for name, against in (("engine", "transformers engine, same recipe"), ("full", "vLLM's full prefill"))
        if name == "engine" or row["recipe"] != "full"
    ]
    lines = [
        f"{measured['model']}, {measured['dtype']}, {measured['rows'][0]['prompts']} prompts of {measured['tokens']:,} tokens in chunks:",
        "",
        *table(
            (
                "vLLM with",
                "against",
                "KL of the first token",
                "same first token",
                "same answer",
                "largest difference of a logit",
            ),
            rows,
        ),
        "",
    ]
    return _with_source(lines, measured)


def _compared(row: Result) -> tuple[str, ...]:
    kl = row["kl"]
    return (
        f"{kl['value']:.2g} ({kl['low']:.2g}–{kl['high']:.2g})",
        *(_share(row[name]) for name in ("same_first", "same_answer")),
        f"{row['largest_difference']:.2g}",
    )


@if_measured
def _mask(measured: Result) -> str:
    rows = [
        (
            f"`{row['recipe']}`",
            f"{row['ratio']:g}",
            "–" if row["later_share"] is None else f"{row['later_share']:.0%}",
            mask,
            _estimate(row[mask]["answer_kl"]),
            _share(row[mask]["agreed"]),
            _share(row[mask]["same_first"]),
            _share(row[mask]["same_answer"]),
        )
        for row in measured["rows"]
        for mask in ("right", "wrong")
    ]
    lines = [
        f"{measured['model']}, {measured['dtype']}, {measured['prompts']} prompts of {measured['context_tokens']:,} tokens in chunks of at "
        f"most {measured['chunk_tokens']}; plain reuse has a KL of {_estimate(measured['reuse']['answer_kl'])}:",
        "",
        *table(
            (
                "recipe",
                "ratio",
                "later tokens seen",
                "mask",
                "KL",
                "tokens kept",
                "first tokens kept",
                "answers the same",
            ),
            rows,
        ),
        "",
    ]
    return _with_source(lines, measured)


def _estimate(found: Result) -> str:
    return between(found["value"], found["low"], found["high"])


def _share(found: Result) -> str:
    return f"{found['value']:.0%} ({found['low']:.0%}–{found['high']:.0%})"


def _with_source(lines: Sequence[str], measured: Result) -> str:
    about = f"{measured['machine']}, {measured['threads']} threads, {measured['date'][:10]}"
    return "\n".join([*lines, *folded([measured["command"]], about)])
