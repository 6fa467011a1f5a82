"""All strategies by name: the choices of the command line, of contract tests and of benchmarks."""

from collections.abc import Callable, Mapping

from kvweave.decode.retriever import DenseAttention, Retriever, SinkAttention
from kvweave.decode.shared_state import SharedState
from kvweave.decode.strategies.clustered import AdaptiveClusters, LocalClusters, StaticClusters
from kvweave.decode.strategies.entries import TopEntries
from kvweave.errors import InvalidRequest

STRATEGIES: Mapping[str, Callable[[int, SharedState], Retriever]] = {
    "dynakv": AdaptiveClusters,
    "static": StaticClusters,
    "local": LocalClusters,
    "entries": TopEntries,
    "window": lambda layer, shared: SinkAttention(),
    "dense": lambda layer, shared: DenseAttention(),
}

CLUSTERED = ("dynakv", "static", "local")
"""Strategies that form clusters."""


def strategy_named(name: str) -> Callable[[int, SharedState], Retriever]:
    """Return the constructor of a layer's retriever; raise InvalidRequest for an unknown name."""
    if name not in STRATEGIES:
        raise InvalidRequest(f"there is no decoding strategy {name!r}; choose one of {', '.join(STRATEGIES)}")
    return STRATEGIES[name]
