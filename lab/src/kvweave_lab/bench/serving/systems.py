"""The systems that `kvweave bench serve` compares: how each server starts, and how a request is put to it."""

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvweave.config import default_home
from kvweave.errors import InvalidRequest
from kvweave.machine import cpu_limits
from kvweave.models.loading import model_files
from kvweave.models.prompt import PromptTemplate
from kvweave.recipes.methods import METHODS
from kvweave.types import Prompt
from kvweave_lab.bench.serving.client import Call
from kvweave_lab.bench.serving.processes import (
    ServerProcess,
    free_port,
    home_in,
    import_httpx,
    kvweave_server,
)
from kvweave_lab.bench.serving.traffic import Corpus, ServedRequest

DEFAULT, NO_ASYNC, NO_SHARE, LLAMA = "default", "no-async", "no-share", "llama-server"
SWITCHED_OFF = {NO_ASYNC: "--no-async-kv", NO_SHARE: "--no-share-kv"}
"""Systems that are the default one with one part switched off, and the flag of `kvweave serve` that does it."""
SYSTEMS = (DEFAULT, "full", "prefix", NO_ASYNC, NO_SHARE, LLAMA)
"""The systems that are compared unless others are named."""
CACHE_REUSE = 256
"""The fewest tokens that llama-server moves; the value that its documentation shows."""
STORES_NOTHING = "full"
"""The system whose server stores no KV."""
_ROOM = 256
"""Tokens beside documents and answer: instructions, question, separators."""


@dataclass(frozen=True, slots=True)
class SystemSettings:
    """What all systems have in common.

    Attributes:
        model: as `--model` takes it; None is the shipped reference model.
        gguf: the same weights for llama-server; None leaves it out.
        context_tokens: of a request: documents, question and answer, at most.
        new_tokens: most tokens of an answer.
        ratio: share of stale tokens that recipes recompute; None leaves the recipe's own.
        flags: for every `kvweave serve`.
        parallel: requests that llama-server computes at a time.
        disk_bytes_per_s: what a simulated disk of kvweave's servers delivers (`slow_disk`); None: they read as they do.
    """

    model: str | None
    gguf: Path | None
    context_tokens: int
    new_tokens: int
    ratio: float | None = None
    flags: tuple[str, ...] = ()
    parallel: int = 4
    disk_bytes_per_s: int | None = None


def chosen_systems(names: Sequence[str], settings: SystemSettings) -> tuple[str, ...]:
    """Return the systems to compare. Raises InvalidRequest for an unknown one and for llama-server without a GGUF file."""
    if not names:
        return tuple(name for name in SYSTEMS if name != LLAMA or settings.gguf is not None)
    known = [*SYSTEMS, *(name for name in METHODS if name not in SYSTEMS)]
    for name in names:
        if name not in known:
            raise InvalidRequest(f"there is no system {name!r}; choose from {', '.join(known)}")
        if name == LLAMA and settings.gguf is None:
            raise InvalidRequest("llama-server needs the same weights as a GGUF file; give --gguf")
    return tuple(dict.fromkeys(names))


def chosen_rates(
    texts: Sequence[str], systems: Sequence[str]
) -> tuple[tuple[float, ...], dict[str, tuple[float, ...]]]:
    """Return the rates of all systems, rising, and those of systems that have their own; from `0.3` and `prefix=0.1`.

    Raises InvalidRequest for what is no rate, for a system that is not compared, and for a system that is left without rates.
    """
    found: dict[str, set[float]] = {}
    for text in texts:
        name, _, number = text.rpartition("=")
        try:
            rate = float(number)
        except ValueError:
            rate = 0.0
        if not 0.001 <= rate < math.inf:
            raise InvalidRequest(
                f"{text!r} is no rate; write arrivals per second, at least 0.001, or SYSTEM=RATE"
            )
        if name and name not in systems:
            raise InvalidRequest(f"{text!r} is for a system that is not compared; --system {name} adds it")
        found.setdefault(name, set()).add(rate)
    common = tuple(sorted(found.pop("", ())))
    own = {name: tuple(sorted(rates)) for name, rates in found.items()}
    left = [name for name in systems if name not in own]
    if own and left and not common:
        raise InvalidRequest(f"{', '.join(left)} is left without a rate; give --rate {left[0]}=RATE too")
    return common, own


class System:
    """One system: its server, not started yet, and the bodies of its requests.

    Systems that are equal in `stores_like` store the same KV; `home` is where. `environment` is for kvweave's servers.
    """

    def __init__(
        self,
        name: str,
        settings: SystemSettings,
        corpus: Corpus,
        folder: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self.stores_like = DEFAULT if name in SWITCHED_OFF else name
        self.home = home_in(folder, name)
        self._settings, self._corpus = settings, corpus
        self.model_id = ""
        self._template: PromptTemplate | None = None
        if name == LLAMA:
            self._template = prompt_template(settings.model)
            self.server = _llama(settings, folder)
        else:
            flags = (*settings.flags, *((SWITCHED_OFF[name],) if name in SWITCHED_OFF else ()))
            self.server = kvweave_server(
                name,
                folder,
                model=settings.model,
                flags=flags,
                home=self.home,
                environment=environment,
                disk_bytes_per_s=settings.disk_bytes_per_s,
            )

    def start(self) -> None:
        """Start the server. Raises ServerFailed."""
        self.server.start()
        self.model_id = served_model(self.server.url)

    def call(self, request: ServedRequest, new_tokens: int | None = None) -> Call:
        """Return a request as this system takes it; greedy."""
        limits = {
            "model": self.model_id,
            "temperature": 0,
            "max_tokens": new_tokens or self._settings.new_tokens,
        }
        texts = self._corpus.texts(request)
        if self._template is not None:  # the same tokens that kvweave makes of the request
            ids = self._template.render(Prompt(request.question, texts)).token_ids
            return Call("/v1/completions", {**limits, "prompt": list(ids), "cache_prompt": True})
        names = (f"document-{number}" for number in request.documents)
        documents = [{"id": name, "text": text} for name, text in zip(names, texts, strict=True)]
        return documents_call(request.question, documents, self._options(), **limits)

    def _options(self) -> dict[str, Any]:
        options: dict[str, Any] = {}
        if self.name in METHODS:
            options["recipe"] = self.name
        if self._settings.ratio is not None and self.name not in ("full", "prefix"):
            options["ratio"] = self._settings.ratio
        return options


def documents_call(
    question: str, documents: Sequence[dict[str, str]], options: dict[str, Any], **more: Any
) -> Call:
    """Return a chat request of kvweave's server over the caller's own documents."""
    messages = [{"role": "user", "content": question}]
    body: dict[str, Any] = {"messages": messages, **more}
    if documents:
        body["documents"] = list(documents)
    return Call("/v1/chat/completions", {**body, "kvweave": options} if options else body)


def served_model(url: str, key: str | None = None) -> str:
    """Return the name of the first model that a server lists, asked with an API key if it needs one."""
    httpx = import_httpx()
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    response = httpx.get(f"{url}/v1/models", headers=headers, timeout=60)
    response.raise_for_status()
    return str(response.json()["data"][0]["id"])


def tokenizer_of(model: str | None) -> Any:
    """Return a model's tokenizer without loading its weights."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_files(model, default_home()), trust_remote_code=False)


def prompt_template(model: str | None) -> PromptTemplate:
    """Return a renderer of prompts for a model, without loading the model's weights."""
    return PromptTemplate(tokenizer_of(model))


def _llama(settings: SystemSettings, folder: Path) -> ServerProcess:
    port, threads = free_port(), cpu_limits().threads
    values = {
        "--model": str(settings.gguf),
        "--port": str(port),
        "--parallel": str(settings.parallel),
        "--context-tokens": str(settings.context_tokens + _ROOM),
        "--cache-reuse": str(CACHE_REUSE),
        "--threads": str(threads),
    }
    words = [word for option in values.items() for word in option]
    return ServerProcess(
        LLAMA, [sys.executable, "-m", "kvweave_lab.bench.serving.llama_server", *words], port, folder
    )
