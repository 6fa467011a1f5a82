"""How far stale KV is off in the second layer, for the price of computing the first one in full."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvweave.errors import InvalidRequest
from kvweave.models.attention_probe import AttentionProbe
from kvweave.models.updates import PassOver, Update

if TYPE_CHECKING:
    from kvweave.recipes.assembled import Assembled

CHECKED = 1  # the second layer: the first one's K,V depend on nothing but the tokens


@dataclass(frozen=True, slots=True)
class SecondLayer:
    """The stale tokens' n rows, on the CPU.

    `keys`, `values` (G, n, D) float32 are new minus stale, keys rotated; `inflow` (n,) is the attention that each
    gets in the first layer, summed over all rows that were computed and averaged over heads.
    """

    keys: Tensor
    values: Tensor
    inflow: Tensor


class _Compare:
    """Watches updates until the checked layer, and ends the pass there."""

    def __init__(self) -> None:
        self.seen: Update | None = None

    def see(self, update: Update) -> None:
        if update.layer == CHECKED:
            self.seen = update
            raise PassOver


def second_layer(scene: "Assembled") -> SecondLayer:
    """Compute every stale and fresh row through the first layer; the canvas keeps its stale KV from the second one on.

    Raises InvalidRequest for a model of one layer.
    """
    adapter = scene.request.adapter
    if adapter.geometry.layers <= CHECKED:
        raise InvalidRequest(
            f"{adapter.fingerprint.name} has one layer; this recipe compares the second. Take another recipe"
        )
    rows = torch.cat([scene.stale, scene.fresh]).sort().values
    inflow = AttentionProbe(rows, layers={0})
    watch = _Compare()
    adapter.look(scene.canvas, scene.request.prompt.token_ids, scene.plan(rows, inflow), watch)
    assert watch.seen is not None
    places = torch.searchsorted(rows, scene.stale).to(watch.seen.values.device)
    keys = watch.seen.keys.float() - watch.seen.stale_keys.float()
    values = watch.seen.values.float() - watch.seen.stale_values.float()
    gets = inflow.weights[0].cpu() * rows.numel()
    return SecondLayer(keys[:, places].cpu(), values[:, places].cpu(), gets[scene.stale])
