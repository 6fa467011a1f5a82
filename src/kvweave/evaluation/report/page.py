"""The report: one HTML file with figures and style inside, to be read anywhere without anything else."""

import base64
from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources
from string import Template

from kvweave.evaluation.report import slices
from kvweave.evaluation.report.about import About
from kvweave.evaluation.report.html_tables import overall_table, task_table
from kvweave.evaluation.report.plots import Picture
from kvweave.evaluation.results import Row

QUOTABLE = 200
"""Prompts behind a figure below which it should not be quoted."""

_LEGIBLE = 0.62  # of a figure's width; on narrower screens it is scrolled instead of shrunk


def page(rows: Sequence[Row], about: About, pictures: Sequence[Picture]) -> str:
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
        lengths="\n".join(_length(rows, context_tokens, pictures) for context_tokens in slices.lengths(rows)),
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
    fewest = min(row.samples for row in rows)
    if fewest >= QUOTABLE:
        return ""
    return (
        f'<p class="note warn">Some figures rest on {_count(fewest, "prompt")}; below {QUOTABLE} they are for'
        f" a first look and not to be quoted.</p>"
    )


def _numbers(rows: Sequence[Row]) -> Iterable[str]:
    """Full attention and reuse, length by length."""
    for context_tokens in slices.lengths(rows):
        here = slices.overall(slices.at_length(rows, context_tokens))
        if here:
            full, reuse = here[0].full_score.value, here[0].reuse_score.value
            yield (
                f'<div class="card"><span class="where">{escape(slices.length_named(context_tokens))}</span>'
                f'<div class="pair">{_big(full, "full attention")}'
                f"{_big(reuse, 'reuse')}{_big(full - reuse, 'lost by reuse')}</div></div>"
            )


def _big(score: float, what: str) -> str:
    return f'<div><span class="big">{score:.3f}</span><span class="what">{what}</span></div>'


def _facts(about: About) -> list[tuple[str, str]]:
    lengths = " · ".join(f"{tokens:,}" for tokens in about.context_tokens)
    generated = [
        ("seeds" if len(about.seeds) > 1 else "seed", ", ".join(map(str, about.seeds))),
        ("prompts per task", f"{about.samples_per_task:,} per length and seed"),
    ]
    return [
        ("model", about.model),
        ("dtype", about.dtype),
        ("device", about.device),
        ("split" if about.seeds else "file", about.split),
        *(generated if about.seeds else []),
        ("context", f"{lengths} tokens" if lengths else "as in the file"),
        ("chunks", f"at most {about.chunk_tokens:,} tokens"),
        ("date", about.date),
        ("kvweave", about.version),
        ("time", f"{about.minutes:.1f} minutes"),
    ]


def _length(rows: Sequence[Row], context_tokens: int, pictures: Sequence[Picture]) -> str:
    here = slices.at_length(rows, context_tokens)
    name = slices.length_named(context_tokens)
    return "\n".join(
        [
            f"<h2>{escape(name[0].upper() + name[1:])}</h2>",
            '<p class="note">Score per task; the stronger the shade, the higher.</p>',
            f'<div class="wide card">{task_table(here)}</div>',
            *(_figure(picture) for picture in pictures if picture.context_tokens == context_tokens),
        ]
    )


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
