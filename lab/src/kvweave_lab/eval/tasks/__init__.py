"""The tasks, one file for each family: the facts of a document and the questions about them."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from kvweave.errors import InvalidRequest
from kvweave_lab.eval.documents import Draft
from kvweave_lab.eval.tasks import chains, coref, mixed, needles, order, word_counts
from kvweave_lab.eval.tasks.mixed import PERMUTED
from kvweave_lab.eval.world import World

_ALL = {
    task.name: task for module in (needles, chains, word_counts, coref, order, mixed) for task in module.TASKS
}
_FIXED = (
    *("single", "multikey", "multivalue", "multiquery", "vartrack", "commonwords", "frequentwords"),
    *("twohop", "coref", "contradiction", "order"),
)
_MIXED = tuple(PERMUTED.values())

TASKS: Mapping[str, Callable[[World], Draft]] = MappingProxyType({name: _ALL[name].write for name in _FIXED})
"""The tasks of which the reference model learned, by name, in the order in which tables list them.

In coref, vartrack and half of contradiction, the sentence that refers back starts the chunk after the one it refers to."""

EVERY_TASK: Mapping[str, Callable[[World], Draft]] = MappingProxyType(
    {name: _ALL[name].write for name in (*_FIXED, *_MIXED, *PERMUTED)}
)
"""Every task by name: those in TASKS, and those whose placement is drawn."""

TASK_SETS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"fixed": _FIXED, "neutral": (*_MIXED, "twohop", "order"), "permuted": tuple(PERMUTED)}
)
"""Sets of tasks by name. `neutral` has every task whose answer needs two chunks, none of which favours a place in a chunk.
`permuted` has those of them that refer back, with chunks in an order against the text."""

METRIC_OF: Mapping[str, str] = MappingProxyType({name: _ALL[name].metric for name in EVERY_TASK})
"""The name of every task's metric.

RULER's tasks want the values anywhere in the answer, as RULER does, but as whole words. Tasks with steps want the value
after the steps. The others want the value and nothing else."""


def task_set(name: str) -> tuple[str, ...]:
    """Return the tasks of a set; raises InvalidRequest that lists the sets."""
    if name not in TASK_SETS:
        raise InvalidRequest(f"there is no set of tasks {name!r}; choose one of {', '.join(TASK_SETS)}")
    return TASK_SETS[name]
