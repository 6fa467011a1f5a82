"""Token ids of text from outside: whatever it says, it never becomes a control token.

A file may contain `<|im_end|>` or `<bos>` literally; inside a prompt, the control token of that name would
end the user's turn or start another. Here such text stays ordinary text. Knows nothing about prompts.
"""

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from tokenizers import Tokenizer

MARKER_SIGNS = frozenset("<>[]{}|")


class PlainTokenizer:
    """Tokenizes text without adding or recognising control tokens.

    Control tokens are the tokenizer's special tokens and every other added token that looks like a marker
    (some families list `<|user|>` or `<think>` as ordinary added tokens). Added runs of white space and
    added words keep their ids. The wrapped tokenizer is left as it is.

    Args:
        tokenizer: a transformers tokenizer, with or without a fast backend.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._backend: Tokenizer | None = None
        self._within_reach: frozenset[int] = frozenset()
        if isinstance(backend, Tokenizer):
            self._backend, self._within_reach = _without_control(backend)

    def ids(self, text: str) -> tuple[int, ...]:
        """The ids of `text` on its own; nothing is added before or after it."""
        if self._backend is None:
            given = self._tokenizer(text, add_special_tokens=False, split_special_tokens=True, verbose=False)
            return tuple(given["input_ids"])
        pieces = self._pieces(text, 0)
        return tuple(token for piece, _ in pieces for token in piece.ids if token not in self._within_reach)

    def offsets(self, text: str) -> tuple[tuple[int, int], ...] | None:
        """The first character of each of `ids(text)` and the one after its last; None if the tokenizer cannot tell."""
        if self._backend is None:
            return None
        return tuple(
            (behind + start, behind + end)
            for piece, behind in self._pieces(text, 0)
            for token, (start, end) in zip(piece.ids, piece.offsets, strict=True)
            if token not in self._within_reach
        )

    def text(self, ids: Sequence[int]) -> str:
        """What ids stand for, control tokens spelled out."""
        return str(
            self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        )

    def count(self, text: str) -> int:
        """How many ids `text` has."""
        return len(self.ids(text))

    def _pieces(self, text: str, behind: int) -> list[tuple[Any, int]]:
        """Encodings that make up a text, each with the number of characters before it.

        A marker that the vocabulary itself holds is broken after its first character; one of a single character
        cannot be, and stands in the encoding still: it is to be left out.
        """
        assert self._backend is not None
        encoding = self._backend.encode(text, add_special_tokens=False)
        whole = [(encoding, behind)]
        if self._within_reach.isdisjoint(encoding.ids):
            return whole
        cuts = {0, len(text)}
        dropped = 0
        for token, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if token in self._within_reach:
                cuts.add(start + 1)
                dropped += end - start < 2
        if dropped or len(cuts) == 2:
            return whole
        cut = pairwise(sorted(cuts))
        return [piece for start, end in cut for piece in self._pieces(text[start:end], behind + start)]


def _without_control(backend: Tokenizer) -> tuple[Tokenizer, frozenset[int]]:
    """A copy that splits control tokens, and the control ids its vocabulary could still produce."""
    description = json.loads(backend.to_str())
    description["truncation"] = description["padding"] = None
    control = [token for token in description["added_tokens"] if _is_control(token)]
    for token in control:
        token["special"] = True  # what encode_special_tokens then takes as plain text
    for token in description["added_tokens"]:
        token["special"] = token in control
    plain = Tokenizer.from_str(json.dumps(description))
    plain.encode_special_tokens = True
    vocabulary = plain.get_vocab(with_added_tokens=False)
    model = description["model"]  # Unigram names its unknown token by id, the others by text
    unknown = model.get(
        "unk_token", plain.id_to_token(model["unk_id"]) if model.get("unk_id") is not None else None
    )
    reach = {
        token["id"] for token in control if token["content"] in vocabulary and token["content"] != unknown
    }
    return plain, frozenset(reach)


def _is_control(token: dict[str, Any]) -> bool:
    content: str = token["content"]
    if not content.strip():
        return False
    return bool(token["special"]) or not MARKER_SIGNS.isdisjoint(content)
