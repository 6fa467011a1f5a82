"""A model that vLLM runs, as questions need it: its tokenizer and configuration here, its weights there.

`kvweave serve --engine vllm=URL` answers with it. Nothing is loaded but what prompts are made with.
"""

import logging
import threading
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TypeAlias, cast

import torch

from kvweave.cancellation import check_cancelled
from kvweave.config import VLLM, ModelConfig, split
from kvweave.errors import EngineError, EngineUnavailable, UnsupportedModel
from kvweave.models.adapter import Adapter
from kvweave.models.engine import Engine
from kvweave.models.fingerprint import configuration_part, tokenizer_part
from kvweave.models.loading import ModelWithoutWeights, load_without_weights
from kvweave.models.preemption import Preemption
from kvweave.models.prompt import PromptTemplate, check_length
from kvweave.models.snapshot_adapter import Limits, LoadedModel, fused
from kvweave.models.support import context_tokens
from kvweave.recipes.context import Corpus, Ids
from kvweave.recipes.recipe import Recipe
from kvweave.remote.client import Check, Event, VllmServer
from kvweave.remote.fields import DESCRIBE, Description, InvalidField, preparing, read_task
from kvweave.types import ModelFingerprint
from kvweave.version import __version__

_LOG = logging.getLogger(__name__)

_FLAGS: Final = "start it as integrations/vllm says: vllm serve MODEL $(kvweave-vllm flags)"


class RemoteModel:
    """A model that one or several vLLM servers run. Threads may share it.

    Attributes:
        servers: any of them answers any request.
        place: their addresses.
        fingerprint: as the servers name the model, but by the name that it has here.
        model: its class and configuration, with parameters that have no numbers.
    """

    def __init__(
        self, local: ModelWithoutWeights, servers: Sequence[VllmServer], described: Description
    ) -> None:
        self.servers = tuple(servers)
        self.place = ",".join(sorted(server.url for server in servers))
        self.model, self.tokenizer = local.model, local.tokenizer
        self.template = PromptTemplate(local.tokenizer)
        self.fingerprint = described.model
        own = context_tokens(local.model.config.get_text_config(decoder=True))
        dtype = getattr(torch, described.model.dtype)
        self.geometry = Limits(min(own, described.context_tokens), dtype, torch.device("cpu"))
        # `preemption`: of this thread's requests, if these are background work.
        self._thread = threading.local()

    def check_weights(self) -> ModelFingerprint:
        """Return the fingerprint; the servers compare it with theirs at every request."""
        return self.fingerprint

    def check_length(self, prompt_tokens: int, new_tokens: int = 0) -> None:
        """Raise PromptTooLong if prompt and answer do not fit the model's context; the message says by how much."""
        check_length(self.geometry.context_tokens, self.fingerprint.name, prompt_tokens, new_tokens)

    def check_recipe(self, recipe: Recipe) -> None:
        """Raise UnsupportedModel for a recipe that vLLM cannot run."""
        try:
            read_task({"kvweave": {"recipe": recipe.name}}, ())
        except InvalidField as error:
            raise UnsupportedModel(self.refusal(f"recipe {recipe.name}", str(error))) from error

    def rope_regime(self, tokens: int) -> str:
        """Return "fixed": the plug-in refuses other models."""
        return "fixed"

    def refusal(self, what: str, why: str = "it needs the model's logits or KV in this process") -> str:
        """Return the message that `what` does not work with it."""
        return f"{what} does not work with --engine {VLLM}{self.place}: {why}"

    def stream(self, body: Mapping[str, Any]) -> Generator[Event, None, None]:
        """Yield the events of a completion by the server with the fewest requests, or by the next if that does not begin.

        Raises as `VllmServer.stream`, Cancelled, and what the preemption of background work raises.
        """
        check = self._check()
        check()
        *others, last = sorted(self.servers, key=lambda server: server.running)
        for server in others:
            events = server.stream(body, check)
            try:
                first = next(events, None)
            except EngineUnavailable as error:
                _LOG.warning("%s; the next server is asked", error)
                continue
            if first is not None:
                yield first
            yield from events
            return
        yield from last.stream(body, check)

    def prepare(self, recipe: str, prefix: Ids, chunk: Ids, corpus: Corpus) -> None:
        """Let every server prepare a chunk; one that has it, also in a shared tier, looks it up. Raises as `stream`."""
        digest, check = self.fingerprint.digest, self._check()
        body = preparing(recipe, prefix, chunk, corpus, self.geometry.context_tokens, model=digest)
        for server in self.servers:
            check()
            server.complete(body, check)

    @contextmanager
    def low_priority(
        self, preemption: Preemption, cost: None = None, block_tokens: int | None = None
    ) -> Iterator[None]:
        """In this context, this thread's requests wait until `preemption` lets them begin; what has begun goes on in vLLM."""
        self._thread.preemption = preemption
        try:
            yield
        finally:
            self._thread.preemption = None

    def _check(self) -> Check:
        """Return the function that ends a request of this thread, or makes it wait."""
        preemption: Preemption | None = getattr(self._thread, "preemption", None)

        def check() -> None:
            check_cancelled()
            if preemption is not None and preemption.stop_requested():
                preemption.wait_for_requests()

        return check


AnyModel: TypeAlias = LoadedModel | RemoteModel
"""A model as questions need it, in this process or in vLLM."""


def preparing_model(model: AnyModel, what: str = "this") -> Adapter | RemoteModel:
    """Return a model that chunks can be prepared for; raises UnsupportedModel for one that continues exact prefixes alone."""
    return model if isinstance(model, RemoteModel) else fused(model, what)


def as_engine(model: Adapter | RemoteModel) -> Engine:
    """Return a model as preparations are given it; of a remote one they use names and lengths alone."""
    return cast(Engine, model)


def connect(wanted: ModelConfig, home: Path) -> RemoteModel:
    """Return the model that the servers of the setting `engine` run, once it is known that they run the one that is named here.

    Without a name it is the one that the servers name.

    Raises:
        EngineUnavailable: a server cannot be reached. EngineError: it does not have the plug-in, or another version.
        UnsupportedModel: the servers run different models, or another one than is named, or settings are theirs to choose.
        ModelNotFound: the model's tokenizer or configuration cannot be loaded. InvalidRequest: a wrong address.
    """
    servers = [VllmServer(url, wanted.engine_key) for url in split(wanted.engine.removeprefix(VLLM))]
    described = [_describe(server) for server in servers]
    first = described[0]
    for server, other in zip(servers, described, strict=True):
        if other.model.digest != first.model.digest:
            raise UnsupportedModel(
                f"vLLM at {servers[0].url} serves {_named(first.model)}, and at {server.url} {_named(other.model)}; "
                "all must serve the same model"
            )
    local = load_without_weights(wanted.model or first.model.name, home)
    _check_same(local, first.model, wanted)
    shortest = min(each.context_tokens for each in described)
    named = replace(first.model, name=local.name)
    _LOG.info(
        "%s answers at %s; calibration and conversations, which need logits or KV here, are off",
        local.name,
        wanted.engine,
    )
    return RemoteModel(local, servers, Description(first.version, named, shortest))


def _describe(server: VllmServer) -> Description:
    served = server.models()
    if len(served) != 1:
        raise EngineError(f"vLLM at {server.url} serves {len(served)} models; one is needed")
    server.model = served[0]
    asked = {"prompt": [0], "max_tokens": 1, "kv_transfer_params": {"kvweave": DESCRIBE}}
    found = server.complete(asked).get("kvweave")
    if not isinstance(found, dict):
        raise EngineError(f"vLLM at {server.url} runs without kvweave's plug-in; {_FLAGS}")
    if found.get("version") != __version__:
        raise EngineError(
            f"vLLM at {server.url} has kvweave {found.get('version')}, and this is {__version__}; install the same"
        )
    return Description.read(found)


def _check_same(local: ModelWithoutWeights, served: ModelFingerprint, wanted: ModelConfig) -> None:
    own = {"tokenizer": tokenizer_part(local.tokenizer), "configuration": configuration_part(local.model)}
    differing = [part for part, value in own.items() if getattr(served, part) != value]
    if differing:
        raise UnsupportedModel(
            f"vLLM serves {served.name}, and the model here is {local.name}: other {' and '.join(differing)}; give the same "
            "with --model, as the same files"
        )
    chosen = {
        "dtype": (wanted.dtype, ("auto", served.dtype)),
        "weights": (wanted.weights, ("auto", served.weight_bits)),
        "device": (wanted.device, ("auto",)),
    }
    for name, (value, possible) in chosen.items():
        if value not in possible:
            raise UnsupportedModel(
                f"{name} is {value}, by the settings or as the knowledge base was made, and vLLM serves {_named(served)} with "
                f"{served.weight_bits} weights; leave it to vLLM, or start vLLM with the same"
            )


def _named(model: ModelFingerprint) -> str:
    return f"{model.name} in {model.dtype}"
