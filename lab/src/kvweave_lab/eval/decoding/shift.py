"""How the keys of a text move away from the groups that its prompt was divided into (DynaKV §2.3, figure 4).

One text, decoded under each update of clusters; beside them a grouping of all keys anew. Knows nothing of plots.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from kvweave.decode.offloaded_cache import OffloadedCache
from kvweave.decode.settings import OffloadSettings
from kvweave.engine.facts import facts
from kvweave.errors import InvalidRequest
from kvweave.models.adapter import Adapter
from kvweave.ops.kmeans import k_means
from kvweave_lab.eval.decoding.kept import KeptResults
from kvweave_lab.eval.decoding.partition import global_variance, members, variance
from kvweave_lab.eval.decoding.run import Prefilled, decode
from kvweave_lab.eval.decoding.watching import WatchedRetriever
from kvweave_lab.eval.longtext.telling import LongText

UPDATES = ("static", "local", "dynakv")
GLOBAL = "all keys grouped anew"
_MOST_POINTS = 2000

Point = tuple[float, float, int]
"""First two principal components, and a cluster's number."""


@dataclass(frozen=True, slots=True)
class Grouping:
    """Under one update when so many tokens were decoded: clusters per head, variance, and what as many clusters of all
    keys grouped anew would have; means over all heads.
    """

    update: str
    decode_tokens: int
    clusters: float
    variance: float
    anew: float


@dataclass(frozen=True, slots=True)
class Shift:
    """`groupings` over all heads by length; `points` of one head at the end by update, GLOBAL among them."""

    text: str
    layer: int
    head: int
    groupings: tuple[Grouping, ...]
    points: Mapping[str, tuple[Point, ...]]

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> Self:
        """From what `facts` made of one."""
        groupings = tuple(Grouping(**part) for part in plain["groupings"])
        points = {
            name: tuple((x, y, int(number)) for x, y, number in own) for name, own in plain["points"].items()
        }
        return cls(**{**plain, "groupings": groupings, "points": points})


def measure_shift(
    adapter: Adapter, text: LongText, base: OffloadSettings, lengths: Sequence[int], kept: KeptResults
) -> Shift | None:
    """Decode a text under every update, unless that was done; None where every layer has a window of its own."""
    name = f"shift {text.name} {base.kv_budget:g}"
    found = kept.get(name)
    if found is None:
        try:
            found = facts(_measured(adapter, text, base, lengths))
        except _NothingRetrieved:
            return None
        kept.put(name, found)
    return Shift.of(found)


class _NothingRetrieved(InvalidRequest):
    """No layer retrieves."""


def _measured(adapter: Adapter, text: LongText, base: OffloadSettings, lengths: Sequence[int]) -> Shift:
    prefilled = Prefilled.of(adapter, text)
    retrieving = prefilled.retrieving
    if not retrieving:
        raise _NothingRetrieved("every layer has a window of its own")
    layer, head = retrieving[len(retrieving) // 2], 0
    groupings: list[Grouping] = []
    groups: dict[str, list[Tensor]] = {}
    for update in UPDATES:

        def note(length: int, held: OffloadedCache, update: str = update) -> None:
            grouped = variance(held)
            if grouped is not None:
                groupings.append(Grouping(update, length, grouped[1], grouped[0], _anew(held, grouped[1])))
            if length == lengths[-1]:
                groups[update] = members(held, layer, head)

        decode(adapter, prefilled, update, replace(base, strategy=update), lengths, note)
    return Shift(text.name, layer, head, tuple(groupings), _points(groups))


def _anew(held: OffloadedCache, clusters: float) -> float:
    found = []
    for layer in held.layers:
        kept = layer.retriever.kept.held() if isinstance(layer.retriever, WatchedRetriever) else None
        if kept is not None:
            found.append(global_variance(kept[0], round(clusters)))
    return sum(found) / len(found)


def _points(groups: Mapping[str, Sequence[Tensor]]) -> dict[str, tuple[Point, ...]]:
    """Keys of each update's clusters on the two axes along which the keys of all spread most."""
    largest = max(groups.values(), key=lambda own: sum(part.shape[0] for part in own))
    keys = torch.cat(list(largest))
    mean = keys.mean(0)
    axes = torch.linalg.svd(keys - mean, full_matrices=False).Vh[:2]  # (2, D)
    anew = k_means(keys[None], len(largest))[0]
    all_groups = dict(groups) | {GLOBAL: [keys[anew == number] for number in range(len(largest))]}
    return {
        name: _thinned(
            [
                (round(x, 2), round(y, 2), number)  # as fine as a picture shows
                for number, part in enumerate(own)
                for x, y in ((part - mean) @ axes.T).tolist()
            ]
        )
        for name, own in all_groups.items()
    }


def _thinned(points: Sequence[Point]) -> tuple[Point, ...]:
    step = -(-len(points) // _MOST_POINTS)
    return tuple(points[::step])
