"""The tasks, one file each: what a document has to say and what is asked about it."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from kvweave_lab.eval.draft import Draft
from kvweave_lab.eval.tasks import (
    commonwords,
    contradiction,
    coref,
    frequentwords,
    multikey,
    multiquery,
    multivalue,
    order,
    single,
    twohop,
    vartrack,
)
from kvweave_lab.eval.world import World

_MODULES = (
    single,
    multikey,
    multivalue,
    multiquery,
    vartrack,
    commonwords,
    frequentwords,
    twohop,
    coref,
    contradiction,
    order,
)

TASKS: Mapping[str, Callable[[World], Draft]] = MappingProxyType(
    {module.NAME: module.write for module in _MODULES}
)
"""Every task by name, in the order in which tables list them."""

METRIC_OF: Mapping[str, str] = MappingProxyType({module.NAME: module.METRIC for module in _MODULES})
"""The name of every task's metric: RULER's tasks want the values somewhere in the answer, as RULER does, but as whole words;
tasks with steps want the value behind them; the others want it and nothing else."""
