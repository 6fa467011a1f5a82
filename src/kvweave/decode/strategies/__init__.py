"""All strategies by name: the command line's choices, the contract tests and the benches come from this table."""

from collections.abc import Callable, Mapping

from kvweave.decode.clusters.retrieval import ClusterParts
from kvweave.decode.retriever import DenseAttention, Retriever, SinkAttention
from kvweave.decode.strategies.clustered import Adaptive, Local, Static
from kvweave.decode.strategies.entries import SingleEntries
from kvweave.errors import InvalidRequest

STRATEGIES: Mapping[str, Callable[[int, ClusterParts], Retriever]] = {
    "dynakv": Adaptive,
    "static": Static,
    "local": Local,
    "entries": SingleEntries,
    "window": lambda layer, parts: SinkAttention(),
    "dense": lambda layer, parts: DenseAttention(),
}

CLUSTERED = ("dynakv", "static", "local")
"""Those that make clusters."""


def strategy_named(name: str) -> Callable[[int, ClusterParts], Retriever]:
    """What makes a layer's retriever; raises InvalidRequest for an unknown name."""
    if name not in STRATEGIES:
        raise InvalidRequest(f"there is no decoding strategy {name!r}; choose one of {', '.join(STRATEGIES)}")
    return STRATEGIES[name]
