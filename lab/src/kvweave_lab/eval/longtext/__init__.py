"""Long texts, one file per kind: what is said, and what said long ago is needed again."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from kvweave_lab.eval.longtext import dialogue, reasoning, story
from kvweave_lab.eval.longtext.script import Script
from kvweave_lab.eval.world import World

_MODULES = (reasoning, dialogue, story)

LONG_TASKS: Mapping[str, Callable[[World], Script]] = MappingProxyType(
    {module.NAME: module.write for module in _MODULES}
)
"""Every kind of long text by name, in the order in which tables list them."""
