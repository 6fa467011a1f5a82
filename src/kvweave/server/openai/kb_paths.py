"""OpenAI's API of one knowledge base: /kb/NAME/v1/… is /v1/… with `kb` set to NAME where a request leaves it out.

For clients that take a URL and send no fields of ours.
"""

import re
from dataclasses import replace
from typing import Final

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from kvweave.server.errors import ApiError
from kvweave.server.serving.completions import CompletionRequest

_PATH: Final = re.compile(
    r"/kb/(?P<name>[^/]+)(?P<rest>/v1/(chat/completions|responses|completions|embeddings|models(/.*)?))"
)


class KnowledgeBasePaths:
    """ASGI middleware: rewrites such a path before anything else reads it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        if scope["type"] == "http" and (found := _PATH.fullmatch(scope["path"])):
            rest = found["rest"]
            scope = {**scope, "path": rest, "raw_path": rest.encode(), "kvweave.kb": found["name"]}
        await self._app(scope, receive, send)


def with_kb(request: Request, asked: CompletionRequest) -> CompletionRequest:
    """Return what is asked of the knowledge base in the URL, unless the request says what it is asked of."""
    name = request.scope.get("kvweave.kb")
    if name is None or asked.kb is not None or asked.documents or asked.text is not None:
        return asked
    return replace(asked, kb=name)


def check_tools(request: Request) -> None:
    """Refuse a request with tools, unless its URL names a knowledge base: there the answer comes from the documents.

    Programs such as Open WebUI offer their tools with every question. The model never sees them, so it calls none, which a client
    that leaves the choice to the model has to expect.

    Raises ApiError.
    """
    if request.scope.get("kvweave.kb") is None:
        raise ApiError(
            400, "tools: this server does not support it", code="unsupported_parameter", param="tools"
        )
