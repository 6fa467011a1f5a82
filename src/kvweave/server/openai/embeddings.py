"""POST /v1/embeddings."""

import base64
from threading import Event
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from pydantic import Field, field_validator

from kvweave.server.errors import ApiError
from kvweave.server.events import collect
from kvweave.server.openai.fields import ANY, Fields, NonEmpty, Text, TextOr, refuse_token_ids
from kvweave.server.running import Emit
from kvweave.server.services import check_model, services

router = APIRouter()


class EmbeddingFields(Fields):
    """A request for the vectors of texts."""

    neutral: ClassVar = {"user": (ANY,)}
    model: Text | None = None
    input: TextOr[NonEmpty, Annotated[list[NonEmpty], Field(min_length=1, max_length=2048)]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(None, ge=1)

    @field_validator("input", mode="before")
    @classmethod
    def _are_texts(cls, given: Any) -> Any:
        hint = "; with LangChain's OpenAIEmbeddings, set check_embedding_ctx_length=False"
        return refuse_token_ids(given, hint)


@router.post("/v1/embeddings")
async def embeddings(request: Request, fields: EmbeddingFields) -> JSONResponse:
    """Return the vectors of texts, normalised to length 1."""
    parts = services(request)
    encoder = parts.serving.resident.encoder
    name = parts.embedding_name
    check_model(fields.model, name, "embeds with")
    texts = [fields.input] if isinstance(fields.input, str) else fields.input

    def work(emit: Emit, cancelled: Event) -> None:
        emit((encoder.encode(texts), encoder.count_tokens(texts)))

    ((vectors, tokens),) = await collect(request, parts.questions.start(work))
    if fields.dimensions not in (None, vectors.shape[1]):
        raise ApiError(
            400,
            f"dimensions is {fields.dimensions}; `{name}` gives {vectors.shape[1]}",
            code="invalid_value",
            param="dimensions",
        )
    data = [
        {"object": "embedding", "index": index, "embedding": _encoded(vector, fields.encoding_format)}
        for index, vector in enumerate(vectors)
    ]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return JSONResponse({"object": "list", "model": name, "data": data, "usage": usage})


def _encoded(vector: Any, form: str | None) -> Any:
    plain = np.asarray(vector, dtype="<f4")
    return base64.b64encode(plain.tobytes()).decode() if form == "base64" else plain.tolist()
