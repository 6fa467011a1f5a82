"""One HTML page for a report, with its figures and style inside: it refers to nothing outside itself."""

import base64
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from string import Template

from kvweave_lab.report.figures import DPI

_LEGIBLE = 0.62  # of a figure's width; narrower screens scroll it instead of shrinking it further


@dataclass(frozen=True, slots=True)
class Page:
    """The parts of a page, top to bottom.

    Attributes:
        title: what was evaluated.
        model: its name.
        summary: HTML, a sentence or two.
        headline: HTML before the facts: warnings, the figures that count most.
        facts: names and values of what was run, as text.
        sections: HTML, each with its own heading.
        definitions: names and meanings of the columns, as text.
        repeat_note: HTML before the command.
        command: repeats the evaluation when pasted into a shell.
        version: of kvweave.
        date: of the run.
    """

    title: str
    model: str
    summary: str
    facts: Sequence[tuple[str, str]]
    sections: Sequence[str]
    definitions: Sequence[tuple[str, str]]
    repeat_note: str
    command: str
    version: str
    date: str
    headline: str = ""


def render_page(page: Page) -> str:
    """Return the whole document."""
    folder = resources.files(__package__)
    return Template((folder / "page.html").read_text("utf-8")).substitute(
        title=escape(page.title),
        model=escape(page.model),
        style=(folder / "page.css").read_text("utf-8"),
        summary=page.summary,
        headline=page.headline,
        facts="\n".join(
            f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in page.facts
        ),
        sections="\n\n".join(page.sections),
        definitions="\n".join(
            f"<dt>{escape(name)}</dt><dd>{escape(meaning, quote=False)}</dd>"
            for name, meaning in page.definitions
        ),
        repeat_note=page.repeat_note,
        command=escape(page.command),
        version=escape(page.version),
        date=escape(page.date),
    )


def html_table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a plain table of texts."""
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return wide_card(f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>")


def wide_card(table: str) -> str:
    """Return a table in a card that scrolls sideways on narrow screens."""
    return f'<div class="wide card">{table}</div>'


def html_figure(light: bytes, title: str, *, dark: bytes | None = None, caption: str = "") -> str:
    """Return a PNG, and another one for dark screens; `title` is for readers who do not see it."""
    width = width_px(light)
    size = f"--most:{width}px;--least:{round(width * _LEGIBLE)}px"
    source = (
        "" if dark is None else f'<source media="(prefers-color-scheme: dark)" srcset="{_data_url(dark)}">'
    )
    return (
        f'<figure class="card"><div class="wide"><picture>{source}'
        f'<img src="{_data_url(light)}" alt="{escape(title)}" style="{size}">'
        f"</picture></div><figcaption>{escape(caption)}</figcaption></figure>"
    )


def width_px(png: bytes) -> int:
    """Return the width at which a figure's letters are as large as the page's small print: 100 pixels per inch."""
    return int.from_bytes(png[16:20]) * 100 // DPI  # PNG: bytes 16 to 19 are the width


def _data_url(png: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(png).decode("ascii")
