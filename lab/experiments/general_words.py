"""Make the product's list of general English words from WordNet's database files.

    python lab/experiments/general_words.py FOLDER      # of index.noun, data.noun, noun.exc, …: Debian's package wordnet-base

Writes `general_words.xz` beside the English reading. It holds four lines of words: general words, names, irregular forms with their
base, and pairs of antonyms. WordNet's licence lies beside it.
"""

import lzma
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_OUTPUT: Final = (
    Path(__file__).parents[2] / "src" / "kvweave" / "answer_cache" / "english" / "general_words.xz"
)
_PARTS: Final = {"noun": "n", "verb": "v", "adj": "as", "adv": "r"}
_MARKER: Final = re.compile(r"\(\w+\)$")  # of an adjective's place: "asleep(p)"


def general_words(folder: Path) -> str:
    """Return the four lines; raises OSError if a file of WordNet is missing."""
    sets = {(part, offset): words for part, offset, words, _ in _synsets(folder)}
    spelled = {word for words in sets.values() for word in words if word.isascii() and word.isalpha()}
    common = {word for word in spelled if word.islower()}
    names = {word.lower() for word in spelled} - common
    antonyms = set()
    for part, offset, words, pointers in _synsets(folder):
        del part, offset
        for other_part, other_offset, one, two in pointers:
            pair = words[one - 1].lower(), sets[other_part, other_offset][two - 1].lower()
            if all(word.isascii() and word.isalpha() for word in pair):
                antonyms.add(":".join(sorted(pair)))
    forms = {
        f"{form}:{base}"
        for part in _PARTS
        for form, base in (
            line.split()[:2] for line in (folder / f"{part}.exc").read_text("latin1").splitlines()
        )
        if form.isascii() and form.isalpha() and base.isalpha() and form != base
    }
    return "\n".join(" ".join(sorted(words)) for words in (common, names, forms, antonyms)) + "\n"


def _synsets(folder: Path) -> Iterator[tuple[str, str, list[str], list[tuple[str, str, int, int]]]]:
    """Yield each set of synonyms: part of speech, offset, words, and what its antonym pointers lead to."""
    named = {letter: part for part, letters in _PARTS.items() for letter in letters}
    for part in _PARTS:
        for line in (folder / f"data.{part}").read_text("latin1").splitlines():
            if line.startswith(" "):
                continue  # the licence
            fields = line.partition(" | ")[0].split()
            count = int(fields[3], 16)
            words = [_MARKER.sub("", word) for word in fields[4 : 4 + 2 * count : 2]]
            first = 4 + 2 * count
            pointers = [
                (named[kind], offset, int(ends[:2], 16), int(ends[2:], 16))
                for at in range(first + 1, first + 1 + 4 * int(fields[first]), 4)
                for symbol, offset, kind, ends in [fields[at : at + 4]]
                if symbol == "!"
            ]
            yield part, fields[0], words, pointers


if __name__ == "__main__":
    text = general_words(Path(sys.argv[1]))
    _OUTPUT.write_bytes(lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))
    print(_OUTPUT, _OUTPUT.stat().st_size, "bytes")
