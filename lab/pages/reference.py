"""The generated pages of docs/reference: command line, settings, Python, recipes, models.

`build.py` writes what `reference_pages` returns. Nothing here depends on the machine or on the time.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import typer
from docstrings import entries, one_line, prose, sentences
from methods_page import headings
from python_page import python_api

from kvweave.cli.app import GROUP, OWN, app
from kvweave.config import Config, all_settings, environment_variable
from kvweave.models.families import PREFIX_ONLY, REFUSED, Limitation
from kvweave.plugins import plugins
from kvweave.recipes.methods import METHODS, preparation_name, recipe_named
from kvweave.recipes.prepare import NotPrepared

GENERATED = "<!-- Written by `make docs`; edit {source} instead. -->"


def reference_pages(parity: Mapping[str, Any]) -> dict[str, str]:
    """Return the generated pages by file name; `parity` is the result of `lab/experiments/parity.py`."""
    pages = {
        "command-line.md": command_line(),
        "settings.md": settings(),
        "python.md": python_api(GENERATED.format(source="the docstrings")),
        "recipes.md": recipes(),
        "models.md": models(parity),
    }
    return {name: "\n".join(lines).rstrip() + "\n" for name, lines in pages.items()}


# Commands


def command_line() -> list[str]:
    own = [*_commands()]
    added = ", ".join(f"`kvweave {name}`" for name in sorted(plugins(GROUP)))
    return [
        "# Command line",
        "",
        GENERATED.format(source="the help texts in src/kvweave/cli"),
        "",
        "Most options are [settings](settings.md): `--top-k` is the setting `top_k`. This page lists the other options; the `--help` of a",
        "command describes all of them. Many commands also accept `--home`, `--kb`, `--json` and `--quiet`.",
        "",
        *(_command(path, command) for path, command in own),
        "",
        f"{added} come with kvweave-lab: see [lab/README.md](../../lab/README.md).",
        "",
        "Exit codes: 0 success, 1 expected error or a check that failed, 2 wrong usage, 130 interrupted.",
    ]


def _commands() -> Iterator[tuple[str, Any]]:
    """Yield the product's commands with their full names, in the order of `--help`."""
    top = typer.main.get_command(app)
    for name in OWN:
        command = top.get_command(None, name)
        if isinstance(command, typer.core.TyperGroup):
            yield from ((f"kvweave {name} {each}", command.commands[each]) for each in command.commands)
        else:
            yield f"kvweave {name}", command


def _options(command: Any) -> list[Any]:
    return [each for each in command.params if each.param_type_name == "option" and each.name != "help"]


def _is_setting(option: Any) -> bool:
    return option.envvar in map(environment_variable, all_settings())


def _command(path: str, command: Any) -> str:
    arguments = [_argument(each) for each in command.params if each.param_type_name == "argument"]
    options = [
        each
        for each in _options(command)
        if not _is_setting(each) and each.name not in ("home", "kb", "json", "quiet")
    ]
    line = f"- `{' '.join([path, *arguments])}`: {one_line(command.help).partition('. ')[0].rstrip('.')}"
    return ". ".join([line, ", ".join(f"`{_spelled(each)}`" for each in options)]).rstrip(". ") + "."


def _argument(argument: Any) -> str:
    name = argument.name.upper() + ("..." if argument.nargs != 1 else "")
    return name if argument.required else f"[{name}]"


def _spelled(option: Any) -> str:
    return ", ".join([*option.opts, *option.secondary_opts])


# Settings


def settings() -> list[str]:
    lines = [
        "# Settings",
        "",
        GENERATED.format(source="src/kvweave/config.py"),
        "",
        "kvweave takes a setting from the first of these places that has it: an argument of `kvweave.open` or an option of a command; an",
        "environment variable, such as `KVWEAVE_TOP_K`; the file `config.toml` in the home folder; the default, which is in brackets below.",
        "The file has one line per setting and no sections:",
        "",
        "```toml",
        'model = "Qwen/Qwen2.5-1.5B-Instruct"',
        "top_k = 8",
        "```",
        "",
        "`KVWEAVE_KB` names the knowledge base of a command. `KVWEAVE_RATIO` and `KVWEAVE_COVERAGE` set its budget for recomputation.",
    ]
    lines += _setting_list(Config, [field for field in dataclasses.fields(Config) if not _is_part(field)])
    for part in (field.default_factory for field in dataclasses.fields(Config) if _is_part(field)):
        lines += _setting_list(part, dataclasses.fields(part))  # type: ignore[arg-type]
    return lines


def _is_part(field: Any) -> bool:
    return dataclasses.is_dataclass(field.default_factory)


def _setting_list(component: Any, fields: Iterable[Any]) -> list[str]:
    title, _, rest = " ".join(prose(component)).partition(". ")
    meanings = entries(component, "Attributes")
    lines = ["", f"## {title.rstrip('.')}", "", *([rest, ""] if rest else [])]
    for field in fields:
        default = "" if field.default in (None, dataclasses.MISSING) else f" (`{field.default}`)"
        lines.append(f"- `{field.name}`{default}: {meanings[field.name]}")
    return lines


# Recipes


def recipes() -> list[str]:
    extra = plugins("kvweave.recipes")
    own = [name for name in METHODS if name not in extra]
    weave = sentences(headings(METHODS["weave"])["Idea"], 3)
    return [
        "# Recipes",
        "",
        GENERATED.format(source="the recipes' docstrings"),
        "",
        "The [guide](../guide/recipes.md) explains recipes, preparations and ratios.",
        "[lab/docs/methods.md](../../lab/docs/methods.md#every-method) has the paper, the idea, the parameters, the differences from the paper,",
        "the scores and the costs of each recipe. In brackets are the recipe's own preparation, and its ratio if it recomputes tokens.",
        "",
        *(f"- `{name}`{_own_choices(name)}: {one_line(headings(METHODS[name])[''])}" for name in own),
        "",
        f"kvweave-lab adds {', '.join(f'`{name}`' for name in sorted(extra))}.",
        "",
        "## What `weave` selects",
        "",
        weave[0].upper() + weave[1:],
    ]


def _own_choices(name: str) -> str:
    """Return the recipe's own preparation and ratio in brackets, as far as it has them."""
    recipe = recipe_named(name)
    prepared = preparation_name(recipe.prepare)
    assert prepared or recipe.prepare == NotPrepared(), name
    chosen = [f"`{prepared}`"] * bool(prepared) + [f"{recipe.ratio:g}"] * recipe.select.selective
    return f" ({', '.join(chosen)})" if chosen else ""


# Models


def models(parity: Mapping[str, Any]) -> list[str]:
    def largest(name: str) -> float:
        return max(float(each[name]) for each in parity["families"])

    versions = parity["versions"]
    logits = [each["largest_logit"] for each in parity["families"]]
    return [
        "# Models",
        "",
        GENERATED.format(source="lab/pages/reference.py or src/kvweave/models/families.py"),
        "",
        "kvweave runs decoders of Hugging Face transformers unmodified. When a model is loaded, five tokens go through it and kvweave",
        "checks bit by bit that it can rotate the model's keys itself. A model that fails is refused before anything is stored.",
        "`kvweave doctor --model NAME` checks yours.",
        "",
        "## Exact prefixes alone",
        "",
        "kvweave cannot move the KV of these models. They answer single questions with `--recipe prefix`: kvweave stores the model's whole",
        "state after each prefix and continues from it. Each line has the reason.",
        "",
        *_limited(PREFIX_ONLY),
        "",
        "## Refused",
        "",
        *_limited(REFUSED),
        "",
        "## Checked families",
        "",
        f"A tiny model of each (random weights, float32) was compared with plain transformers {versions['transformers']} and torch "
        f"{versions['torch']}. The last logits,",
        f"of magnitude {min(logits):.1f} to {max(logits):.1f}, differ by at most {largest('recompute_all'):.0e} when every row is recomputed over a cache "
        f"of garbage, and by at most {largest('prefix_reuse'):.0e}",
        f"when 70 of 100 tokens come from stored KV (`{parity['command']}`).",
        "",
        f"{', '.join(each['family'] for each in parity['families'])}.",
    ]


def _limited(table: Iterable[Limitation]) -> list[str]:
    return [f"- {', '.join(each.families)}: {each.reason}" for each in table]
