"""serve and mcp: answer over HTTP, and as tools of an agent. Every setting is an option of serve."""

import dataclasses
import sys
from collections.abc import Collection
from typing import Annotated, Any, Final

import typer

from kvweave.cli import options as opt
from kvweave.config import Setting, all_settings, environment_variable, split
from kvweave.extras import require

_SIZES = "_bytes"
"""Settings with this suffix are sizes. The command line also takes them as text such as 20GB."""
MCP_PORT: Final = 8421


def _setting_options(without: Collection[str]) -> Any:
    """Return a dataclass with an option, None by default, for every setting of a component that is not in `without`."""
    fields = [
        (name, _declaration(setting), None)
        for name, setting in all_settings().items()
        if setting.part and name not in without
    ]
    return dataclasses.make_dataclass("SettingOptions", fields, frozen=True, kw_only=True)


def _given(options: Any) -> dict[str, Any]:
    """Return the options as arguments of `read_config`, with sizes as numbers."""
    return {
        name: opt.size_bytes(value) if name.endswith(_SIZES) and value is not None else value
        for name, value in dataclasses.asdict(options).items()
    }


def _declaration(setting: Setting) -> Any:
    flag = setting.name.replace("_", "-")
    spelled = f"--{flag}/--no-{flag}" if setting.kind is bool else f"--{flag}"
    option = typer.Option(spelled, envvar=environment_variable(setting.name), help=opt.help_text(setting))
    return Annotated[(str if setting.name.endswith(_SIZES) else setting.kind) | None, option]


SHARED: Final = (*opt.KB, "system", "recipe", "prepare", "prediction_stride")
OtherSettings: Any = _setting_options(without=SHARED)


@opt.with_options(
    *SHARED, kb="Take the model and the embedding model that this knowledge base was made with."
)
def serve(*, options: opt.SharedOptions, settings: OtherSettings) -> None:
    """Serve questions over HTTP, with OpenAI's API, a page at / and metrics. Ends on SIGTERM or Ctrl-C."""
    config = options.config(**_given(settings))
    opt.quiet_libraries()
    require("serve", "`kvweave serve`", "fastapi", "uvicorn", "prometheus_client", "python_multipart")
    from kvweave.server.process.lifecycle import serve as run
    from kvweave.state.knowledge_base_state import existing_kbs, kb_folder, with_recorded_models

    if options.kb != "default" and not kb_folder(options.kb, config).exists():
        typer.echo(
            f"there is no knowledge base {options.kb!r} ({existing_kbs(config)}); the settings name the model",
            err=True,
        )
    run(with_recorded_models(config, options.kb), typer.echo)


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
    ] = MCP_PORT,
    *,
    options: opt.SharedOptions,
) -> None:
    """Serve tools to an agent: list knowledge bases and documents, search passages, answer with sources.

    The tools use a running server of the same home if there is one. Standard output carries only the protocol.
    """
    require("mcp", "the MCP server", "mcp")
    from kvweave.server.mcp.sources import HomeSource
    from kvweave.server.mcp.tools import mcp_server, prints_to_stderr, serve_http, serve_stdio

    config = options.config()
    with HomeSource(config, lambda kb: dataclasses.replace(options, kb=kb).open_kb()) as source:
        server = mcp_server(source, options.kb, options.top_k, None if http else prints_to_stderr)
        if http:
            serve_http(server, host, port, split(config.server.api_key), _tell)
        else:
            serve_stdio(server)


def _tell(url: str) -> None:
    print(f"kvweave mcp listens on {url}", file=sys.stderr, flush=True)
