"""Make the product's lists of English words from WordNet's database files.

    python lab/experiments/general_words.py FOLDER      # of index.noun, data.noun, noun.exc, …: Debian's package wordnet-base

Writes `general_words.xz`, six lines of words: general words, names, irregular forms with their base, pairs of antonyms, frequent words
that are names too, and words that texts have often. WordNet's licence lies beside it.
"""

import lzma
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_OUTPUT: Final = Path(__file__).parents[2] / "src" / "kvweave" / "answer_cache"
_PARTS: Final = {"noun": "n", "verb": "v", "adj": "as", "adv": "r"}
_KINDS: Final = "nvars"
"""Parts of speech in the order of their numbers in the keys of meanings."""
_MARKER: Final = re.compile(r"\(\w+\)$")  # of an adjective's place: "asleep(p)"
_ANTONYM = "!"
_OFTEN: Final = 3
"""How often WordNet's tagged texts have a word that they have often."""


def general_words(folder: Path) -> str:
    """Return the six lines; raises OSError if a file of WordNet is missing."""
    sets = {(part, offset): words for part, offset, words, _ in _synsets(folder)}
    spelled = {word for words in sets.values() for word in words if word.isascii() and word.isalpha()}
    common = {word for word in spelled if word.islower()}
    names = {word.lower() for word in spelled} - common
    antonyms = set()
    for _, _, words, pointers in _synsets(folder):
        for symbol, other_part, other_offset, one, two in pointers:
            pair = words[one - 1].lower(), sets[other_part, other_offset][two - 1].lower()
            if symbol == _ANTONYM and all(word.isascii() and word.isalpha() for word in pair):
                antonyms.add(":".join(sorted(pair)))
    forms = {
        f"{form}:{base}"
        for part in _PARTS
        for form, base in (
            line.split()[:2] for line in (folder / f"{part}.exc").read_text("latin1").splitlines()
        )
        if form.isascii() and form.isalpha() and base.isalpha() and form != base
    }
    return (
        "\n".join(
            " ".join(sorted(words))
            for words in (common, names, forms, antonyms, _homographs(folder), _often(folder))
        )
        + "\n"
    )


def _is_plain(word: str) -> bool:
    return word.isascii() and word.isalpha() and word.islower()


def _often(folder: Path) -> set[str]:
    """Return the words that WordNet's tagged texts have often."""
    uses: Counter[str] = Counter()
    for line in (folder / "cntlist.rev").read_text("latin1").splitlines():
        key, _, count = line.split()
        uses[key.partition("%")[0]] += int(count)
    return {word for word, count in uses.items() if count >= _OFTEN and _is_plain(word)}


def _homographs(folder: Path) -> set[str]:
    """Return the words that texts often have in small letters, and that mean something else with a capital."""
    tagged: Counter[str] = Counter()
    for line in (folder / "cntlist.rev").read_text("latin1").splitlines():
        key, _, count = line.split()
        tagged[":".join(key.split(":")[:3])] += int(count)
    uses: Counter[str] = Counter()
    for part in _PARTS:
        for line in (folder / f"data.{part}").read_text("latin1").splitlines():
            if line.startswith(" "):
                continue  # the licence
            fields = line.partition(" | ")[0].split()
            end = 4 + 2 * int(fields[3], 16)
            for word, sense in zip(fields[4:end:2], fields[5:end:2], strict=True):
                plain = _MARKER.sub("", word)
                key = f"{plain.lower()}%{_KINDS.index(fields[2]) + 1}:{fields[1]}:{int(sense, 16):02}"
                uses[plain] += tagged[key]
    named = {word.lower() for word in uses if word[0].isupper() and not word.isupper()}
    return {word for word in named if word.isascii() and word.isalpha() and uses[word] >= _OFTEN}


def _synsets(folder: Path) -> Iterator[tuple[str, str, list[str], list[tuple[str, str, str, int, int]]]]:
    """Yield each set of synonyms: part of speech, offset, words, and what its pointers lead to.

    A pointer is its symbol, part of speech and offset of the other set, and the places of the two words, 0 for all.
    """
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
                (symbol, named[kind], offset, int(ends[:2], 16), int(ends[2:], 16))
                for at in range(first + 1, first + 1 + 4 * int(fields[first]), 4)
                for symbol, offset, kind, ends in [fields[at : at + 4]]
            ]
            yield part, fields[0], words, pointers


if __name__ == "__main__":
    output = _OUTPUT / "general_words.xz"
    text = general_words(Path(sys.argv[1]))
    output.write_bytes(lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))
    print(output, output.stat().st_size, "bytes")
