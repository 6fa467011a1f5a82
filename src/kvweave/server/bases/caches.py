"""GET /v1/kb/{name}/caches: what is stored for a knowledge base, and what it was good for."""

from typing import Any

from fastapi import APIRouter, Request

from kvweave.engine.background.status import idle_status
from kvweave.engine.facts import facts
from kvweave.engine.knowledge_base import KnowledgeBase
from kvweave.server.services import in_thread, services, tenant

router = APIRouter(prefix="/v1/kb")

MOST_PREDICTED = 100


@router.get("/{name}/caches")
async def caches(request: Request, name: str) -> dict[str, Any]:
    """Return sizes by kind and tier, hit rates, and what background work has predicted."""
    of = tenant(request)

    def read() -> dict[str, Any]:
        with of.bases.using(name) as base:
            return _stored(base)

    recent = services(request).history.of(of.name, name)
    return {"name": name, **await in_thread(read), "recent": facts(recent)}


def _stored(base: KnowledgeBase) -> dict[str, Any]:
    stats = base.store.stats()
    looked_up = stats.hits + stats.misses
    predictions, status = base.predictions.predicted.totals(), idle_status(base)
    return {
        "kv": {**facts(stats), "hit_rate": stats.hits / looked_up if looked_up else None},
        "answers": facts(base.answers.totals()),
        "predictions": {**facts(predictions), "given_per_question": predictions.given_per_question},
        "predicted_questions": facts(base.predictions.predicted.latest(MOST_PREDICTED)),
        "background": facts(base.background_budget.totals()),
        "idle": {**facts(status), "reasons": list(status.reasons)},
    }
