"""The tasks, one file each: what a document has to say and what is asked about it."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from kvweave.evaluation.draft import Draft
from kvweave.evaluation.tasks import (
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
from kvweave.evaluation.world import World

TASKS: Mapping[str, Callable[[World], Draft]] = MappingProxyType(
    {
        module.NAME: module.write
        for module in (
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
    }
)
"""Every task by name, in the order in which tables list them."""
