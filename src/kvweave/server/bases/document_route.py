"""GET /v1/kb/{name}/documents: the text of a document, in which the page marks a source's passage."""

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request

from kvweave.engine.documents.document_text import document_text
from kvweave.errors import PathNotFound
from kvweave.server.bases.uploads import shown
from kvweave.server.services import in_thread, tenant

router = APIRouter(prefix="/v1/kb")


@router.get("/{name}/documents")
async def document(
    request: Request, name: str, source: Annotated[str, Query(min_length=1)]
) -> dict[str, Any]:
    """Return a document's text; the offsets of an answer's sources count its characters."""

    def read() -> dict[str, Any]:
        with tenant(request).bases.using(name) as base:
            for each in base.documents():
                if source in (each.source, shown(each.source)):
                    text = document_text(base, each.source)
                    return {"source": shown(each.source), "title": each.title, "text": text}
        raise PathNotFound(f"no document of knowledge base {name!r} is called {source!r}")

    return await in_thread(read)
