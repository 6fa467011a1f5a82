"""A response as /v1/responses writes it, while it is made and whole."""

from collections.abc import Sequence
from typing import Any

from kvweave.engine.answering.completions import Finished
from kvweave.results import TokenLogprob
from kvweave.server.openai import replies
from kvweave.server.openai.response_fields import ResponseFields


class ResponseObject:
    """The response to one request; `model` is the name of the one that answers."""

    def __init__(self, fields: ResponseFields, model: str) -> None:
        self.item_id = replies.new_id("msg_")
        self._head: dict[str, Any] = {
            "id": replies.new_id("resp_"),
            "object": "response",
            "created_at": replies.now_s(),
            "error": None,
            "incomplete_details": None,
            "instructions": fields.instructions,
            "max_output_tokens": fields.max_output_tokens,
            "metadata": fields.metadata or {},
            "model": model,
            "parallel_tool_calls": False,
            "previous_response_id": None,
            "reasoning": {"effort": fields.reasoning.effort if fields.reasoning else None, "summary": None},
            "store": False,
            "temperature": fields.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": "none",
            "tools": [],
            "top_logprobs": fields.top_logprobs or 0,
            "top_p": fields.top_p,
            "truncation": "disabled",
        }

    def unfinished(self) -> dict[str, Any]:
        """Return the response before its answer."""
        return {**self._head, "status": "in_progress", "output": [], "usage": None}

    def failed(self, code: str | None, message: str) -> dict[str, Any]:
        """Return the response that has failed."""
        error = {"code": code or "server_error", "message": message}
        return {**self.unfinished(), "status": "failed", "error": error}

    def finished(self, finished: Finished, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        """Return the whole response; one that reached its greatest length is incomplete."""
        cut = finished.answer.finish_reason == "length"
        counted = replies.usage([finished])
        return {
            **self._head,
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": [self.item(self.part(finished.text, tokens), "incomplete" if cut else "completed")],
            "usage": {
                "input_tokens": counted["prompt_tokens"],
                "input_tokens_details": counted["prompt_tokens_details"],
                "output_tokens": counted["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": counted["total_tokens"],
            },
            "timings": replies.timings(finished),
            "kvweave": replies.kvweave(finished),
        }

    def item(self, part: dict[str, Any] | None, status: str) -> dict[str, Any]:
        """Return the message that the output consists of; None: nothing is in it yet."""
        content = [] if part is None else [part]
        return {
            "id": self.item_id,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": content,
        }

    def part(self, text: str, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        """Return the message's text."""
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs(tokens)}


def logprobs(tokens: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    """Return log probabilities as this route writes them."""
    return [replies.token_logprob(each) for each in tokens]
