"""Logs with one JSON object per line and the id of the request at work."""

import contextvars
import json
import logging
import sys
import time
from typing import Any, Final

REQUEST_ID: Final[contextvars.ContextVar[str | None]] = contextvars.ContextVar("request_id", default=None)


class JsonLines(logging.Formatter):
    """Formats each record as one JSON object."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if request := REQUEST_ID.get():
            line["request_id"] = request
        line.update(getattr(record, "fields", {}))
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=True, default=str)


def log_json() -> None:
    """Write all logs of this process to its standard error, as JSON."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    logging.getLogger("kvweave").setLevel(logging.INFO)
