"""The generated parts of lab/docs/vllm.md: throughput, the same answers as the transformers engine, and what a causal mask costs."""

from collections.abc import Mapping, Sequence

from markdown_parts import Result, between, folded, if_measured, table

THROUGHPUT, QUALITY, MASK = "vllm_throughput.json", "vllm_quality.json", "causal_mask_cost.json"
FILES = (THROUGHPUT, QUALITY, MASK)


def parts(results: Mapping[str, Result | None]) -> dict[str, str]:
    """Return the page's parts by the names of their markers."""
    return {
        "throughput": _throughput(results[THROUGHPUT]),
        "quality": _quality(results[QUALITY]),
        "mask": _mask(results[MASK]),
    }


@if_measured
def _throughput(measured: Result) -> str:
    corpus = measured["corpus"]
    lines = [
        f"{measured['model']}, {measured['dtype']}: questions to {corpus['documents']} documents ({corpus['chunks']} chunks), "
        f"{measured['tokens']:,} tokens of chunks each, popularity n^-{measured['exponent']:g}, at most {measured['new_tokens']} tokens "
        f"of answer; {measured['requests']} Poisson arrivals a rate. kvweave's chunks were prepared before, in "
        f"{measured['preparation']['seconds']:,.0f} s.",
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
