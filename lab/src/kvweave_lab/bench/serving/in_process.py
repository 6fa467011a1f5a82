"""Answers chat requests without HTTP: `python -m kvweave_lab.bench.serving.in_process`, with flags of `kvweave serve`.

It reads a JSON body of `/v1/chat/completions` from every line of its input and writes the seconds until the first piece of
text. The engine is the server's own, `kvweave.server.serving.serving`, with the same settings; only HTTP, its JSON and its threads
are left out.
"""

import json
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvweave.config import Config
    from kvweave.options import AskKeywords
    from kvweave.server.serving.completions import CompletionRequest
    from kvweave.server.serving.serving import Serving, Tenant

LOADED = "loaded"
"""The first line, written when the model is loaded."""


def main() -> None:
    """Take the flags as `kvweave serve` does, and answer in its place."""
    from kvweave.cli.app import app
    from kvweave.server.process import lifecycle

    lifecycle.serve = _answer  # what the command calls once it has read its settings
    app(["serve", *sys.argv[1:]])


def _answer(config: "Config", announce: "Callable[[str], object]" = print) -> None:
    """Load the engine and answer until the input ends."""
    from kvweave.machine import use_one_thread
    from kvweave.server.serving.serving import Serving

    lines = sys.stdout
    sys.stdout = sys.stderr  # nothing else may write between the lines
    server = config.server
    serving = Serving(config, idle=server.idle_work, share_kv=server.share_kv, async_kv=server.async_kv)
    # As in the server: the thread that loads ends with its helpers, and no other than that of the passes keeps any.
    loading = threading.Thread(target=serving.load)
    loading.start()
    loading.join()
    use_one_thread()
    print(LOADED, file=lines, flush=True)
    for line in sys.stdin:
        print(_first_token_s(serving, json.loads(line)), file=lines, flush=True)
    serving.close()


def _first_token_s(serving: "Serving", body: dict[str, Any]) -> float:
    """Run a whole request; return the seconds until its first piece of text, or until its end if it has none."""
    from kvweave.results import Piece

    tenant = serving.tenant(None)
    began, first = time.perf_counter(), None
    for event in tenant.complete(_request(tenant, body)):
        if first is None and isinstance(event, Piece):
            first = time.perf_counter() - began
    return time.perf_counter() - began if first is None else first


def _request(tenant: "Tenant", body: dict[str, Any]) -> "CompletionRequest":
    """Return the engine's request for an HTTP body."""
    from kvweave.server.serving.completions import CallerDocument, CompletionRequest
    from kvweave.types import Message

    options: AskKeywords = body.get("kvweave", {})
    return CompletionRequest(
        messages=tuple(Message(one["role"], one["content"]) for one in body["messages"]),
        documents=tuple(CallerDocument(one["id"], one["text"]) for one in body.get("documents", ())),
        options={
            **options,
            "generation": tenant.sampling(max_new_tokens=body["max_tokens"], temperature=0.0),
        },
    )


if __name__ == "__main__":
    main()
