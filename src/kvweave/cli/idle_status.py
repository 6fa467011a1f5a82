"""idle --status: what background work did, what it was worth, and whether it may run now."""

from kvweave.cli import options as opt
from kvweave.cli.background import TITLES
from kvweave.cli.output import STDOUT, amount, print_json, seconds
from kvweave.engine.background.status import IdleStatus, idle_status
from kvweave.engine.facts import facts

_ORIGINS = {
    "knowledge": "documents",
    "history": "earlier questions",
    "paraphrase": "questions in other words",
}


def show(options: opt.SharedOptions, json: bool) -> None:
    """Print it for one knowledge base."""
    from kvweave.cli.idle_service import service_of

    with options.open_kb() as base:
        status = idle_status(base)
    service = service_of(options, ())
    paths = [str(path) for path in service.files] if service is not None and service.installed else []
    if json:
        print_json({**facts(status), "reasons": list(status.reasons), "service": paths})
        return
    for line in _lines(status):
        STDOUT.print(line, soft_wrap=True)
    STDOUT.print(f"service: {', '.join(paths) or 'not installed; kvweave idle --install'}", soft_wrap=True)


def _lines(status: IdleStatus) -> list[str]:
    today, all_ = status.worth_today, status.worth
    limit = "no daily limit" if status.seconds_per_day is None else f"of {status.seconds_per_day:g} s"
    flops = "" if status.flops_per_day is None else f" of {status.flops_per_day / 1e12:.3g}"
    lines = [
        f"today: {seconds(status.spent_today.seconds)} spent, {limit}; "
        f"{status.spent_today.flops / 1e12:.3g}{flops} TFLOPs"
    ]
    lines += [f"  {TITLES.get(kind, kind)}: {jobs:,}" for kind, jobs in status.jobs_today.items()]
    lines += [
        f"made: {today.entries:,} answers and {amount(int(today.kv_bytes))} of KV today; {all_.entries:,} and "
        f"{amount(int(all_.kv_bytes))} in all",
        f"worth: {today.hits:,} of these answers given today, {all_.hits:,} in all; they saved {seconds(all_.saved_s)} of "
        f"waiting, for {seconds(status.spent.seconds)} of work",
        f"waiting: {status.waiting:,} questions",
        *_predictions(status),
        f"now: {'; '.join(status.reasons) or 'may work'}",
    ]
    return lines + [f"  {each.name}: {each.state}" for each in status.conditions]


def _predictions(status: IdleStatus) -> list[str]:
    """Return what each kind of prediction that has been tried is worth, and what was dropped."""
    lines = []
    for origin, one in status.predictions.items():
        if one.ready or one.seconds:
            rate = "" if one.hits_per_work is None else f" ({one.hits_per_work:.2g} per answer computed)"
            lines.append(
                f"predicted from {_ORIGINS[origin]}: {one.ready:,} ready, {one.hits:,} of {one.asked:,} questions answered from them for "
                f"{seconds(one.seconds)} of work{rate}" + (f"; paused: {one.paused}" if one.paused else "")
            )
    for what, reasons in (("questions", status.dropped), ("summaries", status.summaries_dropped)):
        if reasons:
            counted = ", ".join(f"{number:,} {reason}" for reason, number in reasons.items())
            lines.append(f"dropped {what}: {counted}")
    return lines
