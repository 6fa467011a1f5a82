"""The application: its routes, and what every request passes through before it reaches one."""

from typing import Final

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware

from kvweave import __version__
from kvweave.server import (
    caches,
    chat,
    completions,
    conversations,
    document_route,
    embeddings,
    errors,
    knowledge_bases,
    models,
    operations,
    responses,
    upload_route,
)
from kvweave.server.binding import split
from kvweave.server.kb_paths import KnowledgeBasePaths
from kvweave.server.limits import BodyLimits
from kvweave.server.page_route import mount_page
from kvweave.server.readiness import Readiness
from kvweave.server.replies import CACHE_HEADER
from kvweave.server.request_log import ID_HEADER, RequestLog
from kvweave.server.security import Access
from kvweave.server.services import Services

ROUTERS: Final = tuple(
    part.router
    for part in (
        chat,
        completions,
        responses,
        embeddings,
        models,
        knowledge_bases,
        conversations,
        upload_route,
        document_route,
        caches,
        operations,
    )
)


def create_app(services: Services) -> FastAPI:
    """Return the application over the parts of a server."""
    app = FastAPI(title="kvweave", version=__version__, docs_url=None, redoc_url=None)
    app.state.services = services
    for router in ROUTERS:
        app.include_router(router)
    mount_page(app)
    errors.install(app)
    # The last one added is the first that a request passes through.
    app.add_middleware(BodyLimits, server=services.config.server, is_upload=_is_upload)
    app.add_middleware(Readiness, services=services)
    app.add_middleware(Access, services=services)
    if origins := split(services.config.server.cors_origins):
        app.add_middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=[ID_HEADER, CACHE_HEADER, "Retry-After"],
        )
    app.add_middleware(RequestLog, services=services)
    app.add_middleware(KnowledgeBasePaths)
    return app


def _is_upload(method: str, path: str) -> bool:
    return method == "POST" and path.startswith("/v1/kb/") and path.endswith("/documents")
