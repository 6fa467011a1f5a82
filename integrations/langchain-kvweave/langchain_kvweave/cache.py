"""A cache for LangChain's models on kvweave's answer cache: it also knows a question again that is asked in other words."""

import json
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import numpy as np
from langchain_core.caches import RETURN_VAL_TYPE, BaseCache
from langchain_core.load import dumps, loads
from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, Generation, GenerationChunk

from kvweave.answer_cache.cache import AnswerCache
from kvweave.answer_cache.records import AnswerProvenance, Vector
from kvweave.config import read_config
from kvweave.database import Database
from kvweave.options import AskOptions

if TYPE_CHECKING:
    from kvweave.embedding import TextEncoder

_KEPT: Final = (Generation, GenerationChunk, ChatGeneration, ChatGenerationChunk, AIMessage, AIMessageChunk)
_MOST_CHARACTERS: Final = 200
"""A longer text holds more than a question, such as the documents it is about."""


class _Asked(NamedTuple):
    """A question, everything else that an answer depends on, and whether other words may get its answer."""

    question: str
    settings: AskOptions
    similar: bool


class KvweaveCache(BaseCache):
    """Answers of language models in a database under kvweave's home; threads and processes may share it.

    The same prompt to the same model gets its answer again. With match "similar" so does the same question in other words:
    one line, last in the chat or all of the prompt. Everything before it must be equal. Only English is read so; questions in
    other languages, and texts longer than a line, get the answer to the very same text. A question such as "What day is it
    today?", whose answer depends on when it is asked, is not kept.

    Args:
        name: of the cache; caches with different names share nothing.
        match: "similar", or "exact" for the same prompts alone.
        home: folder that holds everything; None is kvweave's own choice.
        settings: `answer_threshold`, `answer_limit_bytes`, `embedding_model`, as `kvweave.open` takes them.

    Raises InvalidRequest for an impossible setting, StoreError if the database cannot be used.
    """

    def __init__(
        self,
        name: str = "default",
        *,
        match: Literal["similar", "exact"] = "similar",
        home: str | Path | None = None,
        **settings: Any,
    ) -> None:
        self._config = read_config(None if home is None else Path(home), **settings)
        self._match = match
        self._database = Database(self._config.home / "langchain" / name / "answers.sqlite")
        self._answers = AnswerCache(self._database, self._config.answers.answer_limit_bytes)

    def lookup(self, prompt: str, llm_string: str) -> RETURN_VAL_TYPE | None:
        """Return what a model has answered to this prompt, or to the same question; None if nothing is known."""
        asked = self._asked(prompt, llm_string)

        def vector() -> Vector:
            return self._vector(asked)

        found = self._answers.find(
            asked.question, vector, asked.settings, self._config.answers.answer_threshold
        )
        if found is None:
            return None
        self._answers.record_hit(found, asked.question, vector)
        return [_revived(text) for text in json.loads(found.text)]

    def update(self, prompt: str, llm_string: str, return_val: RETURN_VAL_TYPE) -> None:
        """Keep what a model has answered."""
        asked = self._asked(prompt, llm_string)
        text = json.dumps([dumps(generation) for generation in return_val])
        made_from = AnswerProvenance(frozenset(), (), self._answers.epoch)
        self._answers.put(asked.question, self._vector(asked), asked.settings, text, (), made_from)

    def clear(self, **kwargs: Any) -> None:
        """Delete every answer."""
        self._answers.clear()

    def close(self) -> None:
        """Close the database. Using the cache afterwards raises StoreError; closing twice is fine."""
        self._database.close()

    @cached_property
    def _encoder(self) -> "TextEncoder":
        from kvweave.embedding import TextEncoder  # imports PyTorch

        return TextEncoder(self._config.embedding.embedding_model)

    def _vector(self, asked: _Asked) -> Vector:
        if not asked.similar:
            return np.zeros(1, np.float32)  # only the very same text is found: it is compared with nothing
        vector: Vector = self._encoder.encode([asked.question])[0]
        return vector

    def _asked(self, prompt: str, llm_string: str) -> _Asked:
        before, question = _last_question(prompt)
        line = question.strip()
        if self._match == "similar" and line and len(line) <= _MOST_CHARACTERS and line.isprintable():
            return _Asked(line, _settings(llm_string, before), similar=True)
        return _Asked(_digest(prompt), _settings(llm_string, "exact"), similar=False)


def _last_question(prompt: str) -> tuple[str, str]:
    """Return a prompt's last message, if it is a human's, and all before it; of plain text all is the question."""
    try:
        messages = json.loads(prompt)
        last = messages[-1]["kwargs"]
    except (ValueError, LookupError, TypeError):
        return "", prompt
    if last.get("type") != "human" or not isinstance(last.get("content"), str):
        return prompt, ""
    question, last["content"] = last["content"], ""
    return json.dumps(messages, sort_keys=True), question


def _settings(*parts: str) -> AskOptions:
    """Return settings that are equal for equal texts alone: the name of no recipe, but what an answer depends on."""
    return AskOptions(f"langchain-{_digest(*parts)}", 0)


def _digest(*parts: str) -> str:
    return blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()


def _revived(text: str) -> Generation:
    generation: Generation = loads(text, allowed_objects=_KEPT)
    return generation
