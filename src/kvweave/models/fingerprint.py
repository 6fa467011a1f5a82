"""A digest of everything that stored KV depends on: weights, configuration, tokenizer, dtype, bits of the weights.

Two models with the same digest compute the same KV for the same tokens, so they can share stored KV. Any other model must
never match, even under the same name or path.
"""

import hashlib
import json
from collections.abc import Callable

import torch
import xxhash
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvweave.models.quantised import quantised_modules, weight_bits
from kvweave.models.remembered import ModelMemory
from kvweave.types import ModelFingerprint

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
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str, memory: ModelMemory | None = None
) -> ModelFingerprint:
    """Digest a loaded model and tokenizer.

    Reads every weight once (about 10 GB/s), unless the `memory` of the files that they were loaded from has their digest.
    """
    dtype, bits = str(model.dtype).removeprefix("torch."), weight_bits(model)
    parts = {
        "weights": _remembered(memory, f"weights in {dtype}, {bits}", lambda: digest_weights(model)),
        "tokenizer": _remembered(memory, TOKENIZER_FACT, lambda: digest_tokenizer(tokenizer)),
        "configuration": _digest([type(model).__name__, _settings(model)]),
        "dtype": dtype,
    }
    # Digests of models in full precision are older than this part.
    digest = _digest(parts if bits == "full" else {**parts, "weight_bits": bits})
    return ModelFingerprint(name=name, digest=digest, weight_bits=bits, **parts)


def _remembered(memory: ModelMemory | None, name: str, compute: Callable[[], str]) -> str:
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
