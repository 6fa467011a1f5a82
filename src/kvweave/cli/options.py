"""Options that several commands share. `SharedOptions` declares each once; `with_options` adds them to a command."""

import contextlib
import dataclasses
import functools
import inspect
import json
import os
import re
import sys
import typing
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvweave.config import Setting, all_settings, default_home, environment_variable, meanings, read_config
from kvweave.errors import InvalidRequest

if TYPE_CHECKING:
    from kvweave.config import Config
    from kvweave.knowledge_base import KnowledgeBase
    from kvweave.kvstore.reports import TierName
    from kvweave.models.adapter import Adapter
    from kvweave.models.snapshot_adapter import LoadedModel
    from kvweave.state.knowledge_base_state import Progress

Command = Callable[..., None]

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kMGT]?)i?B?", re.IGNORECASE)
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}

KB = ("home", "kb")
MODEL = ("model", "dtype", "weights", "device")
REUSE = ("recipe", "prepare", "storage", "auxiliary", "shared")
OFFLOADING = ("kv_budget", "resident_bytes")

Json = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", envvar="KVWEAVE_QUIET", help="No progress bars.")]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SharedOptions:
    """The shared options of one command line. None means that an option was not given or is not one of this command.

    A field that is a setting (`kvweave.config`) has the setting's name and applies while the knowledge base is open; its help
    text is the setting's, unless one is here. `ratio`, `coverage` and `top_k` apply to one question.

    Attributes:
        home: Where everything is stored. Default: the platform's data folder.
        kb: Name of the knowledge base.
        recipe: How stored KV is reused and which tokens are recomputed; an unknown name lists the known ones.
        prepare: How chunk KV is prepared, if not as the recipe does it; an unknown name lists the known ones.
        tier: device, host, disk or shared.
        ratio: Share of the reused context to recompute, 0 to 1.
        coverage: Instead of --ratio: recompute the top-scored tokens that together hold this share of the scores, 0
            to 1 (at least 2 %, at most 50 % of the tokens).
        kv_budget: KV entries that each decoded token attends to: a share up to 1, or a number above 1. Default: all,
            in memory.
        resident_bytes: Most memory for KV while decoding, such as 200MB; the rest is in a file. Default: no limit.
    """

    home: Path | None = None
    kb: str = "default"
    model: str | None = None
    dtype: str | None = None
    weights: str | None = None
    device: str | None = None
    embedding_model: str | None = None
    reranker: str | None = None
    chunk_tokens: int | None = None
    overlap_tokens: int | None = None
    system: str | None = None
    recipe: str | None = None
    prepare: str | None = None
    storage: str | None = None
    auxiliary: str | None = None
    shared: str | None = None
    tier: str | None = None
    ratio: float | None = None
    coverage: float | None = None
    top_k: int | None = None
    max_new_tokens: int | None = None
    temperature: float | None = None
    think: bool | None = None
    kv_budget: float | None = None
    resident_bytes: str | None = None
    use_server: bool | None = None
    wait: bool | None = None
    prediction_stride: int | None = None
    calibrate_tokens: float | None = None
    idle_seconds_per_day: float | None = None

    def open_kb(self) -> "KnowledgeBase":
        """Open the existing knowledge base that the options name."""
        from kvweave.knowledge_base import open_existing

        _before_models()
        return open_existing(self.kb, home=self.home, **self._settings())

    def make_kb(self) -> "KnowledgeBase":
        """Open the knowledge base that the options name, and create it if it does not exist."""
        from kvweave.knowledge_base import open_knowledge_base

        _before_models()
        return open_knowledge_base(self.kb, home=self.home, **self._settings())

    def config(self, **more: Any) -> "Config":
        """Return the settings, including `more` settings that the command itself declares."""
        return read_config(self.home, **{**self._settings(), **more})

    def load_model(self, default: str | None = None) -> "Adapter":
        """Load the model that the options name, else `default`, else the shipped reference model."""
        from kvweave.models.loading import load_model

        _before_models()
        model = default if self.model is None else self.model
        return load_model(model, **self._loading(), home=self.home)

    def load_any_model(self) -> "LoadedModel":
        """Load the model that the options name, else the shipped reference model. It may support only some recipes."""
        from kvweave.models.loading import load_any_model

        return load_any_model(self.model, **self._loading(), home=self.home)

    def model_place(self) -> str:
        """Return where transformers finds the model: a folder or a hub id. Converts a GGUF file that was not converted yet."""
        from kvweave.models.loading import model_files

        _before_models()
        return model_files(self.model, self.home or default_home())

    def _loading(self) -> dict[str, str]:
        return {
            "dtype": self.dtype or "auto",
            "weights": self.weights or "auto",
            "device": self.device or "auto",
        }

    def budget(self, context: typer.Context) -> tuple[float | None, float | None]:
        """Return ratio and coverage. One from the command line overrides the other from the environment."""
        typed = {"ratio", "coverage"}.intersection(given_by("COMMANDLINE", context))
        if len(typed) == 1:
            return (self.ratio, None) if "ratio" in typed else (None, self.coverage)
        return self.ratio, self.coverage

    def _settings(self) -> dict[str, Any]:
        """Return the options that are settings for the knowledge base rather than for one question."""
        names = {each.name for each in dataclasses.fields(self)} & (all_settings().keys() - {"top_k"})
        settings = {name: getattr(self, name) for name in names}
        if self.resident_bytes is not None:
            settings["resident_bytes"] = size_bytes(self.resident_bytes)
        return settings


_FIELDS = {each.name: each for each in dataclasses.fields(SharedOptions)}
_FLAGS = {
    "use_server": "--server/--no-server",
    "prediction_stride": "--stride",
    "calibrate_tokens": "--tokens",
    "idle_seconds_per_day": "--seconds-per-day",
}
"""The flags that do not spell the field's name."""


def arguments_of(options: SharedOptions, names: Sequence[str]) -> list[str]:
    """Return command-line arguments that give these options to another process, without those that were not given."""
    arguments: list[str] = []
    for name in names:
        value = getattr(options, name)
        if value is not None:
            arguments += [_flag(name), str(value)]
    return arguments


def _flag(name: str) -> str:
    flag = name.replace("_", "-")
    return _FLAGS.get(name) or (
        f"--{flag}/--no-{flag}" if _FIELDS[name].type == (bool | None) else f"--{flag}"
    )


def declared(name: str, text: str | None = None) -> Any:
    """Return the Typer option for a field of SharedOptions, with `text` instead of its help text if given."""
    variable = None if name == "tier" else environment_variable(name)  # a tier is chosen for one command
    text = text or meanings(SharedOptions).get(name) or help_text(all_settings()[name])
    return typer.Option(_flag(name), envvar=variable, help=text)


def help_text(setting: Setting) -> str:
    """Return the help text of a setting, with its default."""
    default = setting.default
    if default is None:
        return setting.help
    if isinstance(default, bool):
        shown = "yes" if default else "no"
    else:
        shown = f"{default:,}" if isinstance(default, int) and default >= 10**6 else f"{default}"
    return f"{setting.help} Default: {shown}."


def with_options(*names: str, **texts: str) -> Callable[[Command], Command]:
    """Replace each parameter of a command that is a dataclass of options by the options in it.

    For SharedOptions these are the shared options `names`, in this order; `texts` replaces some help texts. For any other
    dataclass they are all its fields, each `Annotated` with a Typer option. The command is called with the dataclasses.
    """

    def decorate(command: Command) -> Command:
        parameters: list[inspect.Parameter] = []
        groups: dict[str, tuple[Any, list[str]]] = {}
        for parameter in inspect.signature(command).parameters.values():
            group = parameter.annotation
            if dataclasses.is_dataclass(group):
                options = _shared(names, texts) if group is SharedOptions else _options(group)
                groups[parameter.name] = group, [each.name for each in options]
                parameters += options
            else:
                parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))

        @functools.wraps(command)
        def expanded(**given: Any) -> None:
            made = {
                name: group(**{each: given.pop(each) for each in taken})
                for name, (group, taken) in groups.items()
            }
            command(**given, **made)

        expanded.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        expanded.__annotations__ = {each.name: each.annotation for each in parameters}
        return expanded

    return decorate


def _shared(names: Sequence[str], texts: dict[str, str]) -> list[inspect.Parameter]:
    types = typing.get_type_hints(SharedOptions)
    return [_option(_FIELDS[name], Annotated[types[name], declared(name, texts.get(name))]) for name in names]


def _options(group: Any) -> list[inspect.Parameter]:
    hints = typing.get_type_hints(group, include_extras=True)
    return [_option(each, hints[each.name]) for each in dataclasses.fields(group)]


def _option(field: "dataclasses.Field[Any]", annotation: Any) -> inspect.Parameter:
    default = inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default
    return inspect.Parameter(
        field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )


def _before_models() -> None:
    """Keep libraries quiet, and show a progress bar while a GGUF model is converted, unless KVWEAVE_QUIET is set.

    The bar is for commands that show no other one. Most calls of these commands convert nothing.
    """
    from kvweave.models.gguf.conversions import report_to

    shown = contextlib.ExitStack()
    report: Progress | None = None

    def show(stage: str, done: int, total: int) -> None:
        nonlocal report
        from kvweave.cli.output import STDERR, progress_bar

        if report is None:
            report = shown.enter_context(progress_bar(quiet=not STDERR.is_terminal))
        report(stage, done, total)
        if done >= total:
            shown.close()
            report = None

    quiet_libraries()
    if not os.environ.get("KVWEAVE_QUIET"):
        report_to(show)


def given_by(source: str, context: typer.Context) -> list[str]:
    """Return the parameters whose values come from `source`, COMMANDLINE or ENVIRONMENT."""
    sources = ((name, context.get_parameter_source(name)) for name in context.params)
    return [name for name, found in sources if found is not None and found.name == source]


def tier_named(name: str) -> "TierName":
    """Return the tier of this name. Raises InvalidRequest for an unknown name."""
    from kvweave.kvstore.reports import TIERS

    for tier in TIERS:
        if tier == name:
            return tier
    raise InvalidRequest(f"there is no tier {name!r}; choose one of {', '.join(TIERS)}")


def size_bytes(text: str) -> int:
    """Return the bytes of a size such as 500MB or 20GB. Raises InvalidRequest for any other text."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise InvalidRequest(f"{text!r} is not a size; write for example 500MB or 20GB")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def json_lines(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield the number and the value of each line of a file of JSON lines, None for what is no JSON; skip empty lines.

    Raises InvalidRequest for a file that is not UTF-8, OSError for one that cannot be read.
    """
    try:
        with path.open(encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    try:
                        yield number, json.loads(line)
                    except ValueError:
                        yield number, None
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{path} is no text in UTF-8: {error}") from error


def quiet_libraries() -> None:
    """Keep transformers from printing progress bars and notices, without importing it."""
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    if "transformers" in sys.modules:  # it has read the variables already
        from transformers.utils import logging

        logging.disable_progress_bar()
        logging.set_verbosity_error()
