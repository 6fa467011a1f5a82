"""Decodes text files, and notes whether the encoding is uncertain.

The evidence is, in this order: a byte order mark; NUL bytes, which UTF-16 and UTF-32 have; the share of well-formed UTF-8 among the
high bytes; a declaration in the file; the candidates of charset-normalizer, of which the one with the most plausible words is used.
"""

import codecs
import itertools
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator
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
_IN_USE: Final = (
    *(
        "cp1252",
        "latin_1",
        "cp1251",
        "cp1250",
        "cp1253",
        "cp1254",
        "cp1255",
        "cp1256",
        "cp1257",
        "cp1258",
        "koi8_r",
        "cp874",
    ),
    *("cp932", "euc_jp", "euc_kr", "big5", "gb18030"),
)
"""Encodings in use today, the most likely first. Old ones of DOS and Macintosh would cause more wrong guesses than right ones."""

_NAMES: Final = {"cp932": "Shift-JIS", "cp874": "Windows-874", "latin_1": "ISO 8859-1"}
_DECLARED: Final = re.compile(
    rb"""(?:charset\s*=\s*|encoding\s*=\s*|coding[:=]\s*)["']?([A-Za-z0-9_.:-]{2,40})"""
)
_TO_JAPANESE: Final = re.compile(rb"\x1b\$[@B]")
_EAST_ASIAN_MARKS: Final = frozenset(
    {(0x30, 0x01), (0x30, 0x02), (0xFF, 0x0C), *((0, each) for each in b" \n,")}
)
"""High and low bytes of the characters that end a Chinese or Japanese sentence or line."""

_WITHIN_WORDS: Final = frozenset("’‘·–—\u00ad\u200c\u200d")
_MIN_PLAUSIBLE: Final = 0.8
_MIN_HIGH_BYTES: Final = 5
_QUOTES_AND_DASHES: Final = "‘’“”–—…•".encode("cp1252")
_WITHIN_OR_LEADING: Final = re.compile(rb"[0-9A-Za-z][\x80-\x91\x93-\x9f]+[0-9A-Za-z]|[\x80-\x9f][{|}\[\]\\]")
"""Such a byte within a word is a letter in another encoding; before these signs it may start a Japanese character."""

_MIN_COHERENCE: Final = 0.3
"""The least coherence, 0..1: charset-normalizer's measure of how well the frequencies of letters fit a language."""


class Decoded(NamedTuple):
    """A file's text, with line ends as "\\n" and without a byte order mark; `note` says what is uncertain, or is empty."""

    text: str
    note: str = ""


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
        try:
            text = data.decode(encoding)
        except UnicodeDecodeError:
            continue
        if _is_printable(text):
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
    odd = sum(
        1 for each in beginning if each not in "\t\n\r\f" and unicodedata.category(each) in ("Cc", "Cn", "Co")
    )
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


def _declared(data: bytes) -> Decoded | None:
    """Decode in the encoding that an HTML, XML or source file declares at its beginning; None if it declares none."""
    for name in _DECLARED.findall(data[:2048]):
        try:
            encoding = codecs.lookup(name.decode("ascii")).name
            if encoding not in ("utf-8", "ascii") and not encoding.startswith(("utf-16", "utf-32")):
                return Decoded(data.decode(encoding))
        except (LookupError, UnicodeDecodeError):
            continue
    return None


def _guessed(data: bytes) -> Decoded:
    """Decode in the most likely encoding; add a note unless two kinds of evidence agree."""
    only_marks = not data.translate(None, bytes(range(128)) + _QUOTES_AND_DASHES)
    if only_marks and not _WITHIN_OR_LEADING.search(data):
        return Decoded(data.decode("cp1252"))  # these are the same in every Windows-125x
    for encoding, certain in _ranked(_sample(data)):
        try:
            text = data.decode(encoding)
        except UnicodeDecodeError:
            continue
        return Decoded(text, "" if certain else f"encoding uncertain: read as {_named(encoding)}")
    if _share(data, _HIGH) > _MAX_UNKNOWN_SHARE:
        raise UnreadableDocument(
            "its encoding is uncertain (neither UTF-8 nor another that fits); save it as UTF-8"
        )
    text = data.decode("utf-8", "replace")
    unknown = _counted(text.count("\ufffd"), "place")
    return Decoded(text, f"encoding uncertain: {unknown} shown as U+FFFD; save it as UTF-8")


def _ranked(sample: bytes) -> Iterator[tuple[str, bool]]:
    """Yield plausible encodings, the most likely first, each with whether it is certain."""
    from charset_normalizer import from_bytes  # most files are UTF-8 and do not need it

    found = from_bytes(sample, cp_isolation=list(_IN_USE))
    coherence = {match.encoding: match.coherence for match in found}
    scores = {}
    for rank, encoding in enumerate(_IN_USE):
        try:
            plausible = _plausibility(sample.decode(encoding), encoding)
        except UnicodeDecodeError:
            continue
        if plausible >= _MIN_PLAUSIBLE:
            scores[encoding] = (round(plausible, 1), round(coherence.get(encoding, 0.0), 2), -rank)
    highest = max((score[1] for score in scores.values()), default=0.0)
    for encoding in sorted(scores, key=lambda each: scores[each], reverse=True):
        agreed = encoding == "cp1252" and scores[encoding][1] >= max(highest, _MIN_COHERENCE)
        yield encoding, agreed and _is_evidence(sample)


def _is_evidence(sample: bytes) -> bool:
    """Return whether a text has enough high bytes to tell Windows-1252 from damage."""
    high = sample.translate(None, bytes(range(128)))
    return len(high) >= _MIN_HIGH_BYTES and b"\xff" not in high


def _sample(data: bytes) -> bytes:
    """Return the lines that have high bytes, up to _SAMPLE_BYTES."""
    lines: list[bytes] = []
    room = _SAMPLE_BYTES
    for line in data.splitlines(keepends=True):
        if not line.isascii():
            lines.append(line[:room])
            room -= len(lines[-1])
        if room <= 0:
            break
    return b"".join(lines)


def _plausibility(text: str, encoding: str) -> float:
    """Return the share, 0..1, of words that look like words of a language, among those that are not ASCII."""
    words = [word for word in text.split() if not word.isascii()]
    if not words:
        return 0.0
    scripts = Counter(script for word in words for script in map(_script, word) if script)
    unspaced = sum(scripts[each] for each in ("CJK", "HIRAGANA", "KATAKANA", "HANGUL"))
    if encoding in ("gb18030", "big5", "cp932", "euc_jp", "euc_kr"):
        return _east_asian_plausibility(scripts, unspaced, encoding)
    return sum(map(_is_word, words)) / len(words)


def _east_asian_plausibility(scripts: Counter[str], unspaced: int, encoding: str) -> float:
    """Judge by scripts: Japanese has kana, Korean hardly any Chinese characters, Chinese neither kana nor Hangul."""
    everything = scripts.total() - scripts["LATIN"]
    kana, hangul = scripts["HIRAGANA"] + scripts["KATAKANA"], scripts["HANGUL"]
    if not everything:
        return 0.0
    if encoding in ("cp932", "euc_jp"):
        fits = kana >= unspaced / 5
    elif encoding == "euc_kr":
        fits = hangul >= unspaced * 0.8
    else:
        fits = not kana and not hangul
    return unspaced / everything if fits else 0.0


def _is_word(word: str) -> bool:
    """Return whether a word has letters of one script, no signs among them, and no capital after a small letter."""
    word = _without_signs_around(word)
    if not word:
        return True
    if any(not each.isascii() and not _belongs(each) for each in word):
        return False
    letters = [each for each in word if each.isalpha()]
    scripts = {_script(each) or "LATIN" for each in letters}
    foreign = [each for each in letters if not each.isascii()]
    if len(scripts) > 1 or (scripts == {"LATIN"} and len(foreign) == len(letters) > 2):
        return False  # no language writes a whole word in accented letters
    inner = "".join(letters)
    return not any(a.islower() and b.isupper() for a, b in itertools.pairwise(inner))


def _belongs(character: str) -> bool:
    return (
        character.isalpha() or character in _WITHIN_WORDS or unicodedata.category(character).startswith("M")
    )


def _without_signs_around(word: str) -> str:
    kept = [n for n, each in enumerate(word) if each.isalnum() and unicodedata.category(each) != "No"]
    return word[kept[0] : kept[-1] + 1] if kept else ""


def _script(character: str) -> str:
    """Return the script of a letter, the first word of its Unicode name; empty for ASCII and other characters."""
    if character.isascii() or not character.isalpha():
        return ""
    first = unicodedata.name(character, "UNKNOWN").partition(" ")[0]
    return "LATIN" if first in ("FEMININE", "MASCULINE", "MICRO") else first


def _named(encoding: str) -> str:
    return _NAMES.get(
        encoding,
        encoding.replace("cp125", "Windows-125").replace("_", "-").upper().replace("WINDOWS", "Windows"),
    )


def _share(data: bytes, members: bytes) -> float:
    return 1 - len(data.translate(None, members)) / len(data) if data else 0.0


def _counted(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"
