"""How one request's answer is decoded, in place of the settings' way."""

from dataclasses import dataclass
from itertools import chain

from kvweave.config import GenerationConfig, generation_bounds
from kvweave.errors import InvalidRequest

MAX_LOGPROBS = 20
MAX_STOPS = 16


@dataclass(frozen=True, slots=True)
class Sampling(GenerationConfig):
    """How one request's answer is decoded; `stop` and `logprobs` are no settings.

    Attributes:
        stop: the answer ends before the first of these texts.
        logprobs: how many alternatives to each token to return with their log probabilities, 0 for the token's own; None for
            none at all.
    """

    stop: tuple[str, ...] = ()
    logprobs: int | None = None

    @property
    def plain(self) -> bool:
        """Whether the answer is the answer: greedy, not stopped, and without log probabilities."""
        return self.temperature == 0 and not self.stop and self.logprobs is None


def check_sampling(sampling: Sampling) -> None:
    """Raise InvalidRequest, naming the value, if a request cannot be decoded so."""
    count, stops = sampling.logprobs, sampling.stop
    bounds = (
        (
            count is None or 0 <= count <= MAX_LOGPROBS,
            f"logprobs is {count}; it must be between 0 and {MAX_LOGPROBS}",
        ),
        (len(stops) <= MAX_STOPS, f"{len(stops)} stop texts are given; at most {MAX_STOPS} are possible"),
        (all(stops), "a stop text is empty; leave it out"),
    )
    for holds, message in chain(generation_bounds(sampling), bounds):
        if not holds:
            raise InvalidRequest(message)
