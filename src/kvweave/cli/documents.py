"""add, ls, rm: documents in a knowledge base."""

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from kvweave.cli import options as opt

if TYPE_CHECKING:
    from kvweave.index.documents import ListedDocument
    from kvweave.results import AddReport, SkippedFile


@opt.with_options(
    *opt.KB, *opt.MODEL, "embedding_model", "chunk_tokens", "overlap_tokens", "system", *opt.REUSE
)
def add(
    paths: Annotated[list[str], typer.Argument(help="Files and folders.", show_default=False)],
    *,
    options: opt.SharedOptions,
    json: opt.Json = False,
    quiet: opt.Quiet = False,
) -> None:
    """Index files and folders: chunks, vectors, chunk KV. A second run does only what changed."""
    from kvweave.cli.output import print_json, progress_bar

    opt.quiet_libraries()
    with options.make_kb() as base, progress_bar(quiet or json) as report:
        done = base.add(*paths, progress=report)
    if json:
        print_json(done)
        return
    _tell(done)


def _tell(done: "AddReport") -> None:
    from rich.text import Text

    from kvweave.cli.output import STDERR, STDOUT, seconds

    for skipped in done.skipped:
        STDERR.print(Text.assemble(("skipped ", "yellow"), _naming(skipped)), soft_wrap=True)
    for noted in done.notes:
        STDERR.print(Text.assemble(("note ", "yellow"), f"{noted.path}: {noted.note}"), soft_wrap=True)
    for copy in done.copies:
        STDERR.print(
            Text.assemble(
                ("note ", "yellow"), f"{copy.path}: the same as {copy.same_as}; it counts once in a search"
            ),
            soft_wrap=True,
        )
    counts = [
        ("added", done.added),
        ("changed", done.changed),
        ("removed", done.removed),
        ("unchanged", done.unchanged),
    ]
    said = ", ".join(f"{len(found)} {what}" for what, found in counts if found) or "nothing to index"
    STDOUT.print(
        f"{said}; {done.chunks} chunks indexed, KV computed for {done.chunk_kv_computed}, in {seconds(done.seconds)}"
    )
    if done.chunk_kv_left_out:
        STDOUT.print(
            f"KV of {done.chunk_kv_left_out} more chunks does not fit the store's limit, so they are computed when asked "
            "about; raise it with `kvweave cache limit` and add again"
        )


def _naming(skipped: "SkippedFile") -> str:
    path, reason = str(skipped.path), skipped.reason
    return reason if path in reason else f"{path}: {reason}"


@opt.with_options(*opt.KB)
def ls(*, options: opt.SharedOptions, json: opt.Json = False) -> None:
    """List the documents in a knowledge base."""
    with options.open_kb() as base:
        documents = base.documents()
    if not documents and not json:
        print(f"knowledge base {options.kb!r} holds no documents; add some with `kvweave add PATH`")
        return
    if not sys.stdout.isatty() and not json:  # for grep and cut: whole lines, and nothing of rich to import
        for document in documents:
            doubts = [doubt] if (doubt := _doubts(document)) else []
            print(document.source, document.title, document.chunks, document.tokens, *doubts, sep="\t")
        return
    from rich.table import Table
    from rich.text import Text

    from kvweave.cli.output import STDOUT, print_json

    if json:
        print_json(documents)
        return
    doubts = [_doubts(document) for document in documents]
    columns = ["source", "title", "chunks", "tokens", *(["notes"] if any(doubts) else [])]
    table = Table(*columns, box=None, header_style="bold")
    for document, doubt in zip(documents, doubts, strict=True):
        facts = str(document.chunks), f"{document.tokens:,}"
        noted = [Text(doubt)] if any(doubts) else []
        table.add_row(Text(document.source), Text(document.title), *facts, *noted)
    STDOUT.print(table)


def _doubts(document: "ListedDocument") -> str:
    copy = [f"the same as {document.same_as}"] if document.same_as else []
    return "; ".join([*document.notes, *copy])


@opt.with_options(*opt.KB, "shared")
def rm(
    paths: Annotated[list[str] | None, typer.Argument(help="Documents or folders of documents.")] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Empty the knowledge base; it may then use another model.")
    ] = False,
    *,
    options: opt.SharedOptions,
    json: opt.Json = False,
) -> None:
    """Remove documents with their chunks, vectors, KV and answers. The files themselves stay."""
    from kvweave.cli.output import STDOUT, print_json
    from kvweave.errors import InvalidRequest

    if bool(paths) == everything:
        raise InvalidRequest("name the documents to remove, or --all")
    with options.open_kb() as base:
        removed = base.remove_all() if everything else base.remove(*(paths or []))
    if json:
        print_json({"removed": removed})
        return
    STDOUT.print(f"removed {len(removed)} document{'' if len(removed) == 1 else 's'}")
