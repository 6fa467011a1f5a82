"""Variants of decoding strategies: with one technique switched off or one setting changed.

A variant's name is a strategy's, or STRATEGY/ABLATION for a strategy with clusters.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

from kvweave.decode.settings import OffloadSettings
from kvweave.decode.strategies import CLUSTERED, STRATEGIES, strategy_named
from kvweave.errors import InvalidRequest

ABLATED = "dynakv"


def _with(part: str, settings: OffloadSettings, **changes: Any) -> OffloadSettings:
    changed: Any = {part: replace(getattr(settings, part), **changes)}
    return replace(settings, **changed)


_clusters, _disk, _residency = (partial(_with, part) for part in ("clusters", "disk", "residency"))

ABLATIONS: Mapping[str, Callable[[OffloadSettings], OffloadSettings]] = MappingProxyType(
    {
        "immediate-split": lambda kv: _clusters(kv, split="immediate"),
        **{f"buffer-{n}": partial(_clusters, buffer_entries=n) for n in (0, 2, 4, 8)},
        **{f"spread-{c:g}": partial(_clusters, spread=c) for c in (0.5, 0.7, 1.0, 2.0, 3.0)},
        "whole-clusters": lambda kv: _clusters(kv, candidates=1.0),
        **{f"candidates-{c:g}": partial(_clusters, candidates=c) for c in (1.4, 1.8, 2.5)},
        "made-order": lambda kv: _disk(kv, order="made"),
        "packed": lambda kv: _disk(kv, layout="packed"),
        "one-tail-page": lambda kv: _disk(kv, tail_pages=1),
        "no-gaps": lambda kv: _disk(kv, gap_pages=0),
        "no-prefetch": lambda kv: _residency(kv, prefetch=0),
        "lru": lambda kv: _residency(kv, replacement="lru"),
        "lfu": lambda kv: _residency(kv, replacement="lfu"),
        "resident-centroids": lambda kv: _residency(kv, representatives="resident"),
    }
)
"""Changes of settings by name. The defaults are a buffer of 16 entries, a spread of 1.5 and 1.8 times as many candidates."""


def all_variants() -> tuple[str, ...]:
    """Return the names of every strategy, then of every ablation."""
    return (*STRATEGIES, *(f"{ABLATED}/{name}" for name in ABLATIONS))


def variant_named(name: str, settings: OffloadSettings) -> OffloadSettings:
    """Return the settings of a variant; raise InvalidRequest for an unknown name."""
    strategy, _, ablation = name.partition("/")
    strategy_named(strategy)
    chosen = replace(settings, strategy=strategy)
    if not ablation:
        return chosen
    if strategy not in CLUSTERED or ablation not in ABLATIONS:
        raise InvalidRequest(
            f"there is no variant {name!r} of a decoding strategy; choose one of {', '.join(all_variants())}; "
            f"{' and '.join(CLUSTERED[1:])} may be changed as {ABLATED} is"
        )
    return ABLATIONS[ablation](chosen)
