"""POST /v1/completions."""

from collections import Counter
from collections.abc import Sequence
from typing import Any, ClassVar

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field

from kvweave.config import GenerationConfig
from kvweave.results import AnswerCacheUse, Piece, TokenLogprob
from kvweave.server.openai import replies
from kvweave.server.openai.fields import ANY, ChoicesFields, Prompt
from kvweave.server.serving.completions import CompletionRequest, Finished
from kvweave.types import Message

router = APIRouter()

DEFAULT_TOKENS = 16
"""Length of an answer without `max_tokens`, as in OpenAI's API."""


class CompletionFields(ChoicesFields):
    """A request to continue a text."""

    neutral: ClassVar = {
        "best_of": (1,),
        "echo": (False,),
        "frequency_penalty": (0,),
        "logit_bias": ({},),
        "presence_penalty": (0,),
        "suffix": ("",),
        "user": (ANY,),
    }
    prompt: Prompt
    logprobs: int | None = Field(None, ge=0, le=5)

    def requests(self, defaults: GenerationConfig, cache: AnswerCacheUse) -> list[CompletionRequest]:
        """Return one request per answer. With documents or `kb`, a text is a question."""
        asks = bool(self.documents or self.kb)
        return [
            self.choice(
                index,
                defaults,
                cache,
                messages=(Message("user", prompt),) if asks else (),
                text=None if asks else prompt,
                max_new_tokens=self.max_tokens or DEFAULT_TOKENS,
                logprobs=self.logprobs,
            )
            for prompt in ([self.prompt] if isinstance(self.prompt, str) else self.prompt)
            for index in range(self.n or 1)
        ]


@router.post("/v1/completions", response_class=JSONResponse)
async def completions(request: Request, fields: CompletionFields) -> Response:
    """Continue a text, without a chat template."""
    head = {"id": replies.new_id("cmpl-"), "object": "text_completion"}
    return await replies.reply_with_choices(request, fields, TextStream, head, _choice)


def _choice(index: int, finished: Finished, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    return {
        "index": index,
        "text": finished.text,
        "logprobs": _logprobs(tokens, 0),
        "finish_reason": finished.answer.finish_reason,
    }


class TextStream(replies.ChunkStream):
    """Encodes a continued text as chunks."""

    def __init__(self, fields: ChoicesFields, head: dict[str, Any]) -> None:
        super().__init__(fields, head)
        self._characters: Counter[int] = Counter()

    def choice(self, index: int, piece: Piece | None = None) -> dict[str, Any]:
        piece = piece or Piece("")
        logprobs = _logprobs(piece.tokens, self._characters[index])
        self._characters[index] += sum(len(token.text) for token in piece.tokens)
        return {"index": index, "text": piece.text, "logprobs": logprobs, "finish_reason": None}


def _logprobs(tokens: Sequence[TokenLogprob], offset: int) -> dict[str, Any] | None:
    """Return log probabilities in this route's form, None without tokens; `offset` is the position of the first token's text."""
    if not tokens:
        return None
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token.text)
    return {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [
            {**{each.text: each.logprob for each in token.likeliest}, token.text: token.logprob}
            for token in tokens
        ],
        "text_offset": offsets,
    }
