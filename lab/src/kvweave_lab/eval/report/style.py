"""How figures look: themes, and one colour, marker and dash per recipe. Knows nothing of axes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

DPI: Final = 160


@dataclass(frozen=True, slots=True)
class Theme:
    """Colours on light or on dark ground.

    `ramp` shades the baselines from the one that repairs least to full attention: a rising contrast, readable
    without colour. The first six of `palette` (after Okabe and Ito) stay apart under the common colour blindnesses;
    of what follows and of its later rounds, markers and dashes tell what colour may not.
    """

    ground: str
    ink: str
    soft: str
    grid: str
    ramp: tuple[str, str, str, str]
    palette: tuple[str, ...]


LIGHT: Final = Theme(
    ground="#ffffff",
    ink="#1d2430",
    soft="#667085",
    grid="#e4e8ee",
    ramp=("#a9b5c7", "#7e8ca4", "#546279", "#1f2733"),
    palette=(
        *("#0072b2", "#d55e00", "#009e73", "#aa3377", "#d99a00", "#56b4e9"),
        *("#6a4fc2", "#7a4a1e", "#7c9a12", "#e0679f"),
    ),
)
DARK: Final = Theme(
    ground="#171b22",
    ink="#e8ebf0",
    soft="#98a2b3",
    grid="#2a313c",
    ramp=("#5f6d86", "#8492ab", "#adb8ca", "#eef1f6"),
    palette=(
        *("#4a9fe0", "#f07a3a", "#2fbf93", "#d668a6", "#f0c24b", "#a3dcf7"),
        *("#a692f0", "#c08a58", "#b5d24a", "#f5a3c7"),
    ),
)

BASELINES: Final = ("naive", "direct", "reuse", "full")
_MARKERS: Final = ("o", "s", "^", "D", "v", "P", "X", "p", "<", ">", "h")


Dashes = Literal["-", "--", ":"]
_TURNS: Final[tuple[Dashes, ...]] = ("-", "--", ":")


@dataclass(frozen=True, slots=True)
class Look:
    """One recipe in every figure and table.

    Attributes:
        color: on the theme's ground.
        marker: matplotlib's name of a shape.
        dashes: matplotlib's name of a line style; the palette's second round is dashed.
        filled: whether markers are; the palette's second round is hollow.
    """

    color: str
    marker: str
    dashes: Dashes
    filled: bool


def looks(recipes: Sequence[str], theme: Theme) -> Mapping[str, Look]:
    """A look for every recipe and every baseline; the same recipes in the same order always look the same."""
    shades = dict(zip(BASELINES, theme.ramp, strict=True))
    chosen = {
        name: Look(shades[name], marker, "-", filled=True)
        for name, marker in zip(BASELINES, "v^oD", strict=True)
    }
    for number, name in enumerate(name for name in recipes if name not in shades):
        turn, place = divmod(number, len(theme.palette))
        marker = _MARKERS[number % len(_MARKERS)]
        chosen[name] = Look(theme.palette[place], marker, _TURNS[turn % len(_TURNS)], filled=turn % 2 == 0)
    return chosen


def settings(theme: Theme) -> dict[Any, Any]:
    """matplotlib's settings, for `rc_context`."""
    return {
        "figure.facecolor": theme.ground,
        "savefig.facecolor": theme.ground,
        "axes.facecolor": theme.ground,
        "axes.edgecolor": theme.soft,
        "axes.labelcolor": theme.soft,
        "axes.linewidth": 0.7,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.titlecolor": theme.ink,
        "axes.titlelocation": "left",
        "axes.titlesize": 9.5,
        "axes.titleweight": "bold",
        "axes.labelsize": 9,
        "grid.color": theme.grid,
        "grid.linewidth": 0.7,
        "text.color": theme.ink,
        "text.parse_math": False,
        "font.family": "DejaVu Sans",
        "font.size": 9,
        "legend.frameon": False,
        "legend.fontsize": 9,
        "lines.linewidth": 1.6,
        "lines.markersize": 4.5,
        "xtick.color": theme.soft,
        "ytick.color": theme.soft,
        "xtick.labelsize": 8.5,
        "ytick.labelsize": 8.5,
        "xtick.major.size": 0,
        "ytick.major.size": 0,
    }
