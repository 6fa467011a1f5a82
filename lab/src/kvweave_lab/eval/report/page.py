"""The report: one HTML file with figures and style inside, to be read anywhere without anything else."""

import base64
from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources
from string import Template

from kvweave_lab.eval.matrix import Matrix
from kvweave_lab.eval.quantisation import StorageCost
from kvweave_lab.eval.report import slices
from kvweave_lab.eval.report.about import About
from kvweave_lab.eval.report.html_tables import overall_table, preparation_table, storages_table, task_table
from kvweave_lab.eval.report.matrix_table import sentences
from kvweave_lab.eval.report.plots import Picture
from kvweave_lab.eval.report.table import first_look
from kvweave_lab.eval.results import REUSE, Estimate, Row

_LEGIBLE = 0.62  # of a figure's width; on narrower screens it is scrolled instead of shrunk


def page(
    rows: Sequence[Row],
    about: About,
    pictures: Sequence[Picture],
    matrices: Sequence[Matrix] = (),
    storages: Sequence[StorageCost] = (),
) -> str:
    """The whole document; it refers to nothing outside itself."""
    folder = resources.files(__package__)
    return Template((folder / "page.html").read_text("utf-8")).substitute(
        model=escape(about.model),
        style=(folder / "page.css").read_text("utf-8"),
        summary=_summary(rows),
        warning=_warning(rows),
        numbers="\n".join(_numbers(rows)),
        facts="\n".join(
            f"<div><dt>{name}</dt><dd>{escape(value)}</dd></div>" for name, value in _facts(about)
        ),
        overall=overall_table(rows),
        storages=_storages(storages),
        lengths="\n".join(
            _length(rows, context_tokens, pictures, matrices) for context_tokens in slices.lengths(rows)
        ),
        command=escape(about.command),
        version=escape(about.version),
        date=escape(about.date),
    )


def _summary(rows: Sequence[Row]) -> str:
    return (
        f"<b>{_count(len(slices.recipes(rows)), 'recipe')}</b> on <b>{_count(len(slices.tasks(rows)), 'task')}</b>,"
        f" compared with full attention on the same prompts: what is lost by reusing KV of chunks that never saw"
        f" each other, and how much of it comes back by recomputing some of their tokens."
    )


def _warning(rows: Sequence[Row]) -> str:
    said = first_look(min(row.samples for row in rows))
    return f'<p class="note warn">{said}</p>' if said else ""


def _numbers(rows: Sequence[Row]) -> Iterable[str]:
    """Full attention and reuse, length by length."""
    for row in slices.overall(rows):
        if (row.recipe, row.ratio) == (REUSE, 0):
            yield (
                f'<div class="card"><span class="where">{escape(slices.length_named(row.context_tokens))}</span>'
                f'<div class="pair">{_big(row.full_score, "full attention")}{_big(row.score, "reuse")}'
                f"{_big(row.lost, 'lost by reuse')}</div></div>"
            )


def _big(estimate: Estimate, what: str) -> str:
    lines = (("big", f"{estimate.value:.3f}"), ("what", what), ("what", f"±{slices.margin(estimate):.3f}"))
    return "<div>" + "".join(f'<span class="{name}">{text}</span>' for name, text in lines) + "</div>"


def _facts(about: About) -> list[tuple[str, str]]:
    lengths = " · ".join(f"{tokens:,}" for tokens in about.context_tokens)
    return [
        ("model", about.model),
        ("dtype", about.dtype),
        ("device", about.device),
        *(_generated(about) if about.seeds else _read(about)),
        *(
            [("left out", f"{_count(about.left_out, 'prompt')}, too long for the model")]
            if about.left_out
            else []
        ),
        ("context", f"{lengths} tokens" if lengths else "as in the file"),
        ("chunks", f"at most {about.chunk_tokens:,} tokens"),
        ("date", about.date),
        ("kvweave", about.version),
        ("time, processes added up", f"{about.minutes:.1f} minutes"),
    ]


def _generated(about: About) -> list[tuple[str, str]]:
    return [
        ("split", about.split),
        ("seeds" if len(about.seeds) > 1 else "seed", ", ".join(map(str, about.seeds))),
        ("prompts per task", f"{about.samples:,} per length and seed"),
    ]


def _read(about: About) -> list[tuple[str, str]]:
    how_many = "all of the file" if about.samples is None else f"the first {about.samples:,} of a file"
    return [("file", about.split), ("prompts", how_many)]


def _length(
    rows: Sequence[Row], context_tokens: int, pictures: Sequence[Picture], matrices: Sequence[Matrix]
) -> str:
    here = slices.at_length(rows, context_tokens)
    name = slices.length_named(context_tokens)
    return "\n".join(
        [
            f"<h2>{escape(name[0].upper() + name[1:])}</h2>",
            '<p class="note">Score per task; the stronger the shade, the higher.</p>',
            f'<div class="wide card">{task_table(here)}</div>',
            *(_matrix(matrix) for matrix in matrices if matrix.context_tokens == context_tokens),
            *(_figure(picture) for picture in pictures if picture.context_tokens == context_tokens),
        ]
    )


def _storages(costs: Sequence[StorageCost]) -> str:
    if not costs:
        return ""
    return (
        "<h2>Chunk KV in fewer bits</h2>"
        '<p class="note">Each recipe beside itself with exact storage, on the same prompts.</p>'
        f'<div class="wide card">{storages_table(costs)}</div>'
    )


def _matrix(matrix: Matrix) -> str:
    said = "; ".join(
        [
            f"Mean over tasks by selector and preparation at ratio {matrix.ratio:g}",
            "n: normalised score",
            "with a sign: the difference from the same selector on isolated chunks, prompt by prompt",
            *sentences(matrix),
        ]
    )
    return f'<p class="note">{escape(said)}.</p><div class="wide card">{preparation_table(matrix)}</div>'


def _figure(picture: Picture) -> str:
    width = picture.width_px
    size = f"--most:{width}px;--least:{round(width * _LEGIBLE)}px"
    return (
        f'<figure class="card"><div class="wide"><picture>'
        f'<source media="(prefers-color-scheme: dark)" srcset="{_data(picture.dark)}">'
        f'<img src="{_data(picture.light)}" alt="{escape(picture.title)}" style="{size}">'
        f"</picture></div><figcaption>{escape(picture.caption)}</figcaption></figure>"
    )


def _data(png: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(png).decode("ascii")


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
