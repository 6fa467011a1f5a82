"""The tasks, one file each: the facts of a document and the questions about them."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from kvweave_lab.eval.documents import Draft
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
"""The name of every task's metric.

RULER's tasks want the values anywhere in the answer, as RULER does, but as whole words. Tasks with steps want the value
after the steps. The others want the value and nothing else."""
