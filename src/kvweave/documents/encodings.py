"""Decodes text files, and notes whether the encoding is uncertain.

The evidence is, in this order: a byte order mark; NUL bytes, which UTF-16 and UTF-32 have; the share of well-formed UTF-8 among the
high bytes; a declaration in the file; the guess of chardetng, the detector of Firefox.
"""

import codecs
import re
import unicodedata
from collections import Counter
from contextlib import suppress
from typing import Final, NamedTuple

from kvweave.errors import UnreadableDocument

_BYTE_ORDER_MARKS: Final = (  # UTF-32 first: its little-endian mark starts with UTF-16's
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
    (codecs.BOM_UTF8, "utf-8-sig"),
)
_CONTROL: Final = bytes(byte for byte in range(32) if byte not in b"\t\n\v\f\r\b\x1b\x1a")
_HIGH: Final = bytes(range(128, 256))
_MAX_CONTROL_SHARE: Final = 0.01
_MIN_UTF8_SHARE: Final = 0.7
"""Text in another encoding has hardly any well-formed UTF-8, since the right bytes seldom follow its letters."""

_MAX_UNKNOWN_SHARE: Final = 0.3
"""A text in an unknown encoding with more high bytes than this is useless without them."""

_SAMPLE_BYTES: Final = 1 << 16
_MAX_GUESS_BYTES: Final = 1 << 20
_READ_AS: Final = {
    "iso8859-1": "cp1252",
    "iso8859-9": "cp1254",
    "iso8859-11": "cp874",
    "tis-620": "cp874",
    "euc_kr": "cp949",
    "windows-949": "cp949",
    "gb2312": "gb18030",
    "gbk": "gb18030",
    "x-gbk": "gb18030",
    "shift_jis": "cp932",
    "x-sjis": "cp932",
    "big5": "big5hkscs",
    "iso-8859-8-i": "iso8859-8",
}
"""For a declared encoding, the larger one that browsers and mail programs read it as (WHATWG's Encoding Standard).

Some of the names are unknown to Python.
"""

_NO_CHARSETS: Final = frozenset({"idna", "punycode", "raw-unicode-escape", "undefined", "unicode-escape"})
"""Python's codecs for other things than files; punycode's time is quadratic, and some raise a plain UnicodeError."""

_KEEP: Final = "kvweave.keep"
_DECLARED: Final = re.compile(
    rb"""(?:charset\s*=\s*|encoding\s*=\s*|coding[:=]\s*)["']?([A-Za-z0-9_.:-]{2,40})"""
)
_TO_JAPANESE: Final = re.compile(rb"\x1b\$[@B]")
_EAST_ASIAN_MARKS: Final = frozenset(
    {(0x30, 0x01), (0x30, 0x02), (0xFF, 0x0C), *((0, each) for each in b" \n,")}
)
"""High and low bytes of the characters that end a Chinese or Japanese sentence or line."""

_MIN_HIGH_BYTES: Final = 10
_QUOTES_AND_DASHES: Final = "‘’“”–—…•".encode("cp1252")
_WITHIN_OR_LEADING: Final = re.compile(rb"[0-9A-Za-z][\x80-\x91\x93-\x9f]+[0-9A-Za-z]|[\x80-\x9f][{|}\[\]\\]")
"""Such a byte within a word is a letter in another encoding; before these signs it may start a Japanese character."""


class Decoded(NamedTuple):
    """A file's text, with line ends as "\\n" and without a byte order mark; `note` says what is uncertain, or is empty."""

    text: str
    note: str = ""

    @property
    def notes(self) -> tuple[str, ...]:
        """The note, if there is one."""
        return (self.note,) if self.note else ()


def decode(data: bytes) -> Decoded:
    """Decode a text file; raises UnreadableDocument for binary files and unknown encodings."""
    found = _decoded(data)
    return Decoded(found.text.replace("\r\n", "\n").replace("\r", "\n"), found.note)


def _decoded(data: bytes) -> Decoded:
    for mark, encoding in _BYTE_ORDER_MARKS:
        if data.startswith(mark):
            return _decode_marked(data, encoding)
    if b"\0" in data:
        return _decode_unmarked_wide(data) or _with_stray_nuls(data)
    if _share(data, _CONTROL) > _MAX_CONTROL_SHARE:
        raise UnreadableDocument("binary file (it is full of control characters)")
    try:
        return Decoded(_escaped_japanese(data) or data.decode("utf-8"))
    except UnicodeDecodeError:
        return _damaged_utf8(data) or _declared(data) or _guessed(data)


def _decode_marked(data: bytes, encoding: str) -> Decoded:
    """Decode in the encoding of the byte order mark; accept a few damaged places."""
    try:
        return Decoded(data.decode(encoding))
    except UnicodeDecodeError as error:
        text, name = data.decode(encoding, "replace"), encoding.removesuffix("-sig").upper()
        damaged = text.count("\ufffd")
        most = 1 - _MIN_UTF8_SHARE if encoding == "utf-8-sig" else _MAX_CONTROL_SHARE
        if damaged > max(1, most * len(text)) or damaged == len(text):
            raise UnreadableDocument(
                f"damaged text: it starts like {name}, but {damaged:,} of {len(text):,} characters are none"
            ) from error
        return Decoded(text, _damage(name, damaged))


# UTF-16 and UTF-32 without a mark


def _decode_unmarked_wide(data: bytes) -> Decoded | None:
    """Return the text in UTF-16 or UTF-32, or None for other bytes; raises UnreadableDocument for damaged UTF-16."""
    likely = [each for each in ("utf-16-le", "utf-16-be") if _looks_wide(data, each)]
    for encoding in (
        "utf-32-le",
        "utf-32-be",
        *likely,
    ):  # few numbers are characters, so UTF-32 is hardly ever a mistake
        with suppress(UnicodeDecodeError):
            if _is_printable(text := data.decode(encoding)):
                return Decoded(text)
    if likely:
        raise UnreadableDocument("it looks like damaged UTF-16 without a byte order mark; save it as UTF-8")
    return None


def _with_stray_nuls(data: bytes) -> Decoded:
    """Return a text in UTF-8 with U+FFFD for a few NUL bytes, which a program or a crash may leave."""
    nuls = data.count(0)
    if nuls <= _MAX_CONTROL_SHARE * len(data) and _share(data, _CONTROL) <= _MAX_CONTROL_SHARE:
        with suppress(UnicodeDecodeError):
            return Decoded(data.decode("utf-8").replace("\0", "\ufffd"), _damage("UTF-8", nuls))
    raise UnreadableDocument("binary file (it contains NUL bytes)")


def _is_printable(text: str) -> bool:
    """Return whether the beginning of a text has hardly any control characters and unassigned code points."""
    beginning = text[:_SAMPLE_BYTES]
    kinds = (unicodedata.category(each) for each in beginning if each not in "\t\n\r\f")
    odd = sum(kind in ("Cc", "Cn", "Co") for kind in kinds)
    return odd <= _MAX_CONTROL_SHARE * len(beginning)


def _looks_wide(data: bytes, encoding: str) -> bool:
    """Return whether the 16-bit units are likely a text: the high bytes are those of one alphabet, or of Chinese.

    In UTF-16, spaces, line ends and digits have NUL as high byte. Hardly any character has NUL as low byte.
    """
    pairs = data[: len(data) // 2 * 2][:_SAMPLE_BYTES]
    low, high = (pairs[0::2], pairs[1::2]) if encoding == "utf-16-le" else (pairs[1::2], pairs[0::2])
    units = len(high)
    counted = Counter(zip(high, low, strict=True))
    ones = counted[0x4E, 0]  # 一, "one", which Chinese is full of
    if not units or low.count(0) - ones > max(2, units // 100):
        return False
    counts = Counter(high)
    zero = counts.pop(0, 0)
    alphabet, letters = counts.most_common(1)[0] if counts else (0, 0)
    if zero + letters >= 0.9 * units and (zero >= 0.4 * units or (alphabet < 0x20 and zero >= 0.05 * units)):
        return True
    east_asian = sum(counts[byte] for byte in (*range(0x4E, 0xA0), 0x30, 0xFF))
    return east_asian + zero >= 0.95 * units and not _EAST_ASIAN_MARKS.isdisjoint(counted)


# UTF-8 with a few damaged bytes


def _damaged_utf8(data: bytes) -> Decoded | None:
    """Return the text with U+FFFD for each damaged place, or None if too few high bytes are well-formed UTF-8."""
    text = data.decode("utf-8", "replace")
    well_formed = len(data.decode("utf-8", "ignore").encode().translate(None, bytes(range(128))))
    high = len(data) - len(data.translate(None, _HIGH))
    if well_formed < _MIN_UTF8_SHARE * high:
        return None
    return Decoded(text, _damage("UTF-8", text.count("\ufffd") - data.count("\ufffd".encode())))


def _damage(encoding: str, places: int) -> str:
    return f"damaged {encoding}: {_counted(places, 'place')} shown as U+FFFD"


# Other encodings


def _escaped_japanese(data: bytes) -> str:
    """Return a text in ISO-2022-JP, which is ASCII with escape sequences; empty for other encodings."""
    if _TO_JAPANESE.search(data):
        with suppress(UnicodeDecodeError):
            return data.decode("iso2022_jp_2")
    return ""


def codec_of(label: str) -> str:
    """Return Python's codec for a declared encoding, as browsers read it; raises LookupError for an unknown encoding."""
    label = label.strip().lower()
    try:
        name = codecs.lookup(_READ_AS.get(label, label)).name
    except ValueError as error:  # a NUL in the name
        raise LookupError(f"unknown encoding: {label!r}") from error
    if name in _NO_CHARSETS:
        raise LookupError(f"{name} is no encoding of files")
    return _READ_AS.get(name, name)


def decode_as(data: bytes, label: str) -> str:
    """Decode in a declared encoding; raises LookupError if it is unknown, UnicodeDecodeError if the bytes do not fit it."""
    codec = codec_of(label)
    return data.decode(codec, _KEEP if codec == "cp1252" else "strict")


def _kept(error: UnicodeError) -> tuple[str, int]:
    """Return the control characters for the five bytes that Windows-1252 lacks, as browsers do."""
    assert isinstance(error, UnicodeDecodeError)
    return error.object[error.start : error.end].decode("latin_1"), error.end


codecs.register_error(_KEEP, _kept)


def _declared(data: bytes) -> Decoded | None:
    """Decode in the encoding that an HTML, XML or source file declares at its beginning; None if it declares none."""
    for name in _DECLARED.findall(data[:2048]):
        with suppress(LookupError, UnicodeDecodeError):
            label = name.decode("ascii")
            if not codec_of(label).startswith(("utf-8", "ascii", "utf-16", "utf-32")):
                return Decoded(decode_as(data, label))
    return None


def _guessed(data: bytes) -> Decoded:
    """Decode in the most likely encoding; add a note unless it is Windows-1252 on good evidence."""
    only_marks = not data.translate(None, bytes(range(128)) + _QUOTES_AND_DASHES)
    if only_marks and not _WITHIN_OR_LEADING.search(data):
        return Decoded(data.decode("cp1252"))  # these are the same in every Windows-125x
    label, is_certain = _likeliest(data)
    note = "" if is_certain else f"encoding uncertain: read as {label}"
    with suppress(UnicodeDecodeError):
        return Decoded(data.decode(codec_of(label)), note)
    if _share(data, _HIGH) > _MAX_UNKNOWN_SHARE:
        raise UnreadableDocument(
            "its encoding is uncertain (neither UTF-8 nor another that fits); save it as UTF-8"
        )
    if label == "Windows-1252":
        return Decoded(decode_as(data, label), note or f"encoding uncertain: read as {label}")
    text = data.decode("utf-8", "replace")
    unknown = _counted(text.count("\ufffd"), "place")
    return Decoded(text, f"encoding uncertain: {unknown} shown as U+FFFD; save it as UTF-8")


def _likeliest(data: bytes) -> tuple[str, bool]:
    """Return the encoding that Firefox's detector names for the lines with high bytes, and whether it is certain."""
    from chardetng_py import EncodingDetector  # most files are UTF-8 and do not need it

    sample = b"".join(line for line in data.splitlines(keepends=True) if not line.isascii())[
        :_MAX_GUESS_BYTES
    ]
    detector = EncodingDetector()
    detector.feed(sample, last=True)
    name, fits = detector.guess_assess(tld=None, allow_utf8=False)
    return name.replace("windows", "Windows"), fits and name == "windows-1252" and _is_western(sample)


def _is_western(sample: bytes) -> bool:
    """Return whether a text has enough bytes of Windows-1252's letters to tell it from damage and from encodings of DOS."""
    high = sample.translate(None, bytes(range(128)) + _QUOTES_AND_DASHES)
    letters = high.translate(None, bytes(range(0xC0)))
    enough = len(high) >= _MIN_HIGH_BYTES and len(letters) >= len(high) / 2
    return enough and b"\xff" not in high and not _WITHIN_OR_LEADING.search(sample)


def _share(data: bytes, members: bytes) -> float:
    return 1 - len(data.translate(None, members)) / len(data) if data else 0.0


def _counted(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"
