"""The application: its routes, its page, and the order of its middleware."""

from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import FileResponse, Response
from fastapi.staticfiles import StaticFiles

from kvweave.config import split
from kvweave.server import chunks, errors, knowledge_bases, operations, uploads
from kvweave.server.middleware import (
    ID_HEADER,
    Admission,
    BodyLimits,
    RequestLog,
)
from kvweave.server.openai import chat, completions, embeddings, responses
from kvweave.server.openai.replies import CACHE_HEADER
from kvweave.server.services import Services
from kvweave.version import __version__

OPENAI: Final = (
    chat.router,
    completions.router,
    responses.router,
    embeddings.router,
    operations.models,
)
ROUTERS: Final = (*OPENAI, chunks.router, knowledge_bases.router, uploads.router, operations.router)


def create_app(services: Services) -> FastAPI:
    """Return the application that serves with these parts."""
    app = FastAPI(
        title="kvweave", version=__version__, docs_url=None, redoc_url=None, responses=errors.ERRORS
    )
    app.state.services = services
    for router in ROUTERS:
        app.include_router(router)
    for router in OPENAI:
        # The API of one knowledge base, for clients that take a URL but cannot send the field `kb`.
        app.include_router(router, prefix="/kb/{kb}", include_in_schema=False)
    _mount_page(app)
    errors.install(app)
    # A request passes through the middleware from the last one added to the first.
    app.add_middleware(BodyLimits, server=services.config.server)
    app.add_middleware(Admission, services=services)
    if origins := split(services.config.server.cors_origins):
        app.add_middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=[ID_HEADER, CACHE_HEADER, "Retry-After"],
        )
    app.add_middleware(RequestLog, services=services)
    return app


_PAGE: Final = Path(str(files("kvweave.server"))) / "page"
_PAGE_HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # a browser asks whether a file has changed: an update of kvweave shows at once
}
"""With these headers a browser runs the page's own scripts and no others."""


class _PageFiles(StaticFiles):
    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        response = super().file_response(*args, **kwargs)
        response.headers.update(_PAGE_HEADERS)
        return response


def _mount_page(app: FastAPI) -> None:
    app.mount("/static", _PageFiles(directory=_PAGE), name="static")

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return FileResponse(_PAGE / "index.html", headers=_PAGE_HEADERS)
