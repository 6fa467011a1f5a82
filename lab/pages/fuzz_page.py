"""The generated parts of lab/docs/fuzz.md: how hostile files ended, and what was found and mended."""

from collections import Counter

from markdown_parts import Result, if_measured, table


@if_measured
def fuzz_counts(result: Result) -> str:
    """Return a table with a row for each reader, and the findings that are left."""
    readers = result["readers"]
    lines = table(
        ["reader", "inputs", "read", "refused in one line", "findings", "slowest, s", "processor time, s"],
        (
            [
                f"`{name}`",
                f"{found['inputs']:,}",
                f"{found['read']:,}",
                f"{found['refused']:,}",
                f"{len(found['findings']):,}",
                f"{found['slowest_s']:.1f}",
                f"{found['cpu_s']:,.0f}",
            ]
            for name, found in readers.items()
        ),
    )
    left = Counter(
        f"`{name}`: {each['fault']} {each['where']}".rstrip()
        for name, found in readers.items()
        for each in found["findings"]
    )
    rows = [f"- {finding}, {number} inputs" for finding, number in left.most_common()]
    return "\n".join(
        [
            f"On {result['commit']}, `{result['command']}` with seed {result['seed']}, {result['date']}, "
            f"{result['machine']}.",
            "",
            *lines,
            *(["", "Not mended:", "", *rows] if rows else []),
        ]
    )


@if_measured
def fuzz_findings(result: Result) -> str:
    """Return a table of what was found, each mended with a test of its own."""
    rows = (
        [f"`{each['reader']}`", each["finding"], each["now"], each["counted"]] for each in result["mended"]
    )
    return "\n".join(table(["reader", "finding", "now", "inputs with it"], rows))
