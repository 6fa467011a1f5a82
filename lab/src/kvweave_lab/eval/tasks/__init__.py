"""The tasks, one file for each family: the facts of a document and the questions about them."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from kvweave_lab.eval.documents import Draft
from kvweave_lab.eval.tasks import chains, coref, needles, order, word_counts
from kvweave_lab.eval.world import World

_ALL = {task.name: task for module in (needles, chains, word_counts, coref, order) for task in module.TASKS}
_ORDER = (
    *("single", "multikey", "multivalue", "multiquery", "vartrack", "commonwords", "frequentwords"),
    *("twohop", "coref", "contradiction", "order"),
)

TASKS: Mapping[str, Callable[[World], Draft]] = MappingProxyType({name: _ALL[name].write for name in _ORDER})
"""Every task by name, in the order in which tables list them."""

METRIC_OF: Mapping[str, str] = MappingProxyType({name: _ALL[name].metric for name in _ORDER})
"""The name of every task's metric.

RULER's tasks want the values anywhere in the answer, as RULER does, but as whole words. Tasks with steps want the value
after the steps. The others want the value and nothing else."""
