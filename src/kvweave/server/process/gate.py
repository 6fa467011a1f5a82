"""What answers before the application is there: its imports and its model take seconds, and the port is open at once."""

import json
from typing import Any, Final

from uvicorn._types import ASGI3Application, ASGIReceiveCallable, ASGISendCallable, Scope

RETRY_AFTER_S: Final = 5


class Gate:
    """ASGI application: passes requests to another one as soon as there is one, and answers 503 until then."""

    def __init__(self) -> None:
        self.app: ASGI3Application | None = None

    async def __call__(self, scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        """Handle a request."""
        if self.app is not None:
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            await _answer_loading(scope["path"], send)


async def _answer_loading(path: str, send: ASGISendCallable) -> None:
    error = {
        "message": "the model is being loaded",
        "type": "server_error",
        "param": None,
        "code": "not_ready",
    }
    body: dict[str, Any] = {"status": "loading"} if path == "/health" else {"error": error}
    data = json.dumps(body).encode()
    headers = {
        "content-type": "application/json",
        "content-length": str(len(data)),
        "retry-after": str(RETRY_AFTER_S),
        "connection": "close",
    }
    encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": 503, "headers": encoded, "trailers": False})
    await send({"type": "http.response.body", "body": data, "more_body": False})
