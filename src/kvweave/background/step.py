"""One thing that calibration does between two looks at what else there is to do."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Step:
    """One thing to do: `stage` names its kind, of which `done` of `total` are done; `about` describes it."""

    stage: str
    about: str
    done: int
    total: int
    do: Callable[[], None]
