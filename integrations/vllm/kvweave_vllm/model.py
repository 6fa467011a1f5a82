"""The model that vLLM serves and the store of its chunk KV, as a vLLM configuration names them."""

import json
import subprocess
import sys
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from kvweave.config import default_home, without_tilde
from kvweave.errors import UnsupportedModel
from kvweave.hub import cached_folder
from kvweave.kvstore.chunk_store import ChunkStore
from kvweave.models.fingerprint import ModelMemory
from kvweave.models.loading import load_model, read_tokenizer
from kvweave.models.prompt import PromptTemplate
from kvweave.types import ModelFingerprint

STORE_SETTINGS: Final = ("namespace", "limit_bytes", "host_bytes", "shared", "shared_bytes")
"""Settings in `kv_connector_extra_config` that are arguments of `ChunkStore`; beside them `store`, its folder."""


class Served:
    """What stored KV depends on, of the model in a vLLM configuration."""

    def __init__(self, vllm_config: Any) -> None:
        self.name: str = vllm_config.model_config.model
        self.dtype = str(vllm_config.model_config.dtype).removeprefix("torch.")

    @cached_property
    def fingerprint(self) -> ModelFingerprint:
        """The fingerprint that kvweave's own engine gives the model; the first time in a home it loads the model for that.

        Raises UnsupportedModel for a model whose KV kvweave cannot place.
        """
        fact = f"served in {self.dtype}"
        known = self._memory.get(fact)
        if isinstance(known, str):
            return ModelFingerprint(**json.loads(known))
        # In a process of its own: vLLM changes classes of transformers, and needs the memory.
        command = [sys.executable, "-m", __name__, self.name, self.dtype]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise UnsupportedModel(
                f"{self.name} cannot be used with kvweave: {done.stderr.strip().rpartition(chr(10))[2]}"
            )
        self._memory.put(fact, done.stdout)
        return ModelFingerprint(**json.loads(done.stdout))

    @cached_property
    def template(self) -> PromptTemplate:
        """Renders prompts for its tokenizer."""
        return PromptTemplate(read_tokenizer(self.name, cached_folder(self.name), self._memory))

    @cached_property
    def _memory(self) -> ModelMemory:
        return ModelMemory(cached_folder(self.name), default_home())


def open_store(vllm_config: Any) -> ChunkStore:
    """Open the store that a vLLM configuration names; by default the folder `vllm` of kvweave's home. Raises as ChunkStore."""
    extra = vllm_config.kv_transfer_config.kv_connector_extra_config
    folder: Path = without_tilde(extra["store"]) if "store" in extra else default_home() / "vllm"
    return ChunkStore(folder, **{name: extra[name] for name in STORE_SETTINGS if name in extra})


if __name__ == "__main__":
    print(
        json.dumps(
            asdict(load_model(sys.argv[1], dtype=sys.argv[2], weights="full", device="cpu").fingerprint)
        )
    )
