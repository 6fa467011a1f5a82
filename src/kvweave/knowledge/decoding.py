"""Bytes to text, or the reason why they are not text.

Knows encodings, not file formats.
"""

import codecs
import re

from kvweave.errors import UnreadableDocument

_MARKED = (  # UTF-32 first: its little-endian mark begins with UTF-16's
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
    (codecs.BOM_UTF8, "utf-8-sig"),
)
_CONTROL = bytes(byte for byte in range(32) if byte not in b"\t\n\v\f\r\b\x1b\x1a")
_HIGH = bytes(range(128, 256))
MAX_CONTROL_SHARE = 0.01
MAX_HIGH_SHARE = 0.3
"""Western text in a one-byte encoding is mostly ASCII; more high bytes mean another script's encoding."""


def decode_text(data: bytes) -> str:
    """Decode as UTF-8, as UTF-16 or UTF-32 by their mark, or as Western one-byte text if it looks like it.

    Returns:
        The text with line ends as "\\n", without a byte order mark.

    Raises:
        UnreadableDocument: NUL bytes, too many control characters, or no encoding that fits.
    """
    for mark, encoding in _MARKED:
        if data.startswith(mark):
            return _unified(_decoded(data, encoding))
    if b"\0" in data:
        raise UnreadableDocument("binary file (it contains NUL bytes)")
    if _share(data, _CONTROL) > MAX_CONTROL_SHARE:
        raise UnreadableDocument("binary file (it is full of control characters)")
    try:
        return _unified(data.decode("utf-8"))
    except UnicodeDecodeError:
        return _unified(_western(data))


def without_surrogates(text: str) -> str:
    """`text` with lone surrogates and NULs, which no tokenizer or database takes, as U+FFFD."""
    return re.sub("[\ud800-\udfff\0]", "\ufffd", text)


def _decoded(data: bytes, encoding: str) -> str:
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as error:
        raise UnreadableDocument(f"damaged text: it starts like {encoding}, but {error.reason}") from error


def _western(data: bytes) -> str:
    if _share(data, _HIGH) > MAX_HIGH_SHARE:
        raise UnreadableDocument("neither UTF-8 nor Western text; save it as UTF-8")
    try:
        return data.decode("cp1252")  # Latin-1 with the quotes and dashes that real files have
    except UnicodeDecodeError:
        return data.decode("latin-1")


def _unified(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _share(data: bytes, members: bytes) -> float:
    return 1 - len(data.translate(None, members)) / len(data) if data else 0.0
