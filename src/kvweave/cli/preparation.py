"""prepare: prepare the chunks of a file ahead of the requests that will bring them.

Also `kvweave idle --chunks-only`, and the text that commands print about the preparation of chunks.
"""

import os
import sys
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from kvweave.cli import options as opt
from kvweave.errors import InvalidRequest, PathNotFound

if TYPE_CHECKING:
    from kvweave.knowledge_base import KnowledgeBase
    from kvweave.server.chunk_worker import Worker
    from kvweave.state.preparation import PreparationStatus

_TEXT_FIELDS: Final = ("text", "page_content", "content", "contents")
"""Fields that hold a chunk's text, by the names of kvweave, LangChain, and the files of retrieval benchmarks."""
_LOG_EVERY_S: Final = 30.0
_SAME: Final = 1.4
"""An estimate is given as one number if its most is less than so many times its least."""


@opt.with_options(
    "home",
    *opt.MODEL,
    "system",
    *("recipe", "prepare", "storage", "auxiliary"),
    system="The instruction that requests will have. Default: the server's.",
)
def prepare(
    file: Annotated[
        Path,
        typer.Argument(
            help='JSONL file with one chunk per line: {"text": "…"}, or a string.', show_default=False
        ),
    ],
    *,
    options: opt.SharedOptions,
    json: opt.Json = False,
    quiet: opt.Quiet = False,
) -> None:
    """Prepare your own chunks, so that requests with `documents` reuse them in any order, from the first one on.

    For callers with a retriever of their own, who send chunks to `kvweave serve` or use a package for LangChain or LlamaIndex
    with the same home. The chunks of a document come in reading order.
    """
    from kvweave.cli.output import amount, print_json, progress_bar, say
    from kvweave.server.serving.serving import Serving

    opt.quiet_libraries()
    texts = _read(file)
    with closing(Serving(options.config())) as serving:
        tenant = serving.tenant(None)
        with progress_bar(quiet or json) as report:
            done = tenant.prepare(texts, lambda tokens, total: report("tokens prepared", tokens, total))
        used, limit = tenant.store.used_bytes, tenant.store.limit_bytes
    if json:
        print_json(done)
        return
    say(
        f"{done.chunks} chunks of {done.tokens:,} tokens are prepared, {done.computed} of them now; all chunks of requests "
        f"take {amount(used)} of {amount(limit)}"
    )


def _read(file: Path) -> list[str]:
    """Return the chunks of a file; raises InvalidRequest for a line that has none, PathNotFound for no file."""
    if not file.is_file():
        raise PathNotFound(f"there is no file {file}")
    found = []
    for number, value in opt.json_lines(file):
        if isinstance(value, dict):
            value = next((value[name] for name in _TEXT_FIELDS if isinstance(value.get(name), str)), None)
        if not isinstance(value, str) or not value.strip():
            raise InvalidRequest(
                f"{file}, line {number} has no chunk; write a JSON string, or an object with the field text"
            )
        found.append(value)
    if not found:
        raise InvalidRequest(f"{file} has no chunks; write one JSON object with the field text per line")
    return found


def prepare_left(options: opt.SharedOptions, *, quiet: bool) -> None:
    """Prepare the chunks that are left. On a terminal, show a progress bar; elsewhere, write a log to standard error."""
    from kvweave.cli.output import STDERR, progress_bar
    from kvweave.server.chunk_worker import prepare_all

    terminal = STDERR.is_terminal
    with options.open_kb() as base, progress_bar(quiet or not terminal) as bar:
        log = _Log(base)
        if not terminal:
            log.write(f"process {os.getpid()} prepares chunks")
        report = bar if terminal else log
        done = prepare_all(base, lambda settings: replace(options, **settings).open_kb(), report)
    said = (
        f"{sum(each.chunks for each in done)} chunks prepared in {sum(each.seconds for each in done):.1f} s"
    )
    if terminal:
        STDERR.print(said)
    else:
        log.write(said)


class _Log:
    """Writes the progress to standard error from time to time."""

    def __init__(self, base: "KnowledgeBase") -> None:
        self._base = base
        self._written_s = time.monotonic()

    def __call__(self, stage: str, done: int, total: int) -> None:
        if time.monotonic() > self._written_s + _LOG_EVERY_S:
            self._written_s = time.monotonic()
            self.write(sentence(self._base.preparation.status()))

    def write(self, line: str) -> None:
        print(time.strftime("%Y-%m-%d %H:%M:%S"), line, file=sys.stderr, flush=True)


def worker_sentence(worker: "Worker") -> str:
    """Return a sentence with the chunks that are left and the process that prepares them."""
    left = _rest(worker.status)
    if worker.by == "server":
        return (
            f"{left}; the server at {worker.address} does it between requests, kvweave ls shows how far it is"
        )
    if worker.by == "process":
        return (
            f"{left}; process {_named(worker.process)} does it, kvweave ls shows how far it is ({worker.log})"
        )
    return f"{left}; no process is preparing them ({worker.why}); run `kvweave add --wait` on the same paths"


def sentence(status: "PreparationStatus", server: str = "") -> str:
    """Return a sentence with the chunks that are left and the process or `server` that prepares them; empty if none are left."""
    if not status.left:
        return ""
    counts = {
        "have no vector yet and are found by their words alone": status.left_without_vector,
        "have no KV yet": status.left_without_kv,
    }
    lacking = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
    without = f" ({lacking})" if lacking else ""
    if status.process is not None:
        who = f"process {_named(status.process)} works on it"
    elif server:
        who = f"the server at {server} does it between requests"
    else:
        who = "no process works on it now; kvweave idle --chunks-only does (with the --recipe of the add)"
    return f"{_rest(status)}{without}; {who}"


def _named(process: int | None) -> str:
    return f"{process or 'of an unknown id'}"


def _rest(status: "PreparationStatus") -> str:
    chunks = "1 chunk is" if status.left == 1 else f"{status.left} chunks are"
    return f"{chunks} still to be prepared{_time_left(status)}"


def _time_left(status: "PreparationStatus") -> str:
    """Return ", about 3 min", ", 2 to 5 min" where speeds differ more, or nothing without an estimate."""
    least_s, most_s = status.least_left_s, status.most_left_s
    if least_s is None or most_s is None:
        return ""
    if most_s < _SAME * least_s:
        return f", about {duration((least_s + most_s) / 2)}"
    return f", {duration(least_s)} to {duration(most_s)}"


def duration(seconds: float) -> str:
    """Format an estimate: 40 s, 3 min, 2.5 h."""
    if seconds < 100:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
