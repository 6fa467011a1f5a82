"""Decoding strategies by name: that of this package, and those that others add through `kvweave.strategies`."""

from collections.abc import Mapping

from kvweave.decode.clusters.adaptive import AdaptiveClusters
from kvweave.decode.shared_state import Strategy
from kvweave.errors import InvalidRequest
from kvweave.plugins import more_in_lab, plugins

_OWN: Mapping[str, Strategy] = {"dynakv": Strategy(AdaptiveClusters)}


def strategy_named(name: str) -> Strategy:
    """Return a strategy; raise InvalidRequest for an unknown name."""
    if name in _OWN:
        return _OWN[name]
    others = plugins("kvweave.strategies")
    if name not in others:
        more, known = more_in_lab("kvweave.strategies"), ", ".join((*_OWN, *sorted(others)))
        raise InvalidRequest(f"there is no decoding strategy {name!r}; choose one of {known}{more}")
    strategy: Strategy = others[name].load()
    return strategy
