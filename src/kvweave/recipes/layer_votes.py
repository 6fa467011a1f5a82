"""Which layers' attention counts in a score, where some layers see only a sliding window of the context.

A layer with a window pays all its attention to the last tokens before a row. If it counted as much as a layer that sees
everything, those tokens would win whatever the question is. So a layer counts only if it sees the whole context.
"""

from collections.abc import Collection
from dataclasses import dataclass

from kvweave.models.support import Geometry


@dataclass(frozen=True, slots=True)
class LayerVotes:
    """The layers that count, ascending.

    With a `lifted_window`, none of them sees the whole context: this is their window in tokens. Their weights then have to be
    computed as if they had none, so that near and far tokens compare.
    """

    layers: tuple[int, ...]
    lifted_window: int | None = None

    @property
    def lift_windows(self) -> bool:
        """Whether weights are computed as if the layers had no window."""
        return self.lifted_window is not None

    def every_layer(self, geometry: Geometry) -> bool:
        """Return whether all layers of the model count as they attend."""
        return len(self.layers) == geometry.layers and not self.lift_windows


def voting_layers(
    geometry: Geometry, first: int, last: int, chosen: Collection[int] | None = None
) -> LayerVotes:
    """Return the layers that count when rows up to position `last` attend to keys from position `first` on.

    Those that see all of these keys from all rows count. If there are none, those with the widest window count, and it is
    lifted: their queries are multiplied with all keys. `PrefillState.cache_within_window` moves far keys into the
    window for that, since the layer was never trained on larger distances.

    Args:
        geometry: of the model.
        first: the smallest position of a key, in the positions that windows count.
        last: the largest position of a row.
        chosen: the layers that a method looks at, negative ones from the last; None for all. Those of them that do not count
            by the rule are left out. If that leaves none, each is replaced by the nearest layer that counts, the earlier of
            two.
    """
    able, lifted = _able(geometry, last - first)
    if chosen is None:
        return LayerVotes(able, lifted)
    wanted = {range(geometry.layers)[layer] for layer in chosen}
    found = wanted.intersection(able) or {_nearest(layer, able) for layer in wanted}
    return LayerVotes(tuple(sorted(found)), lifted)


def last_layer(geometry: Geometry, tokens: int) -> LayerVotes:
    """Return the vote of the last layer whose last row sees all of `tokens` tokens, itself included."""
    return voting_layers(geometry, 0, max(0, tokens - 1), (-1,))


def _able(geometry: Geometry, distance: int) -> tuple[tuple[int, ...], int | None]:
    """Return the layers that may count at a distance, and their window if it is lifted."""
    windows = _windows(geometry)
    able = tuple(layer for layer, window in enumerate(windows) if _reaches(window, distance))
    if able:
        return able, None
    widest = max(window for window in windows if window is not None)
    return tuple(layer for layer, window in enumerate(windows) if window == widest), widest


def _windows(geometry: Geometry) -> tuple[int | None, ...]:
    return geometry.windows or (None,) * geometry.layers


def _reaches(window: int | None, distance: int) -> bool:
    """Return whether a row sees a key at this distance before it; `ops.attention.visible_keys` counts so too."""
    return window is None or distance < window


def _nearest(layer: int, able: Collection[int]) -> int:
    return min(able, key=lambda other: (abs(other - layer), other))
