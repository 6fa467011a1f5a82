"""add, ls and rm: index, list and remove the documents of a knowledge base; chunk KV follows in the background."""

import sys
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from kvweave.cli import options as opt
from kvweave.cli.preparation import sentence, worker_sentence
from kvweave.cli.terminal import echo
from kvweave.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvweave.index.documents import ListedDocument
    from kvweave.knowledge_base import KnowledgeBase
    from kvweave.results import AddReport, SkippedFile
    from kvweave.server.chunk_worker import Worker
    from kvweave.state.knowledge_base_state import Progress


@opt.with_options(
    *opt.KB,
    *opt.MODEL,
    "embedding_model",
    "chunk_tokens",
    "overlap_tokens",
    "system",
    *opt.REUSE,
    "wait",
)
def add(
    paths: Annotated[list[str], typer.Argument(help="Files and folders.", show_default=False)],
    *,
    options: opt.SharedOptions,
    watch: Annotated[
        bool, typer.Option("--watch", help="Follow changes in the folders until Ctrl-C.")
    ] = False,
    allow_empty: Annotated[
        bool,
        typer.Option(
            "--allow-empty", help="Remove the documents of a folder that has no files any more, too."
        ),
    ] = False,
    json: opt.Json = False,
    quiet: opt.Quiet = False,
) -> None:
    """Index files and folders, so that you can ask about them; chunk KV follows in the background.

    A second run indexes only what has changed.
    """
    from kvweave.cli.output import progress_bar

    with options.make_kb() as base:
        if watch:
            _watch(base.follow(*paths, allow_empty=allow_empty), base, options, json, quiet)
            return
        with progress_bar(quiet or json) as report:
            done = base.add(*paths, progress=report, wait=False, allow_empty=allow_empty)
            done, worker = _prepare(done, base, options, report)
    _print_report(done, worker, json)


def _watch(
    reports: "Iterator[AddReport]", base: "KnowledgeBase", options: opt.SharedOptions, json: bool, quiet: bool
) -> None:
    """Print a report of the folders, then one of each change."""
    from kvweave.cli.output import STDERR
    from kvweave.state.knowledge_base_state import no_progress

    try:
        for number, found in enumerate(reports):
            done, worker = _prepare(found, base, options, no_progress)
            if not number or done.added or done.changed or done.removed or done.kept:
                _print_report(done, worker, json)
            if not number and not quiet:
                STDERR.print("watching for changes; Ctrl-C ends it")
    except KeyboardInterrupt:
        STDERR.print("no longer watching")


def _prepare(
    done: "AddReport", base: "KnowledgeBase", options: opt.SharedOptions, report: "Progress"
) -> "tuple[AddReport, Worker | None]":
    """Prepare the chunks or leave them to another process; return the report and that process."""
    if not done.chunk_kv_waiting:
        return done, None
    if base.config.wait:
        prepared = base.prepare(report)
        return replace(
            done,
            chunk_kv_computed=prepared.computed,
            chunk_kv_left_out=prepared.left_out,
            chunk_kv_waiting=0,
            seconds=done.seconds + prepared.seconds,
        ), None
    from kvweave.files import absolute_if_path
    from kvweave.server.chunk_worker import hand_over

    paths = replace(
        options, model=absolute_if_path(options.model), auxiliary=absolute_if_path(options.auxiliary)
    )
    names = [name for name in (*opt.MODEL, *opt.REUSE) if name != "shared"]
    return done, hand_over(base, opt.arguments_of(paths, names), options.shared)


def _print_report(done: "AddReport", worker: "Worker | None", json: bool) -> None:
    from rich.text import Text

    from kvweave.cli.output import STDERR, STDOUT, print_json, say, seconds
    from kvweave.results import facts

    if json:
        print_json(done if worker is None else {**facts(done), "preparation": facts(worker)})
        return
    lines = [
        *(("skipped", _naming(each)) for each in done.skipped),
        *(("note", f"{each.path}: {each.note}") for each in done.notes),
        *(
            ("note", f"{each.path}: the same as {each.same_as}; it counts once in a search")
            for each in done.copies
        ),
    ]
    if done.kept:
        lines.append(
            (
                "note",
                f"{len(done.kept)} documents stay, although their folder has no files any more, such as {done.kept[0]}: its disk "
                "may not be mounted. To remove them, add the folder with --allow-empty",
            )
        )
    for what, line in lines:
        STDERR.print(Text.assemble((f"{what} ", "yellow"), line), soft_wrap=True)
    counts = [
        ("added", done.added),
        ("changed", done.changed),
        ("removed", done.removed),
        ("unchanged", done.unchanged),
    ]
    sources = ", ".join(f"{len(found)} {what}" for what, found in counts if found) or "nothing to index"
    kinds = _kinds([*done.added, *done.changed])
    by_kind = f" ({', '.join(f'{count} {kind}' for kind, count in kinds)})" if len(kinds) > 1 else ""
    computed = "" if worker else f", KV computed for {done.chunk_kv_computed}"
    chunks = "chunk" if done.chunks == 1 else "chunks"
    say(f"{sources}; {done.chunks} {chunks} indexed{computed}, in {seconds(done.seconds)}{by_kind}")
    if worker is not None:
        say("they can be asked about now: kvweave ask 'QUESTION'")
        if done.vectors_waiting:
            STDOUT.print(
                f"{done.vectors_waiting} chunks are found by their words alone until their vectors are there"
            )
        say(worker_sentence(worker))
    if done.chunk_kv_left_out:
        STDOUT.print(
            f"KV of {done.chunk_kv_left_out} more chunks does not fit the store's limit, so they are computed when asked "
            "about; raise it with `kvweave cache limit` and add again"
        )


def _kinds(sources: list[str]) -> list[tuple[str, int]]:
    """Return the number of documents of each kind of file, most frequent first."""
    from kvweave.documents.files import content_suffix

    return Counter(content_suffix(source) or "without a suffix" for source in sources).most_common()


def _naming(skipped: "SkippedFile") -> str:
    path, reason = str(skipped.path), skipped.reason
    return reason if path in reason else f"{path}: {reason}"


@opt.with_options(*opt.KB)
def ls(*, options: opt.SharedOptions, json: opt.Json = False) -> None:
    """List the documents in a knowledge base, and how far their chunks are prepared."""
    from kvweave.server.choice import preparing_server

    with options.open_kb() as base:
        documents, with_kv = base.documents(), base.preparation.chunks_with_kv()
        status = base.preparation.status()
        unattended = status.left and status.process is None
        left = sentence(status, preparing_server(base.config, options.kb) if unattended else "")
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

    if bool(paths) == everything:
        raise InvalidRequest("name the documents to remove, or --all")
    with options.open_kb() as base:
        removed = base.remove_all() if everything else base.remove(*(paths or []))
    if json:
        print_json({"removed": removed})
        return
    STDOUT.print(f"removed {len(removed)} document{'' if len(removed) == 1 else 's'}")
