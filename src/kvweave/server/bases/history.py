"""What the last questions of each knowledge base found in the caches, for its page; kept while the server runs."""

import threading
from collections import OrderedDict, deque
from dataclasses import dataclass
from time import time
from typing import Final

from kvweave.engine.answering.completions import Finished
from kvweave.server.openai.replies import CacheUsed, cache_used

_KEPT: Final = 500
_KNOWLEDGE_BASES: Final = 1000


@dataclass(frozen=True, slots=True)
class Past:
    """One question: when it was answered (seconds since 1970), and how much of its prompt was not computed."""

    at_s: float
    cache: CacheUsed | None
    prompt_tokens: int
    cached_tokens: int
    ttft_s: float


class History:
    """The last questions, by tenant and knowledge base."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._past: OrderedDict[tuple[str | None, str], deque[Past]] = OrderedDict()

    def add(self, tenant: str | None, kb: str, finished: Finished) -> None:
        """Remember an answer."""
        timing = finished.answer.timing
        past = Past(
            time(),
            cache_used(finished),
            finished.prompt_tokens,
            finished.cached_tokens,
            timing.ttft_s or timing.total_s,
        )
        with self._guard:
            self._past.setdefault((tenant, kb), deque(maxlen=_KEPT)).append(past)
            self._past.move_to_end((tenant, kb))
            while len(self._past) > _KNOWLEDGE_BASES:
                self._past.popitem(last=False)

    def of(self, tenant: str | None, kb: str) -> list[Past]:
        """Return the last questions of a knowledge base, the oldest first."""
        with self._guard:
            return list(self._past.get((tenant, kb), ()))
