"""The outermost handling of a request: its id, its line in the log, and errors that nothing else has answered."""

import logging
import re
import secrets
import time
from typing import Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvweave.server.errors import api_error
from kvweave.server.process.json_logs import REQUEST_ID
from kvweave.server.services import Services

_LOG = logging.getLogger("kvweave.server.requests")
_USABLE: Final = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")
ID_HEADER: Final = "X-Request-Id"


class RequestLog:
    """ASGI middleware: gives a request its id, logs and counts it, and answers errors that nothing else has answered."""

    def __init__(self, app: ASGIApp, services: Services) -> None:
        self._app, self._services = app, services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(ID_HEADER, "")
        request_id = given if _USABLE.fullmatch(given) else f"req_{secrets.token_hex(12)}"
        REQUEST_ID.set(request_id)
        began_s, status = time.perf_counter(), 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[ID_HEADER] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except ClientDisconnect:
            status = status or 499
        except Exception as error:
            if status:
                raise
            await api_error(error).response()(scope, receive, send_with_id)
        finally:
            self._log(scope, status, time.perf_counter() - began_s)

    def _log(self, scope: Scope, status: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", "none")
        self._services.metrics.http.labels(route=route, status=status).inc()
        fields = {
            "method": scope["method"],
            "path": scope["path"],
            "status": status,
            "seconds": round(seconds, 4),
            "client": (scope.get("client") or ("",))[0],
        }
        _LOG.info("request", extra={"fields": fields})
