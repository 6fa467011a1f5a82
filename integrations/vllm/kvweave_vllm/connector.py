"""The KV connector that vLLM loads by this module's path, and the worker extension that shows it the model."""

import logging
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)

from kvweave_vllm.claims import Claims, Work
from kvweave_vllm.engine import VllmEngine
from kvweave_vllm.model import Served, open_store
from kvweave_vllm.ranks import AgreedStore, new_group, on_first
from kvweave_vllm.reads import READ_THREADS, Reader
from kvweave_vllm.support import check_config, check_layers
from kvweave_vllm.weaver import Weaver

_LOG = logging.getLogger(__name__)
IDLE_S: Final = 0.01
"""The longest that a step without tokens waits for reads; new requests wait as long."""

_worker: Any = None  # a weak reference to the worker of this process


class Extension:
    """Mixed into vLLM's worker class by `--worker-extension-cls`; tells the connector in the same process about the worker."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        global _worker
        worker = object.__new__(cls)
        _worker = weakref.ref(worker)
        return worker


@dataclass
class Step(KVConnectorMetadata):
    """What the workers do in one step; `idle` if it computes nothing else, so that it may wait for reads."""

    work: Work
    idle: bool


@dataclass
class Reads(KVConnectorWorkerMetadata):
    """The requests whose stored KV was read since the step before, each named once for each worker."""

    requests: list[str]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "Reads":
        assert isinstance(other, Reads)
        return Reads([*self.requests, *other.requests])


class KvweaveConnector(KVConnectorBase_V1):
    """Claims the tokens of requests that name chunks; the worker fills their blocks before vLLM's pass over the rest."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        check_config(vllm_config)
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._served = Served(vllm_config)
        self._store = open_store(vllm_config)
        if role is KVConnectorRole.SCHEDULER:
            self._claims = Claims(self._served, self._store, vllm_config)
        self.weaver: Weaver | None = None

    # The scheduler's side

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._claims.claim(request, num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            self._claims.allocated(request, blocks.get_block_ids()[0])
        else:
            self._claims.drop(request)

    def build_connector_meta(self, scheduler_output: Any) -> Step:
        return Step(self._claims.step(), not scheduler_output.total_num_scheduled_tokens)

    def update_connector_output(self, connector_output: Any) -> None:
        reads = connector_output.kv_connector_worker_meta
        if isinstance(reads, Reads):
            self._claims.read(reads.requests)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self._claims.finished(request)
        return False, None

    # The worker's side

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        worker = None if _worker is None else _worker()
        if worker is None:
            raise RuntimeError(
                "kvweave needs its worker extension; start vLLM with the flags of `kvweave-vllm flags`"
            )
        check_layers(worker.model_runner)
        runner, served, store = worker.model_runner, self._served, self._store
        group = new_group()
        if group is None:
            engine = VllmEngine(runner, served.fingerprint, served.template)
            self.weaver = Weaver(engine, store, Reader(engine, store, READ_THREADS))
        else:
            # The first rank alone loads the model for its name. All read the same in the same order, which needs one thread.
            fingerprint = on_first(group, lambda: served.fingerprint)
            engine = VllmEngine(runner, fingerprint, served.template)
            reader = Reader(engine, AgreedStore(store, group), threads=1)
            self.weaver = Weaver(engine, AgreedStore(store, new_group()), reader)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, Step)
        assert self.weaver is not None
        # Here, since vLLM calls `start_load_kv` after the pass of a step that loads nothing.
        self.weaver.reader.update(connector_metadata.work.reads, connector_metadata.work.dropped)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        step = self._get_connector_metadata()
        assert isinstance(step, Step)
        assert self.weaver is not None
        if step.work.loads:
            self.weaver.weave(step.work.loads)
        if step.idle:
            self.weaver.reader.wait(IDLE_S)

    def build_connector_worker_meta(self) -> Reads | None:
        assert self.weaver is not None
        ended = self.weaver.reader.ended()
        return Reads(ended) if ended else None

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: everything is in the pages when the pass starts."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Do nothing: what is stored is captured in passes of kvweave's own."""

    def wait_for_save(self) -> None:
        """Do nothing."""

    def shutdown(self) -> None:
        if self.weaver is not None:
            self.weaver.reader.close()
        self._store.close()
