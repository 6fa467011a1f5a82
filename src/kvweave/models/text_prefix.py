"""The space that most tokenizers of SentencePiece put before a text: whether there is one, and how to leave it out.

Byte-level tokenizers that put one are left as they are: the shipped models learned prompts of such parts.
"""

import json
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.normalizers import Normalizer
from tokenizers.pre_tokenizers import PreTokenizer

Parts = tuple[Normalizer | None, PreTokenizer | None]


def without_prefix(backend: Tokenizer) -> Parts | None:
    """Return a tokenizer's normalizer and pre-tokenizer without the space that they put before a text; None if they put none."""
    small = Tokenizer(WordLevel({}, ""))  # describes the two parts without the vocabulary
    if backend.normalizer is not None:
        small.normalizer = backend.normalizer
    if backend.pre_tokenizer is not None:
        small.pre_tokenizer = backend.pre_tokenizer
    before = json.loads(small.to_str())
    after = {**before, **{name: _unspaced(before[name]) for name in ("normalizer", "pre_tokenizer")}}
    if after == before:
        return None
    small = Tokenizer.from_str(json.dumps(after))
    return small.normalizer, small.pre_tokenizer


def _unspaced(part: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the description of a part of a tokenizer without the space before a text."""
    kind = "" if part is None else part["type"]
    if part is None or (kind == "Prepend" and part["prepend"] == "▁"):
        return None
    if kind == "Sequence":
        name = "normalizers" if "normalizers" in part else "pretokenizers"
        return {**part, name: [own for own in map(_unspaced, part[name]) if own is not None]}
    return {**part, "prepend_scheme": "never"} if kind == "Metaspace" else part
