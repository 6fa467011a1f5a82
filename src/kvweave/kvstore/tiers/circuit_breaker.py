"""A circuit breaker around a remote tier: its failures become misses, and a failing server is left alone for a while.

After a failure the circuit is open for a while, twice as long after each further failure, so that a dead server costs a request
next to nothing. Then the tier is tried again. Each outage logs one warning, and one line when it ends. Puts and deletions
have circuits of their own: a tier that refuses writes (a full server, a read-only copy, a user without permission) stays in
use for reading.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from kvweave.errors import TierUnavailable
from kvweave.kvstore.header import ByteRange
from kvweave.kvstore.tiers.tier import Blob, RemoteTier

_LOG = logging.getLogger(__name__)

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
WARN_AGAIN_AFTER_S = 3600.0
"""A tier that takes some entries and refuses others fails and recovers all the time: warn once an hour."""

Answer = TypeVar("Answer")


class CircuitBreaker:
    """A `RemoteTier` around another one that never raises TierUnavailable.

    `put` and `delete` return whether they worked. While the tier fails, and once it is closed, `sizes` returns None, and the
    other reads answer as if nothing were there.

    `putting` and `deleting` are the circuits of these calls, beside the one of the whole tier. `clock` returns seconds from
    any beginning.
    """

    def __init__(self, tier: RemoteTier, clock: Callable[[], float] = time.monotonic) -> None:
        self.tier = tier
        self._closed = False
        self._reading = Circuit(clock, "shared tier not used until it works again, computing instead", 0.0)
        refused = "shared tier refuses what is to be %s there until it works again; it is tried now and then"
        self.putting = Circuit(clock, refused % "put", WARN_AGAIN_AFTER_S)
        self.deleting = Circuit(clock, refused % "deleted", WARN_AGAIN_AFTER_S)

    @property
    def location(self) -> str:
        return self.tier.location

    @property
    def is_open(self) -> bool:
        """Whether the tier is left alone, after it did not answer or because it is closed."""
        return self._closed or self._reading.is_open

    @property
    def failing(self) -> bool:
        """Whether the tier did not answer the last request."""
        return self._reading.failing

    @property
    def refusing(self) -> bool:
        """Whether the tier refused the last put or deletion."""
        return self.putting.failing or self.deleting.failing

    def get_many(self, keys: Sequence[str]) -> Mapping[str, Blob]:
        return self._read(lambda: self.tier.get_many(keys), {}) if keys else {}

    def get_ranges(self, key: str, ranges: Sequence[ByteRange]) -> list[Blob] | None:
        return self._read(lambda: self.tier.get_ranges(key, ranges), None)

    def put(self, key: str, data: Blob) -> bool:
        return self._write(self.putting, lambda: self.tier.put(key, data))

    def delete(self, keys: Iterable[str]) -> bool:
        return self._write(self.deleting, lambda: self.tier.delete(keys))

    def has_many(self, keys: Sequence[str]) -> frozenset[str]:
        return self._read(lambda: self.tier.has_many(keys), frozenset()) if keys else frozenset()

    def sizes(self) -> Mapping[str, int] | None:
        return self._read(self.tier.sizes, None)

    def close(self) -> None:
        self._closed = True
        self.tier.close()

    def _read(self, call: Callable[[], Answer], otherwise: Answer) -> Answer:
        if self.is_open:
            return otherwise
        attempt = self._reading.begin_attempt()
        try:
            answer = call()
        except TierUnavailable as error:
            self._reading.record_failure(attempt, error)
            return otherwise
        except Exception:
            if self._closed:  # during the call
                return otherwise
            raise
        self._reading.record_success(attempt, self.location)
        return answer

    def _write(self, circuit: "Circuit", call: Callable[[], None]) -> bool:
        if self.is_open or circuit.is_open:
            return False
        attempt = circuit.begin_attempt()
        try:
            call()
        except TierUnavailable as error:
            circuit.record_failure(attempt, error)
            return False
        circuit.record_success(attempt, self.location)
        return True


class Circuit:
    """One kind of call: how often it failed in a row, and until when it is not tried. Safe to use from several threads.

    Calls that run at the same time count as one: a call that began before the last failure says nothing new.

    `warning` begins the message about an outage; two warnings are at least `warn_again_after_s` apart.
    """

    def __init__(self, clock: Callable[[], float], warning: str, warn_again_after_s: float) -> None:
        self._clock = clock
        self._warning = warning
        self._warn_again_after_s = warn_again_after_s
        self._guard = threading.Lock()
        self._failures_in_a_row = 0
        self._failures = 0
        self._open_until_s = 0.0
        self._silent_until_s = float("-inf")
        self._warned = False

    @property
    def is_open(self) -> bool:
        """Whether the last call failed so recently that no other is tried."""
        return self._failures_in_a_row > 0 and self._clock() < self._open_until_s

    @property
    def failing(self) -> bool:
        return self._failures_in_a_row > 0

    def begin_attempt(self) -> int:
        """Return a number to be passed back with the attempt's outcome."""
        return self._failures

    def record_failure(self, attempt: int, error: TierUnavailable) -> None:
        """Open the circuit for twice as long as the last time; warn, if this is the first failure in a row."""
        with self._guard:
            if attempt != self._failures:
                return
            self._failures += 1
            now = self._clock()
            self._open_until_s = now + min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0**self._failures_in_a_row)
            warn = self._failures_in_a_row == 0 and now >= self._silent_until_s
            self._failures_in_a_row = min(self._failures_in_a_row + 1, 30)
            if warn:
                self._warned, self._silent_until_s = True, now + self._warn_again_after_s
        if warn:
            _LOG.warning("%s: %s", self._warning, error)

    def record_success(self, attempt: int, location: str) -> None:
        """Close the circuit; log the recovery, if the failure was logged."""
        if not self._failures_in_a_row:
            return
        with self._guard:
            if attempt != self._failures:
                return
            recovered, self._warned, self._failures_in_a_row = self._warned, False, 0
        if recovered:
            _LOG.info("shared tier %s works again", location)
