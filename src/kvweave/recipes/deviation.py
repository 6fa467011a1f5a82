"""How far stale KV is off in the second layer, for the price of computing the first one in full."""

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvweave.errors import InvalidRequest
from kvweave.models.attention import RowWatch
from kvweave.models.updates import PassOver, Update

if TYPE_CHECKING:
    from kvweave.recipes.assembled import Assembled

CHECKED = 1  # the second layer: the first one's K,V depend on nothing but the tokens


@dataclass(frozen=True)
class SecondLayer:
    """What a layer was about to replace, and where the stale tokens' n rows stand in it.

    `keys` and `values` (G, n, D), float32 and on the CPU, are new minus stale, keys rotated; made when they are asked for.
    """

    update: Update
    places: Tensor

    @cached_property
    def keys(self) -> Tensor:
        """Distance of the keys."""
        return self._off(self.update.keys, self.update.stale_keys)

    @cached_property
    def values(self) -> Tensor:
        """Distance of the values."""
        return self._off(self.update.values, self.update.stale_values)

    def _off(self, new: Tensor, stale: Tensor) -> Tensor:
        return (new[:, self.places].float() - stale[:, self.places].float()).cpu()


class _Compare:
    """Watches updates until the checked layer, and ends the pass there."""

    def __init__(self) -> None:
        self.seen: Update | None = None

    def see(self, update: Update) -> None:
        if update.layer == CHECKED:
            self.seen = update
            raise PassOver


def second_layer(scene: "Assembled", *watches: RowWatch) -> SecondLayer:
    """Compute all stale and fresh rows through the first layer, in a pass that the watches see.

    The canvas keeps its stale KV from the second layer on. Raises InvalidRequest for a model of one layer.
    """
    adapter = scene.request.adapter
    if adapter.geometry.layers <= CHECKED:
        raise InvalidRequest(
            f"{adapter.fingerprint.name} has one layer; this recipe compares the second. Take another recipe"
        )
    rows, compare = first_layer_rows(scene), _Compare()
    adapter.look(scene.canvas, scene.request.prompt.token_ids, scene.plan(rows, *watches), compare)
    assert compare.seen is not None
    places = torch.searchsorted(rows, scene.stale).to(compare.seen.values.device)
    return SecondLayer(compare.seen, places)


def first_layer_rows(scene: "Assembled") -> Tensor:
    """The prompt positions that the first layer computes to compare the second: all that are stale or fresh."""
    return torch.cat([scene.stale, scene.fresh]).sort().values
