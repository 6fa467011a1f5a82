"""mcp: serves the knowledge bases as tools for an agent, over the Model Context Protocol."""

import sys
from dataclasses import replace
from typing import Annotated

import typer

from kvweave.cli import options as opt
from kvweave.extras import require

PORT = 8421


@opt.with_options(
    *opt.KB,
    *opt.MODEL,
    "system",
    *opt.REUSE,
    *("top_k", "max_new_tokens", "temperature", "think"),
    *opt.OFFLOADING,
    "use_server",
    kb="Knowledge base to use if the tool call names none.",
    top_k="Passages to retrieve if the tool call does not say how many. Default: 5.",
)
def mcp(
    http: Annotated[
        bool, typer.Option("--http", help="Serve streamable HTTP instead of standard input and output.")
    ] = False,
    host: Annotated[
        str,
        typer.Option(
            "--host",
            envvar="KVWEAVE_MCP_HOST",
            help="With --http, the address to listen on. Any but this machine's own needs KVWEAVE_API_KEY.",
        ),
    ] = "127.0.0.1",
    port: Annotated[
        int,
        typer.Option("--port", envvar="KVWEAVE_MCP_PORT", help="With --http, the port; 0 takes a free one."),
    ] = PORT,
    *,
    options: opt.SharedOptions,
) -> None:
    """Serve tools to an agent: list knowledge bases and documents, search passages, answer with sources.

    The tools use a running server of the same home if there is one. Standard output carries only the protocol.
    """
    require("mcp", "the MCP server", "mcp")
    from kvweave.config import split
    from kvweave.server.mcp.sources import HomeSource
    from kvweave.server.mcp.tools import mcp_server
    from kvweave.server.mcp.transports import prints_to_stderr, serve_http, serve_stdio

    config = options.config()
    with HomeSource(config, lambda kb: replace(options, kb=kb).open_kb()) as source:
        server = mcp_server(source, options.kb, options.top_k, None if http else prints_to_stderr)
        if http:
            serve_http(server, host, port, split(config.server.api_key), _tell)
        else:
            serve_stdio(server)


def _tell(url: str) -> None:
    print(f"kvweave mcp listens on {url}", file=sys.stderr, flush=True)
