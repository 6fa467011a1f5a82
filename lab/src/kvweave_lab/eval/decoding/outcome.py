"""What decoding one text under one variant gives, as it is kept on disk. Knows nothing of how it is found."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

AFTER_STEPS = (1, 2, 4, 8, 16)
"""Steps after which it is asked whether a cluster was retrieved again (DynaKV table 2)."""


@dataclass(frozen=True, slots=True)
class Watched:
    """Means over layers and looked-at steps, 0..1; see `watching` for what each is."""

    recall: float
    attended_mass: float
    output_error: float


@dataclass(frozen=True, slots=True)
class Stretch:
    """The steps from the last length to this one.

    Attributes:
        decode_tokens: tokens behind the prompt at its end.
        steps: how many tokens it has.
        judged: answers in it whose evidence is far enough.
        right: those of them that greedy decoding gets right.
        nll: mean negative log-likelihood of the text's next token, in nats; None where the model wrote by itself.
        watched: None if no step was looked at.
        counts: what was read and written, by the names of `DecodeCounts`.
        latency_s: the median step that nobody looked at.
        clusters: clusters of a head at its end, on the mean; None for strategies without.
        variance: mean squared distance of a key to its cluster's centroid, over all heads; None likewise.
    """

    decode_tokens: int
    steps: int
    judged: int
    right: int
    nll: float | None
    watched: Watched | None
    counts: Mapping[str, float]
    latency_s: float
    clusters: float | None
    variance: float | None


@dataclass(frozen=True, slots=True)
class Again:
    """How many clusters of a kind were seen, and how many of them were retrieved within each of AFTER_STEPS."""

    seen: int
    retrieved: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Run:
    """One text under one variant: `greedy` are the tokens that decoding would have chosen, one per step.

    `updated` are clusters that took an entry in or were split, `any` ones drawn at random beside them.
    """

    text: str
    task: str
    seed: int
    variant: str
    storage: str
    budget: float
    prompt_tokens: int
    forced: bool
    greedy: tuple[int, ...]
    stretches: tuple[Stretch, ...]
    updated: Again
    any: Again

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> Self:
        """From what `facts` made of one."""
        stretches = tuple(
            Stretch(**{**part, "watched": Watched(**part["watched"]) if part["watched"] else None})
            for part in plain["stretches"]
        )
        again = {
            name: Again(plain[name]["seen"], tuple(plain[name]["retrieved"])) for name in ("updated", "any")
        }
        return cls(**{**plain, "greedy": tuple(plain["greedy"]), "stretches": stretches, **again})
