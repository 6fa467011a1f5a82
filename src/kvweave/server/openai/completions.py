"""POST /v1/completions."""

import time
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field

from kvweave.results import AnswerCacheUse, Piece, Prefill, TokenLogprob
from kvweave.server.events import DONE, error_event, sse
from kvweave.server.openai import replies
from kvweave.server.openai.fields import ANY, ChoicesFields, Prompt, sampling, stop_texts
from kvweave.server.services import ChoiceEvent, cache_use, check_model, services, start
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

    @property
    def prompts(self) -> list[str]:
        """The texts to continue."""
        return [self.prompt] if isinstance(self.prompt, str) else self.prompt

    def _asked(self, prompt: str) -> dict[str, Any]:
        """Return the text to continue; with documents or `kb`, the text as a question."""
        return {"messages": (Message("user", prompt),)} if self.documents or self.kb else {"text": prompt}

    def requests(self, defaults: Any, cache: AnswerCacheUse) -> list[CompletionRequest]:
        """Return one request per answer, those of the first prompt first."""
        return [
            CompletionRequest(
                **self._asked(prompt),
                documents=self.caller_documents(),
                kb=self.kb,
                options=self.options(
                    cache,
                    sampling(
                        defaults,
                        most=self.max_tokens or DEFAULT_TOKENS,
                        temperature=self.temperature,
                        top_p=self.top_p,
                        seed=None if self.seed is None else self.seed + index,
                        stop=stop_texts(self.stop),
                        logprobs=self.logprobs,
                    ),
                ),
            )
            for prompt in self.prompts
            for index in range(self.n or 1)
        ]


@router.post("/v1/completions", response_class=JSONResponse)
async def completions(request: Request, fields: CompletionFields) -> Response:
    """Continue a text, without a chat template."""
    check_model(request, fields.model)
    parts = services(request)
    head = {
        "id": replies.new_id("cmpl-"),
        "object": "text_completion",
        "created": replies.now_s(),
        "model": parts.model_name,
    }

    def body(events: Sequence[ChoiceEvent]) -> dict[str, Any]:
        finished = replies.finished(events)
        return {
            **head,
            "choices": [
                _choice(index, each.text, replies.tokens(events, index), each)
                for index, each in enumerate(finished)
            ],
            "usage": replies.usage_of_prompts(finished, fields.n or 1),
            "timings": replies.timings(finished[0]),
            "kvweave": replies.kvweave(finished[0]),
        }

    encoder = TextStream(fields, head) if fields.stream else None
    until = replies.prompt_known if fields.return_progress else replies.cache_known
    running = start(request, fields.requests(parts.config.generation, cache_use(request)))
    return await replies.reply(request, running, encoder, body, until)


class TextStream:
    """Encodes a continued text as chunks."""

    def __init__(self, fields: CompletionFields, head: dict[str, Any]) -> None:
        self._fields, self._head, self._began_s = fields, head, time.perf_counter()
        self._finished: dict[int, Finished] = {}
        self._characters: dict[int, int] = {}

    def event(self, of: ChoiceEvent) -> Iterator[bytes]:
        index, event = of.index, of.event
        if isinstance(event, Prefill):
            if self._fields.return_progress and event.total_tokens:
                progress = replies.prompt_progress(event, self._began_s)
                yield self._chunk([_choice(index, "", (), None)], prompt_progress=progress)
        elif isinstance(event, Piece):
            offset = self._characters.get(index, 0)
            self._characters[index] = offset + sum(len(token.text) for token in event.tokens)
            if event.text or event.tokens:
                yield self._chunk([_choice(index, event.text, event.tokens, None, offset)])
        else:
            self._finished[index] = event
            ours = {"kvweave": replies.kvweave(event), "timings": replies.timings(event)}
            yield self._chunk([_choice(index, "", (), event)], **ours)

    def end(self) -> Iterator[bytes]:
        """Yield the usage, if the client asked for it, and the mark of the end."""
        if self._fields.wants_usage:
            usage = replies.usage_of_prompts(replies.in_order(self._finished), self._fields.n or 1)
            yield self._chunk([], usage=usage)
        yield DONE

    def failed(self, error: BaseException) -> Iterator[bytes]:
        yield error_event(error)

    def _chunk(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        unknown = {"usage": None} if self._fields.wants_usage else {}
        return sse({**self._head, "choices": choices, **unknown, **more})


def _choice(
    index: int, text: str, tokens: Sequence[TokenLogprob], finished: Finished | None, offset: int = 0
) -> dict[str, Any]:
    return {
        "index": index,
        "text": text,
        "logprobs": _logprobs(tokens, offset) if tokens else None,
        "finish_reason": finished.answer.finish_reason if finished else None,
    }


def _logprobs(tokens: Sequence[TokenLogprob], offset: int) -> dict[str, Any]:
    """Return log probabilities in this route's form; `offset` is the position of the first token's text."""
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
