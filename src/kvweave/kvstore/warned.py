"""Warnings that are logged once, such as once for each reason since a store was opened."""

import logging
from collections.abc import Callable


class WarnedTopics:
    """Logs one warning for each topic; `form` is the logged text, with %s for the message."""

    def __init__(self, log: logging.Logger, form: str = "%s") -> None:
        self._log, self._form = log, form
        self._topics: set[str] = set()

    def warn(self, topic: str, message: Callable[[], str]) -> None:
        """Log what `message` returns, unless the topic was warned of before; an empty message is no warning."""
        if topic in self._topics:
            return
        if text := message():
            self._topics.add(topic)
            self._log.warning(self._form, text)
