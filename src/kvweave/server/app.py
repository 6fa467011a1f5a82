"""The application: its routes, and what every request passes through before it reaches one."""

from typing import Final

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware

from kvweave import __version__
from kvweave.server import errors, operations
from kvweave.server.bases import caches, conversations, document_route, upload_route
from kvweave.server.bases import routes as knowledge_bases
from kvweave.server.openai import chat, completions, embeddings, models, responses
from kvweave.server.openai.kb_paths import KnowledgeBasePaths
from kvweave.server.openai.replies import CACHE_HEADER
from kvweave.server.page_route import mount_page
from kvweave.server.process.binding import split
from kvweave.server.process.limits import BodyLimits
from kvweave.server.process.readiness import Readiness
from kvweave.server.process.request_log import ID_HEADER, RequestLog
from kvweave.server.process.security import Access
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
