"""What is generated for users: the table at the top of README and the pages of docs/reference.

`build.py` writes what `speed_and_quality` and `reference_pages` return. Nothing here depends on the machine or on the time.
"""

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, get_type_hints

import typer
from markdown_parts import NOT_MEASURED, header, row

import kvweave
from kvweave import errors
from kvweave.cli.app import app
from kvweave.cli.command_group import GROUP
from kvweave.config import Config
from kvweave.models.support import REFUSED_FIELDS
from kvweave.plugins import plugins
from kvweave.recipes.methods import METHODS, PREPARATIONS, recipe_named
from kvweave.recipes.prepare import NotPrepared
from kvweave_lab.eval.rows import OVERALL

GENERATED = "<!-- Written by `make docs`; edit {source} instead. -->"
SHARED_BY = 3
"""An option of at least this many commands is described once."""


def reference_pages(parity: Mapping[str, Any]) -> dict[str, str]:
    """Return the generated pages by file name; `parity` is what `lab/experiments/parity.py` measured."""
    pages = {
        "command-line.md": command_line(),
        "settings.md": settings(),
        "python.md": python_api(),
        "recipes.md": recipes(),
        "models.md": models(parity),
    }
    return {name: "\n".join(lines).rstrip() + "\n" for name, lines in pages.items()}


# The table of README


def speed_and_quality(
    speed: Mapping[str, Any] | None, quality: Mapping[str, Any] | None, recipe: str, ratio: float
) -> str:
    """Return one table: first token and accuracy of a recipe at its own ratio, beside full prefill.

    `speed` is one measurement of `kvweave bench ttft` and `quality` one of `kvweave eval`, over all tasks.
    """
    if speed is None or quality is None:
        return NOT_MEASURED
    timed = {(one["recipe"], one["ratio"]): one for one in speed["rows"]}
    fast, in_8_bits = timed[recipe, ratio], timed[recipe_named(recipe, storage="int8").name, ratio]
    scored = next(
        one
        for one in quality["rows"]
        if (one["task"], one["recipe"], one["ratio"]) == (OVERALL, recipe, ratio)
    )
    tasks = len({one["task"] for one in quality["rows"]} - {OVERALL})
    units = "" if "AMX" in speed["machine"] else " without matrix units"
    lines = [
        *header("", "full prefill", "kvweave"),
        row(
            f"first token, {fast['context_tokens']:,} tokens of context",
            f"{fast['full_s']:.1f} s",
            f"**{fast['ttft_s']:.1f} s ({fast['speedup']:.1f}× faster)**",
        ),
        row(
            f"accuracy, {tasks} synthetic tasks, {scored['context_tokens']:,} tokens of context",
            f"{scored['full_score']:.3f}",
            f"{scored['score']:.3f}",
        ),
        "",
        f"Default recipe, {ratio:.0%} of the reused tokens recomputed. **Speed and accuracy come from different models and lengths.** Speed: the "
        f"shape of {fast['shape']} with random weights, {fast['dtype']}, {fast['threads']} {fast['device'].upper()} threads{units}, "
        f"chunk KV in memory and exact ({in_8_bits['speedup']:.1f}× with the default 8-bit KV). Accuracy: the 10 MB model that ships with "
        f"kvweave, {scored['samples']:,} prompts; recomputing nothing scores {scored['reuse_score']:.3f}. How we measure "
        "[speed](lab/docs/ttft.md) and [quality, and what favours this recipe](lab/docs/methods.md).",
    ]
    return "\n".join(lines)


def recipe_scores(quality: Mapping[str, Any] | None, cost: Mapping[str, Any] | None) -> str:
    """Return the table of docs/guide/recipes.md: accuracy over all tasks by ratio, and what selecting costs."""
    if quality is None or cost is None:
        return NOT_MEASURED
    overall = [one for one in quality["rows"] if one["task"] == OVERALL]
    scores = {(one["recipe"], one["ratio"]): f"{one['score']:.3f}" for one in overall}
    shares = {one["recipe"]: f"{one['select_over_full']:.1%}" for one in cost["rows"]}
    ratios = sorted({ratio for _, ratio in scores} - {0.0, 1.0})
    lines = header("recipe", "nothing", *(f"{ratio:.0%}" for ratio in ratios), "everything", "selecting")
    for name in dict.fromkeys(recipe for recipe, _ in scores):
        cells = (scores.get((name, ratio), "") for ratio in (0.0, *ratios, 1.0))
        lines.append(row(f"`{name}`", *cells, shares.get(name, "")))
    about = overall[0]
    return "\n".join(
        [
            f"Accuracy by the share of stale tokens recomputed: mean over all tasks, {about['samples']:,} prompts of {about['context_tokens']:,} "
            f"tokens. Selecting: its time as a share of full prefill, {cost['prompt_tokens']:,} tokens in the shape of {cost['shape']}, ratio "
            f"{cost['ratio']:g}.",
            "",
            *lines,
        ]
    )


# Commands


def command_line() -> list[str]:
    top = typer.main.get_command(app)
    own = [*_commands(top, "kvweave")]
    counted: dict[str, list[Any]] = {}
    for _, command in own:
        for option in _options(command):
            counted.setdefault(_spelled(option), []).append(option)
    shared = {spelled: found[0] for spelled, found in counted.items() if _is_shared(found)}
    lines = [
        "# Command line",
        "",
        GENERATED.format(source="the help texts in src/kvweave/cli"),
        "",
        "`kvweave --help` shows the commands, and each command with `--help` its options. An option wins over its environment variable, which wins",
        "over `config.toml` (see [settings](settings.md)). Exit codes: 0 success, 1 expected error or a check that failed, 2 wrong",
        "usage, 130 interrupted.",
        "",
        "## Shared options",
        "",
        *_option_table(shared.values()),
    ]
    for path, command in own:
        lines += _command(path, command, shared)
    return [*lines, *_lab_commands()]


def _commands(command: Any, path: str) -> Iterator[tuple[str, Any]]:
    """The product's commands with their full names; commands of plugins are left out."""
    if isinstance(command, typer.core.TyperGroup):
        for name in command.commands:
            yield from _commands(command.commands[name], f"{path} {name}")
    else:
        yield path, command


def _options(command: Any) -> list[Any]:
    return [each for each in command.params if each.param_type_name == "option" and each.name != "help"]


def _is_shared(found: list[Any]) -> bool:
    return len(found) >= SHARED_BY and len({option.help for option in found}) == 1


def _command(path: str, command: Any, shared: Mapping[str, Any]) -> list[str]:
    arguments = " ".join(_argument(each) for each in command.params if each.param_type_name == "argument")
    lines = ["", f"## {path}", "", f"`{path} {arguments}`".replace(" `", "`"), "", _plain(command.help), ""]
    options = _options(command)
    own = [option for option in options if _spelled(option) not in shared]
    common = [f"`{_spelled(option)}`" for option in options if _spelled(option) in shared]
    if own:
        lines += [*_option_table(own), ""]
    lines.append(f"Shared: {', '.join(common)}.")
    return lines


def _argument(argument: Any) -> str:
    name = argument.name.upper() + ("..." if argument.nargs != 1 else "")
    return name if argument.required else f"[{name}]"


def _option_table(options: Iterable[Any]) -> list[str]:
    lines = header("option", "variable", "meaning")
    for option in options:
        variable = f"`{option.envvar}`" if option.envvar else ""
        lines.append(row(f"`{_spelled(option)}`", variable, _plain(option.help)))
    return lines


def _spelled(option: Any) -> str:
    return ", ".join([*option.opts, *option.secondary_opts])


def _plain(text: str | None) -> str:
    return " ".join((text or "").split()).replace("|", "\\|")


def _lab_commands() -> list[str]:
    top = typer.main.get_command(app)
    context = top.make_context("kvweave", [], resilient_parsing=True)
    lines = [
        "",
        "## Commands of kvweave-lab",
        "",
        "They come with the package in `lab/`; see [lab/README.md](../../lab/README.md).",
        "",
        *header("command", "meaning"),
    ]
    for name in sorted(plugins(GROUP)):
        command = top.get_command(context, name)
        lines.append(row(f"`kvweave {name}`", _plain(command.help)))
        if isinstance(command, typer.core.TyperGroup):
            below = sorted(command.commands.items())
            lines += [row(f"`kvweave {name} {each}`", _plain(one.help)) for each, one in below]
    return lines


# Settings


def settings() -> list[str]:
    lines = [
        "# Settings",
        "",
        GENERATED.format(source="src/kvweave/config.py"),
        "",
        "A setting comes from, in this order: an argument of `kvweave.open` or an option of a command; the environment variable",
        "`KVWEAVE_` and its name in capitals, such as `KVWEAVE_TOP_K`; the file `config.toml` in the home folder; its default.",
        "The file has one line per setting, without sections:",
        "",
        "```toml",
        'model = "Qwen/Qwen2.5-1.5B-Instruct"',
        "top_k = 8",
        "```",
        "",
        "`KVWEAVE_KB` names the knowledge base of a command, `KVWEAVE_RATIO` and `KVWEAVE_COVERAGE` its budget.",
    ]
    lines += _setting_table(Config, [field for field in dataclasses.fields(Config) if not _is_part(field)])
    for field in filter(_is_part, dataclasses.fields(Config)):
        lines += _setting_table(field.default_factory, dataclasses.fields(field.default_factory))
    return lines


def _is_part(field: Any) -> bool:
    return dataclasses.is_dataclass(field.default_factory)


def _setting_table(component: Any, fields: Iterable[Any]) -> list[str]:
    intro, meanings = attributes(component)
    hints = get_type_hints(component)
    lines = ["", f"## {intro.split('.')[0]}", ""]
    rest = intro.partition(". ")[2]
    lines += [rest, ""] if rest else []
    lines += header("setting", "type", "default", "meaning")
    for field in fields:
        default = "" if field.default in (None, dataclasses.MISSING) else f"`{field.default}`"
        lines.append(row(f"`{field.name}`", _type_name(hints[field.name]), default, meanings[field.name]))
    return lines


def _type_name(hint: Any) -> str:
    names = [getattr(each, "__name__", str(each)) for each in getattr(hint, "__args__", (hint,))]
    return next(name for name in names if name != "NoneType").lower()


def attributes(documented: Any) -> tuple[str, dict[str, str]]:
    """Return the text before a docstring's section `Attributes:`, on one line, and its entries by name."""
    intro, _, section = (inspect.getdoc(documented) or "").partition("\nAttributes:\n")
    entries = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", section, re.M)
    return " ".join(intro.split()), {name: " ".join(text.split()) for name, text in entries}


# Python

NAMES = {
    "A knowledge base": ("open", "KnowledgeBase", "Answer", "Plan", "Timing"),
    "Your own retriever": (
        "load_model",
        "Adapter",
        "ChunkStore",
        "prepare",
        "Prompt",
        "prefill",
        "generate",
        "OffloadSettings",
    ),
    "Recipes and errors": ("METHODS", "Recipe", "KvweaveError"),
}
ALIASES = {"ClusteredKV": "OffloadSettings"}
MEMBERS: dict[str, tuple[str, ...]] = {
    "Adapter": (),
    "ChunkStore": (
        "used_bytes",
        "limit_bytes",
        "set_limit",
        "stats",
        "verify",
        "clear",
        "attach_device",
        "close",
    ),
}
"""Of classes whose other members are for recipes, those that a caller needs."""


def python_api() -> list[str]:
    lines = [
        "# Python",
        "",
        GENERATED.format(source="the docstrings"),
        "",
        "All names are imported from `kvweave`, and when they are first used: `import kvweave` itself is quick.",
    ]
    assert sorted([*ALIASES, *(name for names in NAMES.values() for name in names)]) == kvweave.__all__
    for title, names in NAMES.items():
        lines += ["", f"## {title}"]
        for name in names:
            lines += ["", f"### {name}", "", *_documented(name, getattr(kvweave, name))]
            lines += [f"\n`{alias}` is its earlier name." for alias, one in ALIASES.items() if one == name]
    return lines


def _documented(name: str, documented: Any) -> list[str]:
    if name == "METHODS":
        return ["Maps the name of each recipe to the function that makes it; see [recipes](recipes.md)."]
    if documented is errors.KvweaveError:
        tree = (inspect.getdoc(errors) or "").partition("\n\n")[2].partition("\n\nA message")[0]
        return [*_docstring(documented), "", "```", *inspect.cleandoc("\n" + tree).splitlines(), "```"]
    if inspect.isfunction(documented):
        return [*_signature(name, documented), "", *_docstring(documented)]
    if documented is kvweave.KnowledgeBase:
        return [*_docstring(documented), *_methods(documented)]
    told = _docstring(documented)
    if not MEMBERS.get(name, True):  # what its attributes are for is said where recipes are written
        told = told[: told.index("Attributes:") - 1] if "Attributes:" in told else told
    return [*_signature(name, documented), "", *told, *_members(documented)]


def _methods(documented: Any) -> list[str]:
    """Every public method in full, properties by their first sentence."""
    lines = _members(
        documented, [key for key, each in _public(documented).items() if isinstance(each, property)]
    )
    for key, each in _public(documented).items():
        if inspect.isfunction(each):
            lines += [
                "",
                f"#### {documented.__name__}.{key}",
                "",
                *_signature(key, each),
                "",
                *_docstring(each),
            ]
    return lines


def _members(documented: Any, names: Iterable[str] | None = None) -> list[str]:
    """A table of a class's members by their first sentences."""
    public = _public(documented)
    if names is None:
        names = MEMBERS.get(documented.__name__, tuple(public))
    shown = [(f"{name}()" if inspect.isfunction(public[name]) else name, public[name]) for name in names]
    rows = [row(f"`{name}`", _first_sentence(each)) for name, each in shown]
    return ["", *header("member", "meaning"), *rows] if rows else []


def _public(documented: Any) -> dict[str, Any]:
    """Methods and properties, those of kvweave's base classes first."""
    bases = [base for base in reversed(documented.__mro__) if base.__module__.startswith("kvweave")]
    members = {name: each for base in bases for name, each in vars(base).items()}
    kinds = {
        name: each for name, each in members.items() if inspect.isfunction(each) or isinstance(each, property)
    }
    return {name: each for name, each in kinds.items() if not name.startswith("_")}


def _signature(name: str, function: Callable[..., Any]) -> list[str]:
    parameters = inspect.signature(function).parameters.values()
    shown = [_parameter(each) for each in parameters if each.name != "self"]
    starred = any(each.kind is each.VAR_POSITIONAL for each in parameters)
    first = next((n for n, each in enumerate(parameters) if each.kind is each.KEYWORD_ONLY), None)
    if first is not None and not starred:
        shown.insert(first - (1 if "self" in inspect.signature(function).parameters else 0), "*")
    line = f"{name}({', '.join(shown)})"
    if len(line) <= 100:
        return ["```python", line, "```"]
    return ["```python", f"{name}(", *(f"    {each}," for each in shown), ")", "```"]


def _parameter(parameter: Any) -> str:
    star = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    if parameter.default is parameter.empty:
        return f"{star}{parameter.name}"
    told = repr(parameter.default)
    default = "..." if callable(parameter.default) or told.startswith("<") else told.replace("'", '"')
    return f"{parameter.name}={default}"


def _docstring(documented: Any) -> list[str]:
    """The docstring with each paragraph on one line and `Args:` and its like as lists."""
    lines: list[str] = []
    for paragraph in (inspect.getdoc(documented) or "").split("\n\n"):
        first, _, rest = paragraph.partition("\n")
        if re.fullmatch(r"[A-Z]\w+:", first):
            entries = re.split(r"\n(?=    \S)", "\n" + rest)
            lines += [first, "", *(f"- {_entry(each)}" for each in entries if each.strip()), ""]
        else:
            lines += [" ".join(paragraph.split()), ""]
    return lines[:-1]


def _entry(text: str) -> str:
    name, colon, said = " ".join(text.split()).partition(": ")
    return f"`{name}`: {said}" if colon and re.fullmatch(r"[\w, ]+", name) else " ".join(text.split())


def _first_sentence(documented: Any) -> str:
    paragraph = " ".join((inspect.getdoc(documented) or "").split("\n\n")[0].split())
    return re.split(r"(?<=[.;]) (?=[A-Z])", paragraph)[0].replace("|", "\\|")


# Recipes

HEADINGS = ("Paper", "Idea", "Parameters", "Differs from the paper", "Relations", "Measured")
SHOWN = HEADINGS[:3]  # the rest is in lab/docs/methods.md, beside the scores


def headings(make: Callable[..., Any]) -> dict[str, str]:
    """Return a recipe's docstring by its fixed headings, each on one line; the first line is under the empty one."""
    text = inspect.getdoc(make) or ""
    either = "|".join(HEADINGS)
    found = re.findall(rf"^({either}): (.*?)(?=\n(?:{either}): |\Z)", text, re.M | re.S)
    return {"": text.split("\n")[0]} | {name: " ".join(said.split()) for name, said in found}


def recipes() -> list[str]:
    extra = plugins("kvweave.recipes")
    own = [name for name in METHODS if name not in extra]
    lines = [
        "# Recipes",
        "",
        GENERATED.format(source="the recipes' docstrings"),
        "",
        "How to choose one is in the [guide](../guide/recipes.md), scores and costs of all are in",
        "[lab/docs/methods.md](../../lab/docs/methods.md). A preparation says how a chunk's KV is computed ahead of time; `--prepare NAME`",
        "combines one with any recipe that prepares chunks. A ratio is the share of stale tokens recomputed when a request names none.",
        "",
        *header("preparation", "how a chunk's KV is computed"),
        *(row(f"`{name}`", _first_sentence(each)) for name, each in PREPARATIONS.items()),
    ]
    for name in own:
        told = headings(METHODS[name])
        lines += ["", f"## {name}", "", f"{told['']} {_defaults(name)}".rstrip(), ""]
        lines += [f"- **{each}**: {told[each]}" for each in SHOWN if told[each] not in NOTHING]
    lines += ["", "## Recipes of kvweave-lab", "", *header("recipe", "what it does")]
    return [*lines, *(row(f"`{name}`", headings(METHODS[name])[""]) for name in sorted(extra))]


NOTHING = ("none.", "nothing to differ from.")


def _defaults(name: str) -> str:
    """The recipe's own preparation and ratio, as a sentence."""
    recipe = recipe_named(name)
    prepared = next((key for key, make in PREPARATIONS.items() if recipe.prepare == make()), None)
    assert prepared or recipe.prepare == NotPrepared(), name
    told = [f"preparation `{prepared}`"] if prepared else []
    told += [f"ratio {recipe.ratio:g}"] if recipe.select.selective else []
    return f"Defaults: {', '.join(told)}." if told else ""


# Models

REASONS = {
    "attention function": "its layers do not pass extra arguments to the attention function, so rows cannot be chosen",
    "after rotating": "it changes keys after rotating them, so stored keys cannot be moved exactly",
    "attention sinks": "attention sinks",
    "rotary": "positions are not rotary",
    "linear_attention": "state-space or linear-attention layers",
    "latent attention": "multi-head latent attention",
}


def models(parity: Mapping[str, Any]) -> list[str]:
    def largest(name: str) -> float:
        return max(float(each[name]) for each in parity["families"])

    versions = parity["versions"]
    logits = [each["largest_logit"] for each in parity["families"]]
    lines = [
        "# Models",
        "",
        GENERATED.format(source="lab/pages/reference.py or src/kvweave/models/support.py"),
        "",
        "kvweave runs decoders of Hugging Face transformers unmodified. When a model is loaded, five tokens go through it and kvweave",
        "checks bit by bit that it can rotate the model's keys itself. A model that fails is refused before anything is stored.",
        "`kvweave doctor --model NAME` checks yours.",
        "",
        "## Refused mechanisms",
        "",
        *(f"- {mechanism}" for mechanism in REFUSED_FIELDS.values()),
        "- layers of another type than full or sliding-window attention: state-space, linear attention",
        "- learned attention sinks",
        "- positions that are not rotary, keys changed after rotation, keys and values of different shapes",
        "",
        "## Checked families",
        "",
        f"A tiny model of each (random weights, float32) was compared with plain transformers {versions['transformers']} and torch "
        f"{versions['torch']}. The last logits,",
        f"of magnitude {min(logits):.1f} to {max(logits):.1f}, differ by at most {largest('recompute_all'):.0e} when every row is recomputed over a cache "
        f"of garbage, and by at most {largest('prefix_reuse'):.0e}",
        f"when 70 of 100 tokens come from stored KV (`{parity['command']}`). Variants of a family have other positions, windows or sizes.",
        "",
        f"{', '.join(each['family'] for each in parity['families'])}.",
        "",
        "## Refused families",
        "",
        *header("families", "reason"),
    ]
    refused: dict[str, list[str]] = {}
    for name, why in parity["refused"].items():
        refused.setdefault(REASONS.get(why, why), []).append(name)
    return [*lines, *(row(", ".join(names), why) for why, names in refused.items())]
