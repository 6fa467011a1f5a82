"""How fast a model computes its layers, by its last pass: what loading stored layers is measured against."""


class LayerPace:
    """How long one layer takes to compute; nothing, as long as no pass has run."""

    def __init__(self) -> None:
        self._last = (1, 0.0)  # rows, seconds

    def ran(self, rows: int, layer_s: float) -> None:
        """A pass over so many rows took so long for each layer, waiting for stored KV left out."""
        self._last = max(1, rows), max(0.0, layer_s)

    def least_s(self, rows: int) -> float:
        """What a layer of a pass over `rows` takes at least: fewer rows may take less in proportion, more take no less."""
        last, layer_s = self._last
        return layer_s * min(1.0, rows / last)
