"""The evaluation of decoding on disk: decoding.json, its figures, and one page that holds everything."""

import base64
import json
from collections.abc import Mapping, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from kvweave.errors import InvalidRequest
from kvweave.files import write_atomically
from kvweave_lab.eval.decoding.measure import Quality
from kvweave_lab.eval.decoding.outcome import AFTER_STEPS
from kvweave_lab.eval.decoding.plots import figures
from kvweave_lab.eval.decoding.tables import (
    BESIDE_COLUMNS,
    COLUMNS,
    beside_cells,
    cells,
    content,
    return_rows,
    summary,
)
from kvweave_lab.eval.longtext.telling import MIN_DISTANCE


def write(folder: Path, done: Quality, about: dict[str, Any]) -> list[Path]:
    """Write everything, the page last; `about` are command, version, date and what else a reader needs.

    Raises InvalidRequest if the folder cannot be written to.
    """
    drawn = figures(done)
    plain = content(done, about)
    files = {"decoding.json": json.dumps(plain, ensure_ascii=False, indent=1).encode()}
    files |= {f"decoding-{name}.png": data for name, data in drawn.items()}
    files["decoding.html"] = _page(done, plain["about"], drawn).encode()
    try:
        for name, data in files.items():
            write_atomically(folder / name, [data])
    except OSError as error:
        raise InvalidRequest(
            f"the report cannot be written to {folder} ({error.strerror}); name another --output"
        ) from error
    return [folder / name for name in files]


def _page(done: Quality, about: Mapping[str, Any], drawn: Mapping[str, bytes]) -> str:
    told = {name.replace("_", " "): _fact(value) for name, value in about.items() if name != "command"}
    return Template((resources.files(__package__) / "page.html").read_text("utf-8")).substitute(
        model=escape(done.model),
        style=(resources.files("kvweave_lab.eval.report") / "page.css").read_text("utf-8"),
        summary=(
            "Texts far longer than their prompts, decoded under every strategy with the same share of their entries:"
            " what each finds of what dense attention would look at, and which answers survive."
        ),
        facts="\n".join(
            f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in told.items()
        ),
        figures="\n".join(_figure(name, data) for name, data in drawn.items()),
        rows=_table(COLUMNS, [cells(row) for row in summary(done.rows)]),
        beside=_table(BESIDE_COLUMNS, beside_cells(done)),
        returns=_table(
            ("strategy", "clusters", *map(str, AFTER_STEPS)),
            [
                [f"{row.strategy} {row.budget:g}", kind, *(f"{share:.0%}" for share in shares)]
                for row in return_rows(done)
                for kind, shares in (("updated", row.updated), ("any", row.any))
            ],
        ),
        distance=MIN_DISTANCE,
        command=escape(str(about.get("command", ""))),
        version=escape(str(about.get("version", ""))),
        date=escape(str(about.get("date", ""))),
    )


def _fact(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _table(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in line) + "</tr>" for line in lines)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _figure(name: str, data: bytes) -> str:
    image = base64.b64encode(data).decode("ascii")
    return f'<figure class="card"><div class="wide"><img src="data:image/png;base64,{image}" alt="{escape(name)}" width="100%"></div></figure>'
