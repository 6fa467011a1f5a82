"""Commands that other packages add, through the entry-point group `kvweave.commands`."""

from importlib.metadata import EntryPoint
from typing import Any

import typer
from typer.core import TyperGroup

from kvweave.plugins import LAB, lab_missing, plugins

GROUP = "kvweave.commands"


class PluginGroup(TyperGroup):
    """A command group that also offers the commands of installed plugins, loading each only when it is used."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Own commands first, then those of plugins by name."""
        own = super().list_commands(ctx)
        return [*own, *sorted(name for name in plugins(GROUP) if name not in own)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of this name, or None. Raises MissingExtra for a command of the lab that is not installed."""
        own = super().get_command(ctx, cmd_name)
        if own is not None:
            return own
        plugin = plugins(GROUP).get(cmd_name)
        if plugin is not None:
            return _loaded(plugin)
        if cmd_name in LAB["kvweave.commands"]:
            raise lab_missing(f"`kvweave {cmd_name}`")
        return None


def _loaded(plugin: EntryPoint) -> Any:
    """A plugin's command: it names a Typer app or a function."""
    target = plugin.load()
    app = typer.Typer(add_completion=False)
    if isinstance(target, typer.Typer):
        app.add_typer(target, name=plugin.name)
        return typer.main.get_group(app).get_command(None, plugin.name)  # type: ignore[arg-type]
    app.command()(target)
    command = typer.main.get_command(app)
    command.name = plugin.name
    return command
