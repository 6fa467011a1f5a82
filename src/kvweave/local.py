"""An engine in the caller's own process, for packages that connect kvweave to other frameworks.

Like a server, but without HTTP, it answers chats and questions to the caller's documents or to a knowledge base. Calls with the
same models and settings share the loaded models. Code that runs models is imported when first needed.
"""

import atexit
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Unpack

from kvweave.config import DEFAULT_NEW_TOKENS, Config, read_config
from kvweave.errors import InvalidRequest
from kvweave.options import AskKeywords
from kvweave.results import Piece, PreparedChunks, Source, facts
from kvweave.state.knowledge_base_state import with_recorded_models
from kvweave.types import Message

if TYPE_CHECKING:
    from kvweave.remote.model import AnyModel
    from kvweave.server.serving.completions import Finished as Finished
    from kvweave.server.serving.serving import Serving

DECODING: Final = {
    "temperature": "temperature",
    "top_p": "top_p",
    "seed": "seed",
    "max_tokens": "max_new_tokens",
}
"""Decoding options of a call: other frameworks' names and kvweave's names."""
REUSE: Final = ("kb", "recipe", "ratio", "coverage", "top_k")
"""Options of a call for its knowledge base and for the reuse of KV."""

_shared: "dict[Config, Serving]" = {}
_guard = threading.Lock()


class LocalEngine:
    """One model and the knowledge bases of one home. Thread-safe; loads everything when first needed."""

    def __init__(self, serving: "Serving") -> None:
        self._serving = serving
        self._tenant = serving.tenant(None)

    @property
    def model_name(self) -> str:
        """Name of the model that answers; loads it."""
        return self._model.fingerprint.name

    @property
    def context_tokens(self) -> int:
        """Greatest length of prompt and answer together, in tokens; loads the model."""
        return self._model.geometry.context_tokens

    @property
    def new_tokens(self) -> int:
        """Greatest length of an answer, in tokens, for a request that sets none; loads the model."""
        from kvweave.options import within_context

        given = self._tenant.config.generation.max_new_tokens
        return within_context(given, DEFAULT_NEW_TOKENS, self.context_tokens)

    def complete(
        self,
        messages: Sequence[Message],
        documents: Sequence[tuple[str, str]] = (),
        *,
        decoding: Mapping[str, Any],
        kb: str | None = None,
        cancelled: threading.Event | None = None,
        **options: Unpack[AskKeywords],
    ) -> "Generator[Piece | Finished, None, None]":
        """Yield the pieces of an answer and at last a Finished.

        Args:
            messages: the messages of the chat, in order; the last one is answered.
            documents: names and texts of chunks that the caller has retrieved, in the order of the prompt.
            decoding: fields of `Sampling`; None leaves one to the settings.
            kb: the knowledge base to answer from, instead of documents.
            cancelled: ends the request when it is set.
            options: further options of `KnowledgeBase.ask`.

        Raises as `Tenant.complete`.
        """
        from kvweave.server.serving.completions import CallerDocument, CompletionRequest, Finished

        chunks = tuple(CallerDocument(*document) for document in documents)
        options["generation"] = self._tenant.sampling(**decoding)
        request = CompletionRequest(tuple(messages), documents=chunks, kb=kb, options=options)
        for event in self._tenant.complete(request, cancelled):
            if isinstance(event, Piece | Finished):
                yield event

    def prepare(
        self,
        texts: Sequence[str],
        progress: Callable[[int, int], None] = lambda done, total: None,
        *,
        system: str | None = None,
        recipe: str | None = None,
        prepare: str | None = None,
    ) -> PreparedChunks:
        """Prepare chunks, so that calls with them as documents reuse them in any order; see `Tenant.prepare`."""
        return self._tenant.prepare(texts, progress, system=system, recipe=recipe, prepare=prepare)

    def passages(self, kb: str, question: str, top_k: int | None = None) -> tuple[Source, ...]:
        """Return the passages of a knowledge base for a question, best first. Loads no language model.

        Raises KnowledgeBaseNotFound, EmptyKnowledgeBase, InvalidRequest, KnowledgeBaseMismatch.
        """
        with self._tenant.bases.using(kb) as base:
            return base.passages(question, top_k)

    @property
    def _model(self) -> "AnyModel":
        return self._serving.resident.model


def call_options(
    model: object, given: Mapping[str, Any], more: Sequence[str], beside: Sequence[str]
) -> dict[str, Any]:
    """Return the options of a call, with the attributes of `model` for options that the call leaves out.

    The options are DECODING, REUSE and `more`; a call may also give those in `beside`. Raises InvalidRequest for any other.
    """
    defaults = {name: getattr(model, name) for name in (*DECODING, *REUSE, *more)}
    if unknown := given.keys() - defaults.keys() - set(beside):
        raise InvalidRequest(
            f"{type(model).__name__} has no option {sorted(unknown)[0]!r}; choose from {', '.join([*beside, *sorted(defaults)])}"
        )
    return {**defaults, **given}


def decoding_of(options: Mapping[str, Any], stop: Sequence[str]) -> dict[str, Any]:
    """Return a call's decoding options as fields of `Sampling`, including the texts that end the answer."""
    return {**{ours: options[name] for name, ours in DECODING.items()}, "stop": tuple(stop)}


def answer_facts(finished: "Finished") -> dict[str, Any]:
    """Return the kind of reuse (answer, kv or miss), the plan, timing and sources of an answer, as plain values."""
    answer = finished.answer
    found = {"cache": finished.cache, "plan": answer.plan, "timing": answer.timing, "sources": answer.sources}
    return {name: facts(value) for name, value in found.items()}


def local_engine(kb: str | None = None, home: str | Path | None = None, **settings: Any) -> LocalEngine:
    """Return the engine for these settings. If they name no models, it uses those of the knowledge base.

    `settings` are those of `kvweave.open`. Raises InvalidRequest for an unknown setting or an invalid value.
    """
    from kvweave.server.serving.serving import Serving

    config = read_config(None if home is None else Path(home), **settings)
    key = with_recorded_models(config, kb or "default")
    with _guard:
        if key not in _shared:
            _shared[key] = Serving(config, kb=kb or "default")
        return LocalEngine(_shared[key])


def close_local_engines() -> None:
    """Close every engine of the process, after up to ten seconds for running requests. Stored data stays."""
    with _guard:
        engines = list(_shared.values())
        _shared.clear()
    for serving in engines:
        serving.close()


atexit.register(close_local_engines)
