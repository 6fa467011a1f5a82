"""The comparison at equal bytes read as JSON and as a terminal table."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from kvweave.models.adapter import Adapter
from kvweave_lab.eval.decoding.equal_reads import Request, TextRun, reads_rows
from kvweave_lab.eval.decoding.results import budget_text
from kvweave_lab.report import flatten, half_width, text_table
from kvweave_lab.results_log import dtype_name
from kvweave_lab.statistics import Estimate

_COLUMNS = (
    "budget|strategy|output error|of best other|KL|perplexity of dense's|agrees|recall|mass|read|index"
).split("|")


def content(
    adapter: Adapter, request: Request, runs: Sequence[TextRun], about: Mapping[str, str]
) -> dict[str, Any]:
    """Return the results as JSON values; an interval is under its estimate's name with `_interval`."""
    first = request.texts[0]
    settings = {
        "model": adapter.fingerprint.name,
        "dtype": dtype_name(adapter),
        "texts": [text.name for text in request.texts],
        "prompt_tokens": first.prompt_tokens,
        "decode_tokens": len(first.token_ids) - first.prompt_tokens - 1,
    }
    return {"about": settings | dict(about), "rows": [flatten(row) for row in reads_rows(runs)]}


def reads_table(model: str, runs: Sequence[TextRun]) -> Table:
    """Return every strategy at every budget."""
    texts = len({run.text for run in runs})
    table = text_table(
        _COLUMNS, names=0, title=model, caption=f"{texts:,} texts · ± half of a 95 % interval over texts"
    )
    table.columns[1].justify = "left"
    for row in reads_rows(runs):
        estimates = (row.kl, row.agreement, row.recall, row.attended_mass)
        kl, *shares = map(_text, estimates)
        table.add_row(
            budget_text(row.budget),
            row.strategy,
            _text(row.output_error),
            "" if row.error_of_best is None else f"{row.error_of_best:.2f}",
            kl,
            f"{row.perplexity_of_dense:.3f}",
            *shares,
            f"{row.read_share:.1%}",
            f"{row.index_share:.1%}",
        )
    return table


def _text(estimate: Estimate) -> str:
    return f"{estimate.value:.4f} ±{half_width(estimate):.4f}"
