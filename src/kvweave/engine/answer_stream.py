"""An answer that comes piece by piece, as whoever asked holds it."""

from collections.abc import Generator, Iterator
from typing import Any

from kvweave.core import Answer, ExplainedToken
from kvweave.engine.explanation import explain
from kvweave.engine.pipeline import Answered
from kvweave.engine.requests import Arrival
from kvweave.errors import InvalidRequest


class AnswerStream:
    """The pieces of an answer, as an iterator; `answer` and `explain` are there once it is exhausted.

    `arrival` is the request's, over with the iteration; `tokenizer` is None where no model is needed.
    """

    def __init__(self, pieces: Generator[str, None, Answered], tokenizer: Any, arrival: Arrival) -> None:
        self._pieces = pieces
        self._tokenizer = tokenizer
        self._arrival = arrival
        self._answered: Answered | None = None

    def __iter__(self) -> Iterator[str]:
        try:
            finished: Answered | None = yield from self._pieces
        finally:
            self._arrival.leave()
        # A second iteration finds nothing more and takes nothing away.
        self._answered = finished or self._answered

    @property
    def answer(self) -> Answer:
        """The whole answer; raises InvalidRequest while pieces are still to come."""
        return self._finished.answer

    def explain(self) -> tuple[ExplainedToken, ...]:
        """Every token of the prompt with where its KV came from; raises as `answer` does."""
        return explain(self._finished, self._tokenizer)

    @property
    def _finished(self) -> Answered:
        if self._answered is None:
            raise InvalidRequest("the answer is not finished: iterate over the stream to its end first")
        return self._answered
