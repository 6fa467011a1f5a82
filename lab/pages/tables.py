"""What the generated pages are written with: Markdown tables, and the commands behind them folded away."""

from collections.abc import Mapping, Sequence

NOT_MEASURED = "Not measured yet."


def header(*names: str) -> list[str]:
    return [row(*names), "|" + "---|" * len(names)]


def row(*values: str) -> str:
    return f"| {' | '.join(values)} |"


def spread(values: Mapping[str, float]) -> str:
    """A median, the smallest and the largest."""
    return f"{values['median']:.2f} ({values['low']:.2f} – {values['high']:.2f})"


def between(value: float, low: float, high: float, digits: int = 3) -> str:
    """A value and its interval."""
    return f"{value:.{digits}f} ({low:.{digits}f}–{high:.{digits}f})"


def folded(commands: Sequence[str], said: str) -> list[str]:
    """Many commands, of which a reader sees at first how many there are and what else is `said` of them."""
    return [
        f"<details><summary>{len(commands)} commands, {said}</summary>",
        "",
        "```",
        *commands,
        "```",
        "",
        "</details>",
    ]
