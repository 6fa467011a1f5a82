"""A tier that may fail without anybody noticing but the log: what it cannot give is absent, what it cannot take is not kept.

After a failure it is left alone for a while, the longer the more often it fails, so that a dead server costs a request
next to nothing; then it is tried again. One warning for each outage, one line when it is over. A tier that gives and does
not take (a server that is full, a copy that is only read, a user without permission) is read on: putting and deleting are
left alone each by itself.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from kvweave.errors import TierUnavailable
from kvweave.kvstore.tiers.tier import Blob, Range, RemoteTier

_LOG = logging.getLogger(__name__)

FIRST_REST_S = 1.0
LONGEST_REST_S = 60.0
SAY_AGAIN_AFTER_S = 3600.0
"""A tier that takes some entries and refuses others fails and recovers all the time: that is said once in an hour."""

Answer = TypeVar("Answer")


class FailureCount:
    """How one kind of call fares: how often it failed in a row, and until when it is left alone.

    Calls that run at the same time tell as much as one: whatever began before the last failure ended says nothing new.

    `clock` gives seconds from any beginning; `say_again_after_s` lie between two warnings. Safe to use from several threads.
    """

    def __init__(self, clock: Callable[[], float], warning: str, say_again_after_s: float) -> None:
        self._clock = clock
        self._warning = warning
        self._say_again_after_s = say_again_after_s
        self._guard = threading.Lock()
        self._failures = 0
        self._failures_ever = 0
        self._again_s = 0.0
        self._silent_until_s = float("-inf")
        self._said = False

    @property
    def resting(self) -> bool:
        """Whether it failed so lately that it is left alone."""
        return self._failures > 0 and self._clock() < self._again_s

    @property
    def failing(self) -> bool:
        """Whether the last attempt failed."""
        return self._failures > 0

    def begun(self) -> int:
        """To be given back with how the attempt that begins now ended."""
        return self._failures_ever

    def failed(self, attempt: int, error: TierUnavailable) -> None:
        """Leave it alone for twice as long as the last time; say so, if this is the first failure in a row."""
        with self._guard:
            if attempt != self._failures_ever:
                return
            self._failures_ever += 1
            now = self._clock()
            self._again_s = now + min(LONGEST_REST_S, FIRST_REST_S * 2.0**self._failures)
            first, self._failures = self._failures == 0, min(self._failures + 1, 30)
            say = first and now >= self._silent_until_s
            if say:
                self._said, self._silent_until_s = True, now + self._say_again_after_s
        if say:
            _LOG.warning("%s: %s", self._warning, error)

    def worked(self, attempt: int, place: str) -> None:
        """It need not be left alone; say so, if its failure was told."""
        if not self._failures:
            return
        with self._guard:
            if attempt != self._failures_ever:
                return
            say, self._said, self._failures = self._said, False, 0
        if say:
            _LOG.info("shared tier %s works again", place)


class CircuitBreaker:
    """A `RemoteTier` around another one that never raises TierUnavailable; `put` and `delete` say whether they were done.

    `putting` and `deleting` tell how these fare where the tier answers. `clock` gives seconds from any beginning.
    """

    def __init__(self, tier: RemoteTier, clock: Callable[[], float] = time.monotonic) -> None:
        self._tier = tier
        self._closed = False
        self._reading = FailureCount(
            clock, "shared tier not used until it works again, computing instead", 0.0
        )
        refused = "shared tier refuses what is to be %s there until it works again; it is tried now and then"
        self.putting = FailureCount(clock, refused % "put", SAY_AGAIN_AFTER_S)
        self.deleting = FailureCount(clock, refused % "deleted", SAY_AGAIN_AFTER_S)

    @property
    def place(self) -> str:
        """That of the tier."""
        return self._tier.place

    @property
    def resting(self) -> bool:
        """Whether it has failed to answer so lately that it is left alone altogether, or is closed."""
        return self._closed or self._reading.resting

    @property
    def failing(self) -> bool:
        """Whether it did not answer when it was last asked."""
        return self._reading.failing

    @property
    def refusing(self) -> bool:
        """Whether it did not do what it was last told to."""
        return self.putting.failing or self.deleting.failing

    def get_many(self, keys: Sequence[str]) -> Mapping[str, Blob]:
        """What can be had; nothing while the tier fails."""
        return self._read(lambda: self._tier.get_many(keys), {}) if keys else {}

    def get_ranges(self, key: str, ranges: Sequence[Range]) -> list[Blob] | None:
        """Parts of an entry; None where there is none, and while the tier fails."""
        return self._read(lambda: self._tier.get_ranges(key, ranges), None)

    def put(self, key: str, data: Blob) -> bool:
        """Whether the tier keeps it now."""
        return self._written(self.putting, lambda: self._tier.put(key, data))

    def delete(self, keys: Iterable[str]) -> bool:
        """Whether they are gone."""
        return self._written(self.deleting, lambda: self._tier.delete(keys))

    def has_many(self, keys: Sequence[str]) -> frozenset[str]:
        """Which are there; none while the tier fails."""
        return self._read(lambda: self._tier.has_many(keys), frozenset()) if keys else frozenset()

    def sizes(self) -> Mapping[str, int] | None:
        """All that is there; None while the tier fails."""
        return self._read(self._tier.sizes, None)

    def close(self) -> None:
        """Close the tier; from then on it gives and takes nothing."""
        self._closed = True
        self._tier.close()

    def _read(self, step: Callable[[], Answer], otherwise: Answer) -> Answer:
        if self.resting:
            return otherwise
        attempt = self._reading.begun()
        try:
            answer = step()
        except TierUnavailable as error:
            self._reading.failed(attempt, error)
            return otherwise
        except Exception:
            if self._closed:  # in the middle of this
                return otherwise
            raise
        self._reading.worked(attempt, self.place)
        return answer

    def _written(self, attempts: FailureCount, step: Callable[[], None]) -> bool:
        if self.resting or attempts.resting:
            return False
        attempt = attempts.begun()
        try:
            step()
        except TierUnavailable as error:
            attempts.failed(attempt, error)
            return False
        attempts.worked(attempt, self.place)
        return True
