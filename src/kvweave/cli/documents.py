"""ls and rm: list and remove the documents of a knowledge base."""

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from kvweave.cli import options as opt
from kvweave.cli.preparation import sentence
from kvweave.cli.terminal import echo

if TYPE_CHECKING:
    from kvweave.index.documents import ListedDocument
    from kvweave.knowledge_base import KnowledgeBase


@opt.with_options(*opt.KB)
def ls(*, options: opt.SharedOptions, json: opt.Json = False) -> None:
    """List the documents in a knowledge base, and how far their chunks are prepared."""
    with options.open_kb() as base:
        documents, with_kv = base.documents(), base.preparation.chunks_with_kv()
        status = base.preparation.status()
        left = sentence(status, _server(base, options.kb) if status.left and status.process is None else "")
    if not documents and not json:
        print(f"knowledge base {options.kb!r} holds no documents; add some with `kvweave add PATH`")
        return
    if not sys.stdout.isatty() and not json:  # for grep and cut: complete lines, without importing rich
        for document in documents:
            doubts = [doubt] if (doubt := _doubts(document)) else []
            row = (document.source, document.title, document.chunks, document.tokens, *doubts)
            echo("\t".join(map(str, row)))
        if left:
            echo(left, err=True)
        return
    from rich.table import Table
    from rich.text import Text

    from kvweave.cli.output import STDOUT, print_json, say
    from kvweave.results import facts

    if json:
        print_json([{**facts(each), "chunks_with_kv": with_kv.get(each.source, 0)} for each in documents])
        return
    doubts = [_doubts(document) for document in documents]
    columns = ["source", "title", "chunks", *(["with KV"] if left else []), "tokens"]
    columns += ["notes"] if any(doubts) else []
    table = Table(*columns, box=None, header_style="bold")
    for document, doubt in zip(documents, doubts, strict=True):
        prepared = [f"{with_kv.get(document.source, 0)}"] if left else []
        numbers = f"{document.chunks}", *prepared, f"{document.tokens:,}"
        noted = [Text(doubt)] if any(doubts) else []
        table.add_row(Text(document.source), Text(document.title), *numbers, *noted)
    STDOUT.print(table)
    if left:
        say(f"\n{left}")


def _server(base: "KnowledgeBase", kb: str) -> str:
    from kvweave.server.choice import preparing_server

    return preparing_server(base.config, kb)


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
