"""prepare: prepare the chunks of a file ahead of the requests that will bring them."""

from contextlib import closing
from pathlib import Path
from typing import Annotated, Final

import typer

from kvweave.cli import options as opt

_TEXT_FIELDS: Final = ("text", "page_content", "content", "contents")
"""Fields that hold a chunk's text, by the names of kvweave, LangChain, and the files of retrieval benchmarks."""


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
    from kvweave.errors import InvalidRequest, PathNotFound

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
