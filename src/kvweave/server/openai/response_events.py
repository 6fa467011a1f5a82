"""The events of a streamed response, in the order and with the names that the API gives them."""

from collections.abc import Iterator
from typing import Any

from kvweave.engine.answering.completions import Finished
from kvweave.results import Piece, TokenLogprob
from kvweave.server.errors import api_error
from kvweave.server.events import sse
from kvweave.server.openai.replies import ChoiceEvent
from kvweave.server.openai.response_object import ResponseObject, logprobs


class ResponseStream:
    """Streams a response; each event has the number after the one before it."""

    def __init__(self, response: ResponseObject) -> None:
        self._response = response
        self._number = 0
        self._in_message = False
        self._begun = False
        self._text = ""
        self._tokens: list[TokenLogprob] = []

    def event(self, of: ChoiceEvent) -> Iterator[bytes]:
        """Yield what one event adds."""
        if not self._begun:
            self._begun = True
            for name in ("created", "in_progress"):
                yield self._send(f"response.{name}", response=self._response.unfinished())
        if isinstance(of.event, Piece):
            yield from self._begin_message()
            yield from self._delta(of.event)
        elif isinstance(of.event, Finished):
            yield from self._begin_message()
            yield from self._end_message(of.event)

    def end(self) -> Iterator[bytes]:
        """Nothing follows the finished response."""
        yield from ()

    def failed(self, error: BaseException) -> Iterator[bytes]:
        """Yield the failed response."""
        found = api_error(error)
        yield self._send("response.failed", response=self._response.failed(found.code, found.message))

    def _begin_message(self) -> Iterator[bytes]:
        if self._in_message:
            return
        self._in_message = True
        item = self._response.item(None, "in_progress")
        yield self._send("response.output_item.added", output_index=0, item=item)
        yield self._in_part("response.content_part.added", part=self._response.part("", ()))

    def _delta(self, piece: Piece) -> Iterator[bytes]:
        self._text += piece.text
        self._tokens += piece.tokens
        if piece.text or piece.tokens:
            yield self._in_part(
                "response.output_text.delta", delta=piece.text, logprobs=logprobs(piece.tokens)
            )

    def _end_message(self, finished: Finished) -> Iterator[bytes]:
        whole = self._response.finished(finished, self._tokens)
        (item,) = whole["output"]
        (part,) = item["content"]
        yield self._in_part("response.output_text.done", text=part["text"], logprobs=part["logprobs"])
        yield self._in_part("response.content_part.done", part=part)
        yield self._send("response.output_item.done", output_index=0, item=item)
        yield self._send(f"response.{whole['status']}", response=whole)

    def _in_part(self, kind: str, **fields: Any) -> bytes:
        return self._send(kind, item_id=self._response.item_id, output_index=0, content_index=0, **fields)

    def _send(self, kind: str, **fields: Any) -> bytes:
        data = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return sse(data, kind)
