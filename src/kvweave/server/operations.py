"""GET /health, /metrics, /v1/models and /v1/settings."""

from typing import Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel
from starlette.concurrency import run_in_threadpool

from kvweave.config import Config, all_settings
from kvweave.results import facts
from kvweave.server.errors import RETRY_S, ApiError
from kvweave.server.services import services

router, models = APIRouter(), APIRouter()

_SECRET = ("api_key", "tenants", "engine_key")


class Health(BaseModel):
    """Whether the server answers questions."""

    status: Literal["ok", "loading", "draining"]


@router.get(
    "/health",
    responses={
        200: {"model": Health, "description": "The server answers questions."},
        503: {"model": Health, "description": "The server is loading the model or shutting down."},
    },
)
async def health(request: Request) -> Response:
    """Report whether the server answers questions. Status 503 while it loads the model or shuts down. Needs no key."""
    parts = services(request)
    status = "draining" if parts.draining else "ok" if parts.serving.ready else "loading"
    if status == "ok":
        return JSONResponse({"status": status})
    return JSONResponse({"status": status}, 503, {"Retry-After": str(RETRY_S)})


@router.get("/metrics", response_class=Response)
async def metrics(request: Request) -> Response:
    """Return the metrics in Prometheus' format."""
    parts = services(request)
    aliases = parts.config.server.vllm_metrics and parts.serving.ready
    await run_in_threadpool(lambda: parts.metrics.count_stores(parts.serving.stores()))
    text = parts.metrics.text(parts.model_name if aliases else None)
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


@models.get("/v1/models")
async def list_models(request: Request) -> dict[str, Any]:
    """List the model that answers and the one that embeds."""
    return {"object": "list", "data": _models(request)}


@models.get("/v1/models/{name:path}")
async def one_model(request: Request, name: str) -> dict[str, Any]:
    """Return the model of this name."""
    for model in _models(request):
        if model["id"] == name:
            return model
    raise ApiError(404, f"The model `{name}` does not exist", code="model_not_found", param="model")


def _models(request: Request) -> list[dict[str, Any]]:
    parts = services(request)
    names = dict.fromkeys((parts.model_name, parts.embedding_name))
    created = parts.started_s
    return [{"id": name, "object": "model", "created": created, "owned_by": "kvweave"} for name in names]


@router.get("/v1/settings")
async def settings(request: Request) -> dict[str, Any]:
    """List the settings with their defaults; keys are not shown."""
    return {"data": list_settings(services(request).config)}


def list_settings(config: Config) -> list[dict[str, Any]]:
    """Return each setting's name, default, value and meaning."""
    return [
        {
            "name": name,
            "default": facts(setting.default),
            "value": "(set)" if name in _SECRET and setting.value(config) else facts(setting.value(config)),
            "help": setting.help,
        }
        for name, setting in all_settings().items()
    ]
