"""The generated part of lab/docs/faults.md: how many homes were checked after which fault, and what broke."""

from markdown_parts import Result, if_measured, table


@if_measured
def counted_faults(result: Result) -> str:
    """Return the counts by fault, and by finding that was not mended when they were made."""
    seeds = ", ".join(f"{len(each)} of kind `{kind}`" for kind, each in result["seeds"].items() if each)
    broken = {each["fault"]: 0 for each in result["broken"]}
    for each in result["broken"]:
        broken[each["fault"]] += each["homes"]
    lines = [
        f"`{result['command']}`, {result['date']}, {result['machine']}: histories {seeds}; {result['homes']:,} homes and entry files checked.",
        "",
        *table(
            ["fault", "homes or damaged files", "an invariant broke in"],
            (
                [fault, f"{homes:,}", f"{broken.get(fault, 0):,}"]
                for fault, homes in result["homes_by_fault"].items()
            ),
        ),
    ]
    if broken:
        lines += ["", "What broke:", ""]
        lines += [f"- {each['fault']}: {each['invariant']} ({each['homes']:,})" for each in result["broken"]]
    return "\n".join(lines)
