"""A digest of everything that stored KV depends on: weights, configuration, tokenizer, dtype, bits of the weights.

Two models with the same digest compute the same KV for the same tokens, so they can share stored KV. Any other model must
never match, even under the same name or path.
"""

import hashlib
import json
import logging
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Final

import torch
import xxhash
from tokenizers import Tokenizer
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvweave.files import write_atomically
from kvweave.models.quantised import quantised_modules, weight_bits
from kvweave.models.text_prefix import without_prefix
from kvweave.types import ModelFingerprint

_LOG = logging.getLogger(__name__)

_SAMPLED = 16
"""Numbers of each weight that are compared."""

TOKENIZER_FACT = "tokenizer"
"""Under which a `ModelMemory` has the digest of a tokenizer."""

# Names, versions and settings that only generation or training reads. Unknown settings count, to be safe.
_WITHOUT_EFFECT = frozenset(
    {
        "architectures",
        "bos_token_id",
        "chunk_size_feed_forward",
        "dtype",
        "eos_token_id",
        "id2label",
        "initializer_range",
        "label2id",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "problem_type",
        "return_dict",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)


def fingerprint(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str, memory: "ModelMemory | None" = None
) -> ModelFingerprint:
    """Digest a loaded model and tokenizer.

    Reads every weight once (about 10 GB/s), unless the `memory` of the files that they were loaded from has their digest.
    """
    dtype, bits = str(model.dtype).removeprefix("torch."), weight_bits(model)
    parts = {
        "weights": _remembered(memory, f"weights in {dtype}, {bits}", lambda: digest_weights(model)),
        "tokenizer": tokenizer_part(tokenizer, memory),
        "configuration": configuration_part(model),
        "dtype": dtype,
    }
    # Digests of models in full precision and without adapters are older than these parts.
    more = {} if bits == "full" else {"weight_bits": bits}
    adapters = _adapters(model)
    digest = _digest({**parts, **more, **({"adapters": adapters} if adapters else {})})
    return ModelFingerprint(name=name, digest=digest, weight_bits=bits, **parts)


def tokenizer_part(tokenizer: PreTrainedTokenizerBase, memory: "ModelMemory | None" = None) -> str:
    """Return what a fingerprint says of a tokenizer."""
    digest = _remembered(memory, TOKENIZER_FACT, lambda: digest_tokenizer(tokenizer))
    backend = getattr(tokenizer, "backend_tokenizer", None)
    joined = isinstance(backend, Tokenizer) and without_prefix(backend) is not None
    # Earlier versions put a space before each part of a prompt: other tokens.
    return f"{digest} joined" if joined else digest


def configuration_part(model: PreTrainedModel) -> str:
    """Return what a fingerprint says of a model's class and settings; its weights do not matter."""
    return _digest([type(model).__name__, _settings(model)])


class WatchedFingerprint:
    """The fingerprint of a loaded model, made anew once its weights were changed: a LoRA merged or switched, a step of training.

    Args: as of `fingerprint`; `memory` serves the first time alone.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        name: str,
        memory: "ModelMemory | None" = None,
    ) -> None:
        self._model, self._tokenizer, self._name = model, tokenizer, name
        self._places: list[tuple[int, int]] = []
        self._few: dict[torch.dtype, list[Tensor]] = {}
        self._seen = self._look()
        self.value = fingerprint(model, tokenizer, name, memory)

    def check(self) -> ModelFingerprint:
        """Return the fingerprint of the weights as they are now; takes less than a millisecond while they are unchanged.

        A change is seen by torch's counter of changes, or else by 16 numbers of each weight.
        """
        seen = self._look()
        if seen != self._seen:
            self._seen, self.value = seen, fingerprint(self._model, self._tokenizer, self._name)
            _LOG.warning(
                "the weights of %s were changed since it was loaded; KV of the earlier ones is not used",
                self._name,
            )
        return self.value

    def _look(self) -> tuple[object, ...]:
        """Return where each weight is and its counter of changes, a few of its numbers, and which adapters are switched on."""
        weights = list(self._model.parameters())
        places = [(weight.data_ptr(), 0 if weight.is_inference() else weight._version) for weight in weights]
        if places != self._places:
            self._places, self._few = places, {}
            for weight in weights:
                flat = weight.detach().reshape(-1)
                self._few.setdefault(flat.dtype, []).append(flat[:: max(1, flat.numel() // _SAMPLED)])
        # A change through `.data`, as peft merges, is not counted.
        numbers = [torch.cat(few).cpu().view(torch.uint8).numpy().tobytes() for few in self._few.values()]
        return places, numbers, _adapters(self._model)


def _adapters(model: PreTrainedModel) -> list[list[str]]:
    """Return which adapters of peft each layer applies; changing that changes no weight."""
    if not hasattr(model, "peft_config"):
        return []
    own = ((name, vars(module)) for name, module in model.named_modules())
    return [
        [name, str(held["_active_adapter"]), str(held.get("_disable_adapters"))]
        for name, held in own
        if "_active_adapter" in held
    ]


def _remembered(memory: "ModelMemory | None", name: str, compute: Callable[[], str]) -> str:
    known = None if memory is None else memory.get(name)
    if isinstance(known, str):
        return known
    digest = compute()
    if memory is not None:
        memory.put(name, digest)
    return digest


def _digest(value: object) -> str:
    return hashlib.blake2b(
        json.dumps(value, sort_keys=True, default=str).encode(), digest_size=16
    ).hexdigest()


def digest_weights(model: PreTrainedModel) -> str:
    """Return a digest of all weights, quantised ones as they are stored."""
    digest = xxhash.xxh3_128()
    packed = quantised_modules(model)
    for name, module in sorted(packed.items()):
        digest.update(f"{name} {module.digest};".encode())
    for name, tensor in sorted(model.state_dict().items()):
        if name.rpartition(".")[0] in packed and name.endswith(".weight"):
            continue  # in the layout of a kernel
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype};".encode())
        flat = tensor.detach().contiguous().cpu().flatten()
        if flat.numel():
            digest.update(memoryview(flat.view(torch.uint8).numpy()))
    return digest.hexdigest()


def digest_tokenizer(tokenizer: PreTrainedTokenizerBase) -> str:
    """Digest a tokenizer's rules, chat template and special tokens."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = backend.to_str() if backend is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    return _digest([rules, getattr(tokenizer, "chat_template", None), tokenizer.special_tokens_map])


def _settings(model: PreTrainedModel) -> dict[str, object]:
    """Return the configuration, with rope and layer settings, but without what no key or value depends on."""
    settings = model.config.get_text_config(decoder=True).to_dict()
    return {name: value for name, value in settings.items() if name not in _WITHOUT_EFFECT and name[0] != "_"}


# What an earlier start found out about a model's files, so that the next start need not find it out again
#
# Digesting every weight and a large vocabulary takes seconds and always gives the same. A fact is used only while the folder's
# files have the names, sizes, inodes and times that they had, and the libraries their versions.

Fact = str | bool
_LIBRARIES: Final = ("torch", "transformers", "tokenizers")
_VERSION: Final = 1
"""Raise it when a fact means something else."""


class ModelMemory:
    """Facts about the model in a folder, in one file of the home folder; without a folder, it remembers nothing.

    Forgetting is harmless: an unreadable file counts as empty, and a home that cannot be written to remembers nothing.
    """

    def __init__(self, folder: Path | None, home: Path) -> None:
        self._folder = folder
        self._state = None if folder is None else _state(folder)
        name = hashlib.blake2b(str(folder).encode(), digest_size=16).hexdigest()
        self._file = home / "models" / "facts" / f"{name}.json"
        self._facts = self._read()

    def get(self, name: str) -> Fact | None:
        """Return a fact, None if it is not known."""
        return self._facts.get(name)

    def put(self, name: str, fact: Fact) -> None:
        """Remember a fact, unless the folder has changed since this object was made."""
        if self._folder is None or self._state is None or self._state != _state(self._folder):
            return
        self._facts = {**self._read(), **self._facts, name: fact}
        content = json.dumps({"state": self._state, "facts": self._facts})
        with suppress(OSError):
            write_atomically(self._file, [content.encode()])

    def _read(self) -> dict[str, Fact]:
        if self._state is None:
            return {}
        try:
            found = json.loads(self._file.read_text())
            facts = dict(found["facts"]) if found["state"] == self._state else {}
        except (OSError, ValueError, KeyError, TypeError):
            return {}
        return {name: fact for name, fact in facts.items() if isinstance(fact, str | bool)}


def _state(folder: Path) -> str | None:
    """Name a folder's content by its files and the libraries; None if the model depends on more than its folder."""
    versions = [_VERSION, *(version(library) for library in _LIBRARIES)]
    if (folder / "adapter_config.json").exists():  # weights on top of a model that is elsewhere
        return None
    files = []
    try:
        for file in sorted(folder.rglob("*")):
            if file.is_file():
                seen = file.stat()
                times = (seen.st_mtime_ns, seen.st_ctime_ns)
                files.append([str(file.relative_to(folder)), seen.st_size, *times, seen.st_ino])
    except OSError:
        return None
    return hashlib.blake2b(json.dumps([versions, files]).encode(), digest_size=16).hexdigest()
