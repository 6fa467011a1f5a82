"""The MCP server: its tools (list knowledge bases and documents, search passages, answer with sources) and its transports.

A result is structured content with the schema of a class here, and text for clients that read no structured content.
"""

import contextlib
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import asdict
from functools import wraps
from typing import Annotated, Any, Final, ParamSpec, TypeAlias, TypeVar

import anyio.to_thread
import uvicorn
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.server.mcpserver.tools import Tool
from mcp_types import ToolAnnotations
from pydantic import BaseModel, Field, create_model, field_validator
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from kvweave.cancellation import cancellable
from kvweave.errors import InvalidRequest, KvweaveError, Unauthorized
from kvweave.server.mcp.sources import HomeSource
from kvweave.server.process.lifecycle import bound, is_loopback, url_of
from kvweave.server.serving.tenants import Tenants
from kvweave.version import __version__

INSTRUCTIONS = (
    "Answers questions from the user's own documents. `answer` gives a whole answer with its sources; `search_passages` "
    "gives the passages alone, to answer from them yourself."
)

PATH: Final = "/mcp"
_LINE_ENDS: Final = dict.fromkeys((0x85, 0x2028, 0x2029), "\n")

_P = ParamSpec("_P")
_T = TypeVar("_T")
Lifespan: TypeAlias = Callable[[MCPServer[Any]], contextlib.AbstractAsyncContextManager[Any]]

Question = Annotated[str, Field(description="What to look for, as a question or in words.", min_length=1)]
TopK = Annotated[int | None, Field(description="How many passages. Default: the settings' top_k.", ge=1)]
KbName = Annotated[
    str | None, Field(description="Name of the knowledge base. Default: the one the server was started with.")
]


class _Facts(BaseModel):
    """A result whose texts have no line ends but the usual ones: many clients cut a transport's lines at Unicode's others too."""

    @field_validator("*", mode="before")
    @classmethod
    def _usual_line_ends(cls, value: Any) -> Any:
        return value.translate(_LINE_ENDS) if isinstance(value, str) else value


class KnowledgeBaseFacts(_Facts):
    """A knowledge base in a list."""

    name: str
    documents: int
    chunks: int


class DocumentFacts(_Facts):
    """A document of a knowledge base."""

    source: str = Field(description="Its path, which identifies it.")
    title: str
    chunks: int
    tokens: int


class Passage(_Facts):
    """A passage of a document."""

    document: str = Field(description="The document's path.")
    start: int = Field(description="Character offset into the document's text.")
    end: int = Field(description="Character offset into the document's text.")
    text: str
    score: float = Field(description="Higher is better; comparable within one search.")
    page: int | None = Field(None, description="Page or slide where it begins, from 1.")
    heading: str = Field("", description="The headings above it.")
    line: int | None = Field(None, description="Line of the file where it begins, from 1.")


class AnswerWithSources(_Facts):
    """An answer and the passages that it is based on."""

    answer: str
    sources: list[Passage]
    finish_reason: str = Field(description="stop, or length where the answer reached its greatest length.")


def mcp_server(
    source: HomeSource, default_kb: str, default_top_k: int | None = None, lifespan: Lifespan | None = None
) -> MCPServer[Any]:
    """Return the MCP server whose tools ask `source`. The defaults apply to calls without these arguments."""

    def list_knowledge_bases() -> list[KnowledgeBaseFacts]:
        """List the knowledge bases with the number of their documents and chunks."""
        return [KnowledgeBaseFacts.model_validate(each) for each in source.knowledge_bases()]

    def list_documents(knowledge_base: KbName = None) -> list[DocumentFacts]:
        """List the documents of a knowledge base."""
        return [DocumentFacts.model_validate(each) for each in source.documents(knowledge_base or default_kb)]

    def search_passages(
        question: Question, knowledge_base: KbName = None, top_k: TopK = None
    ) -> list[Passage]:
        """Find the passages of the documents that fit a question best, by words and by meaning, best first."""
        found = source.search(knowledge_base or default_kb, question, top_k or default_top_k)
        return [Passage.model_validate(each) for each in found]

    def answer(question: Question, knowledge_base: KbName = None, top_k: TopK = None) -> AnswerWithSources:
        """Answer a question from the documents, with the passages that the answer was made from."""
        given = source.answer(knowledge_base or default_kb, question, top_k or default_top_k)
        sources = [Passage.model_validate(asdict(each)) for each in given.sources]
        return AnswerWithSources(answer=given.text, sources=sources, finish_reason=given.finish_reason)

    tools = (list_knowledge_bases, list_documents, search_passages, answer)
    return MCPServer(
        "kvweave",
        instructions=INSTRUCTIONS,
        version=__version__,
        tools=[_strict_tool(_cancellable(each)) for each in tools],
        log_level="WARNING",
        lifespan=lifespan,
    )


def _strict_tool(function: Callable[..., Any]) -> Tool:
    """Return a read-only tool that refuses unknown arguments, so that no mistyped argument is ignored."""
    tool = Tool.from_function(
        function, annotations=ToolAnnotations(read_only_hint=True, open_world_hint=False)
    )
    found = tool.fn_metadata.arg_model
    strict = create_model(found.__name__, __base__=found, __cls_kwargs__={"extra": "forbid"})
    tool.fn_metadata.arg_model = strict
    tool.parameters = strict.model_json_schema(by_alias=True)
    return tool


def _cancellable(tool: Callable[_P, _T]) -> Callable[_P, Awaitable[_T]]:
    """Return the tool as a coroutine function that runs it in a thread, and gives it up when the client cancels the call.

    Expected errors are raised as ToolError, whose message the client sees.
    """

    @wraps(tool)
    async def wrapped(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        given_up = threading.Event()

        def work() -> _T:
            with cancellable(given_up.is_set):
                return tool(*args, **kwargs)

        try:
            return await anyio.to_thread.run_sync(work, abandon_on_cancel=True)
        except (KvweaveError, OSError) as error:
            raise ToolError(str(error)) from error
        finally:
            given_up.set()

    return wrapped


# Transports: standard input and output, or streamable HTTP with an API key


def serve_stdio(server: MCPServer[Any]) -> None:
    """Serve until standard input ends. Meanwhile the transport points descriptor 1 at standard error.

    With the lifespan `prints_to_stderr`, standard output carries the protocol and nothing else.
    """
    server.run("stdio")


@contextlib.asynccontextmanager
async def prints_to_stderr(_: object) -> AsyncIterator[None]:
    """Lifespan that sends Python's prints to standard error. Python's buffer would otherwise be written after the transport ends."""
    with contextlib.redirect_stdout(sys.stderr):
        yield


def serve_http(
    server: MCPServer[Any], host: str, port: int, keys: Sequence[str], listening: Callable[[str], None]
) -> None:
    """Serve streamable HTTP until SIGINT or SIGTERM; call `listening` with the address when the port is open.

    Raises InvalidRequest if other machines can reach the address and there is no key, if a key is too short, or if the port is
    taken.
    """
    if not keys and not is_loopback(host):
        raise InvalidRequest(
            f"{host} can be reached from other machines: set KVWEAVE_API_KEY, or listen on 127.0.0.1"
        )
    app = server.streamable_http_app(streamable_http_path=PATH, host=host)
    with bound(host, port) as listener:
        listening(url_of(listener) + PATH)
        config = uvicorn.Config(
            KeyRequired(app, keys) if keys else app,
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=10,
        )
        uvicorn.Server(config).run(sockets=[listener])


class KeyRequired:
    """ASGI middleware: answers 401 to HTTP requests without one of the keys in `Authorization: Bearer KEY`."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app, self._keys = app, Tenants(dict.fromkeys(keys))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._allowed(Headers(scope=scope).get("authorization", "")):
            refusal = JSONResponse(
                {"error": "no valid API key: send it as `Authorization: Bearer KEY`"},
                401,
                {"WWW-Authenticate": "Bearer"},
            )
            await refusal(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _allowed(self, header: str) -> bool:
        scheme, _, key = header.partition(" ")
        try:
            self._keys.name_of(key.strip())
        except Unauthorized:
            return False
        return scheme.lower() == "bearer"
