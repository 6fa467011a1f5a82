"""serve: answer over HTTP, with OpenAI's API and routes for knowledge bases. Every setting is an option here."""

import dataclasses
import typing
from collections.abc import Collection
from typing import Annotated, Any, Final

import typer

from kvweave.cli import options as opt
from kvweave.config import Config, environment_variable
from kvweave.extras import require
from kvweave.server_config import meanings

_SIZES = "_bytes"
"""Settings with this suffix are sizes. The command line also takes them as text such as 20GB."""


def _setting_options(without: Collection[str]) -> Any:
    """Return a dataclass with an option, None by default, for every setting that is not in `without`."""
    fields = []
    for component in _components():
        hints, texts = typing.get_type_hints(component), meanings(component)
        for each in dataclasses.fields(component):
            if each.name not in without:
                fields.append((each.name, _declaration(each, hints[each.name], texts[each.name]), None))
    return dataclasses.make_dataclass("SettingOptions", fields, frozen=True, kw_only=True)


def _given(options: Any) -> dict[str, Any]:
    """Return the options as arguments of `read_config`, with sizes as numbers."""
    found = {each.name: getattr(options, each.name) for each in dataclasses.fields(options)}
    return {
        name: opt.size_bytes(value) if name.endswith(_SIZES) and isinstance(value, str) else value
        for name, value in found.items()
    }


def _components() -> list[Any]:
    parts = [each.default_factory for each in dataclasses.fields(Config)]
    return [part for part in parts if dataclasses.is_dataclass(part)]


def _declaration(field: Any, hint: Any, text: str) -> Any:
    kind = next(each for each in (bool, int, float, str) if each is hint or each in typing.get_args(hint))
    flag = field.name.replace("_", "-")
    spelled = f"--{flag}/--no-{flag}" if kind is bool else f"--{flag}"
    default = "" if field.default is None else f" Default: {_default_text(field.default)}."
    option = typer.Option(spelled, envvar=environment_variable(field.name), help=text + default)
    return Annotated[(str if field.name.endswith(_SIZES) else kind) | None, option]


def _default_text(default: object) -> str:
    if isinstance(default, bool):
        return "yes" if default else "no"
    return f"{default:,}" if isinstance(default, int) and default >= 10**6 else f"{default}"


SHARED: Final = (
    *opt.KB,
    *opt.MODEL,
    "embedding_model",
    *("chunk_tokens", "overlap_tokens", "system"),
    *opt.REUSE,
    "top_k",
    "reranker",
    *("max_new_tokens", "temperature", "think"),
    *opt.OFFLOADING,
    "prediction_stride",
)
OtherSettings: Any = _setting_options(without=SHARED)


@opt.with_options(
    *SHARED, kb="Take the model and the embedding model that this knowledge base was made with."
)
def serve(*, options: opt.SharedOptions, settings: OtherSettings) -> None:
    """Serve questions over HTTP, with OpenAI's API, a page at / and metrics. Ends on SIGTERM or Ctrl-C."""
    config = options.config(**_given(settings), top_k=options.top_k)
    opt.quiet_libraries()
    require("serve", "`kvweave serve`", "fastapi", "uvicorn", "prometheus_client", "python_multipart")
    from kvweave.server.process.lifecycle import serve as run
    from kvweave.state.knowledge_base_state import existing_kbs, kb_folder
    from kvweave.state.recorded_models import with_recorded_models

    if options.kb != "default" and not kb_folder(options.kb, config).exists():
        typer.echo(
            f"there is no knowledge base {options.kb!r} ({existing_kbs(config)}); the settings name the model",
            err=True,
        )
    run(with_recorded_models(config, options.kb), typer.echo)
