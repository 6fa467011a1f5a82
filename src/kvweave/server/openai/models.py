"""GET /v1/models."""

from typing import Any

from fastapi import APIRouter, Request

from kvweave.server.errors import ApiError
from kvweave.server.services import services

router = APIRouter()


@router.get("/v1/models")
async def list_models(request: Request) -> dict[str, Any]:
    """List the model that answers and the one that embeds."""
    return {"object": "list", "data": _models(request)}


@router.get("/v1/models/{name:path}")
async def one_model(request: Request, name: str) -> dict[str, Any]:
    """Return one of the models."""
    for model in _models(request):
        if model["id"] == name:
            return model
    raise ApiError(404, f"The model `{name}` does not exist", code="model_not_found", param="model")


def _models(request: Request) -> list[dict[str, Any]]:
    parts = services(request)
    names = dict.fromkeys((parts.model_name, parts.embedding_name))
    created = parts.started_s
    return [{"id": name, "object": "model", "created": created, "owned_by": "kvweave"} for name in names]
