"""A GGUF file's vocabulary as a transformers tokenizer, and the tokens at which an answer ends.

transformers builds the tokenizer; what it leaves out of the file's rules is set here.
"""

import logging
from typing import Any, Final

from tokenizers import Tokenizer, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kvweave.errors import UnsupportedModel
from kvweave.models.gguf.header import Header

_LOG = logging.getLogger(__name__)

_FIELDS: Final = {
    "model": "tokenizer_type",
    "pre": "pre_tokenizer_type",
    "tokens": "tokens",
    "scores": "scores",
    "token_type": "token_type",
    "merges": "merges",
}
_SPECIAL: Final = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}

# llama.cpp's names of how text is split before merges (src/llama-vocab.cpp): in words as GPT-2 does, and each digit alone.
_AS_GPT2: Final = frozenset({"gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "mellum"})
_DIGITS_APART: Final = frozenset(
    {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}
)
_WHOLE_WORDS: Final = frozenset(
    {"llama3", "llama-v3", "llama-bpe", "falcon3", "tekken"}
)  # found whole, merged or not
_COMPOSED: Final = frozenset({"qwen2", "deepseek-r1-qwen"})  # trained on composed characters (NFC)

_ENDS: Final = frozenset(
    {
        *(
            "<|eot_id|>",
            "<|im_end|>",
            "<|end|>",
            "<end_of_turn>",
            "<|endoftext|>",
            "<|eom_id|>",
            "<EOT>",
            "_<EOT>",
        ),
        *("< EOT >", "<|end_of_text|>", "<end_of_utterance>", "<eos>"),
    }
)
"""Texts of tokens that llama.cpp ends an answer at, whatever the file calls them (src/llama-vocab.cpp)."""


def check_vocabulary(header: Header) -> None:
    """Raise UnsupportedModel, naming it, for a kind of vocabulary or of splitting that is not known."""
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    kind, split = header.metadata.get("tokenizer.ggml.model"), header.metadata.get("tokenizer.ggml.pre")
    if kind not in ("llama", "gpt2"):
        raise UnsupportedModel(
            f"{header.path} has a vocabulary of kind {kind!r}; kvweave reads llama and gpt2"
        )
    known = {*GGUF_PRE_TOKENIZER_SPLITS, *_AS_GPT2, *_DIGITS_APART}
    if kind == "gpt2" and split is None:
        _LOG.warning("%s does not say how text is split into words; it is split as for GPT-2", header.path)
    elif kind == "gpt2" and split not in known:
        raise UnsupportedModel(
            f"{header.path} splits text into words by {split!r}, which kvweave does not know; name the model's folder or "
            "hub id with *.safetensors instead"
        )


def build_tokenizer(header: Header) -> PreTrainedTokenizerFast:
    """Return the tokenizer, with BOS and EOS added where the file says so, and the file's chat template."""
    found = header.metadata
    kind, split = found.get("tokenizer.ggml.model"), found.get("tokenizer.ggml.pre")
    backend = _backend(header, kind, split)
    special = {
        name: found["tokenizer.ggml.tokens"][found[f"tokenizer.ggml.{key}_token_id"]]
        for key, name in _SPECIAL.items()
        if f"tokenizer.ggml.{key}_token_id" in found
    }
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        add_bos_token=found.get("tokenizer.ggml.add_bos_token", kind == "llama"),
        add_eos_token=found.get("tokenizer.ggml.add_eos_token", False),
        chat_template=found.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        **special,
    )


def end_tokens(header: Header) -> list[int]:
    """Return the tokens at which an answer ends: those that the file names, and those that llama.cpp knows by their text."""
    found = header.metadata
    named = [found.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    types = found.get("tokenizer.ggml.token_type") or []
    control = (index for index, kind in enumerate(types) if kind == _CONTROL)
    by_text = (index for index in control if found["tokenizer.ggml.tokens"][index] in _ENDS)
    return list(dict.fromkeys([token for token in named if token is not None] + list(by_text)))


_CONTROL: Final = 3


def _backend(header: Header, kind: Any, split: Any) -> Tokenizer:
    from transformers.integrations.gguf import convert_gguf_tokenizer

    found = {
        name: header.metadata[f"tokenizer.ggml.{key}"]
        for key, name in _FIELDS.items()
        if f"tokenizer.ggml.{key}" in header.metadata
    }
    backend: Tokenizer = convert_gguf_tokenizer(header.architecture, found)[0]
    if kind == "llama" and not header.metadata.get("tokenizer.ggml.add_space_prefix", True):
        _without_prefix_space(backend)
    if split in _DIGITS_APART:
        words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), words]
        )
    if split in _COMPOSED:
        backend.normalizer = normalizers.NFC()
    if split in _WHOLE_WORDS:
        backend.model.ignore_merges = True
    return backend


def _without_prefix_space(backend: Tokenizer) -> None:
    """Keep a Llama tokenizer from putting a space before the text; Gemma's has none anyway."""
    from tokenizers import decoders

    if isinstance(backend.pre_tokenizer, pre_tokenizers.Metaspace):
        backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="never", split=False)
        backend.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        )
