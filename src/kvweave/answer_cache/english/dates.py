"""Replaces each number, date and time of a question by one word in a standard form."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from kvweave.answer_cache.english.words import Word

_MONTHS: Final = (
    "january february march april may june july august september october november december".split()
)
_DAYS: Final = "monday tuesday wednesday thursday friday saturday sunday".split()
_SHORT_MONTHS: Final = {name[:3]: number for number, name in enumerate(_MONTHS, 1)} | {"sept": 9}
_SHORT_DAYS: Final = {
    **{name[:3]: number for number, name in enumerate(_DAYS, 1)},
    "tues": 2,
    "thur": 4,
    "thurs": 4,
}
_AMBIGUOUS: Final = frozenset("may march sun sat mon wed mar".split())
"""Other words when written without a capital."""

_BEFORE_YEARS: Final = frozenset("in during since until before after".split())
_UNITS: Final = {
    name: value
    for value, name in enumerate(
        "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen"
        " eighteen nineteen".split()
    )
}
_TENS: Final = {
    name: 10 * value
    for value, name in enumerate("twenty thirty forty fifty sixty seventy eighty ninety".split(), 2)
}
_SCALES: Final = {"hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9, "dozen": 12}
_ORDINALS: Final = {
    **{
        name: value
        for value, name in enumerate(
            "first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth thirteenth fourteenth"
            " fifteenth sixteenth seventeenth eighteenth nineteenth".split(),
            1,
        )
    },
    **{name[:-1] + "ieth": value for name, value in _TENS.items()},
    "hundredth": 100,
}
_MOST: Final = 10**100
"""Numbers in words end below this: "million million million …" is no number that a question means."""

_POINTS_BETWEEN_THOUSANDS: Final = re.compile(r"\d{1,3}(?:\.\d{3}){2,}(?:,\d+)?|\d{1,3}\.\d{3},\d+")
"""Not a single point: "1.500" may be one and a half, so it is no other number but itself."""

_NO_NUMBER: Final = frozenset(
    "which this that the each any no every another can could may might must shall should will would do does did".split()
)
"""After these "one" is not a number: which one, the one, can one, does one."""


def fold_dates(words: Sequence[Word]) -> list[Word]:
    """Return the words with every number, date and time as one: `#25`, `#3th`, `@date:2026-05-03`, `@day:1`, `@15:00`.

    A date that could be read in two ways, such as 3/5/2026, is unchanged.
    """
    folded = [_split_hyphens(word) for word in words]
    for find in (_number_at, _date_at, _time_at):
        folded = _replaced(folded, find)
    return folded


def is_date(base: str) -> bool:
    """Return whether a folded word is a date, a weekday, a month, a year or a time of day."""
    return base.startswith("@")


def _folded(base: str, first: Word) -> Word:
    """Return a word in standard form in place of those from `first` on."""
    return replace(first, text=base, base=base, form="", named=True)


def _replaced(words: Sequence[Word], find: Callable[[Sequence[Word], int], tuple[str, int]]) -> list[Word]:
    """Replace what `find` recognises: it returns the standard form of what starts at a word, and its length in words."""
    folded: list[Word] = []
    at = 0
    while at < len(words):
        base, used = find(words, at)
        folded.append(_folded(base, words[at]) if used else words[at])
        at += max(used, 1)
    return folded


def _split_hyphens(word: Word) -> Word:
    tens, _, unit = word.text.partition("-")
    if tens in _TENS and (unit in _UNITS or unit in _ORDINALS):
        if unit in _UNITS:
            return _folded(f"#{_TENS[tens] + _UNITS[unit]}", word)
        return _folded(_ordinal(_TENS[tens] + _ORDINALS[unit]), word)
    return word


def _ordinal(value: int) -> str:
    return f"#{value}th"


def _number_at(words: Sequence[Word], at: int) -> tuple[str, int]:
    """Return the number that starts at a word, and its length in words: 0 if none starts there."""
    text = words[at].text
    if match := re.fullmatch(r"(\d{1,18})(?:st|nd|rd|th)", text):
        return _ordinal(int(match[1])), 1
    if re.fullmatch(r"\d+(?:[.,]\d+)*", text) and not re.fullmatch(r"\d{1,2}[.]\d{1,2}[.]\d{2,4}", text):
        if _POINTS_BETWEEN_THOUSANDS.fullmatch(text):
            text = text.replace(".", "")
        plain = re.sub(r",(?=\d{3}(?:\D|$))", "", text).replace(",", ".")
        return f"#{plain.lstrip('0') or '0'}", 1
    if text in _ORDINALS:
        return _ordinal(_ORDINALS[text]), 1
    if text == "one" and at and words[at - 1].text in _NO_NUMBER:
        return "", 0
    return _spelled(words, at)


def _spelled(words: Sequence[Word], at: int) -> tuple[str, int]:
    """Return a number in words: twenty five, two hundred and ten, a dozen. "25 thousand" stays two numbers."""
    total = current = used = 0
    position = at
    if words[at].text == "a" and at + 1 < len(words) and words[at + 1].text in _SCALES:
        current, position = 1, at + 1
    while position < len(words):
        text = words[position].text
        following = words[position + 1].text if position + 1 < len(words) else ""
        if text in _UNITS or text in _TENS:
            if (current % 10 and text in _UNITS) or (current % 100 and text in _TENS):
                break
            current += _UNITS.get(text, 0) + _TENS.get(text, 0)
        elif text in _SCALES and current and total + current * _SCALES[text] < _MOST:
            current *= _SCALES[text]
            if _SCALES[text] >= 1000:
                total, current = total + current, 0
        elif text in _ORDINALS and _ORDINALS[text] < 10 and current and current % 10 == 0:
            return _ordinal(total + current + _ORDINALS[text]), position - at + 1
        elif not (text == "and" and used and following in (*_UNITS, *_TENS) and current % 100 == 0):
            break
        position += 1
        used = position - at
    return (f"#{total + current}", used) if used else ("", 0)


def _date_at(words: Sequence[Word], at: int) -> tuple[str, int]:
    text = words[at].text
    if match := re.fullmatch(r"(\d{4})-(\d{1,2})-(\d{1,2})", text):
        return _date(match[1], int(match[2]), int(match[3])), 1
    if match := re.fullmatch(r"(\d{1,2})\.(\d{1,2})\.(\d{4})", text):
        return _date(match[3], int(match[2]), int(match[1])), 1
    if day := _day_of_month(text):  # 3 May, the 3rd of May
        skip = at + 1 < len(words) and words[at + 1].text == "of"
        month = _month_at(words, at + 1 + skip, beside_number=True)
        if month:
            year = _year_at(words, at + 2 + skip)
            return _date(year, month, day), 2 + skip + bool(year)
        return "", 0
    day = _day_of_month(words[at + 1].text) if at + 1 < len(words) else 0
    month = _month_at(words, at, beside_number=bool(day))
    if month and day:  # May 3rd
        year = _year_at(words, at + 2)
        return _date(year, month, day), 2 + bool(year)
    if month:
        year = _year_at(words, at + 1)
        return _date(year, month, 0), 1 + bool(year)
    if at and words[at - 1].text in _BEFORE_YEARS and (year := _year_at(words, at)):
        return _date(year, 0, 0), 1
    weekday = _weekday(words[at])
    return (f"@day:{weekday}", 1) if weekday else ("", 0)


def _date(year: str, month: int, day: int) -> str:
    return f"@date:{year}-{month:02}-{day:02}"


def _day_of_month(text: str) -> int:
    match = re.fullmatch(r"#(\d{1,2})(?:th)?", text)
    return int(match[1]) if match and 1 <= int(match[1]) <= 31 else 0


def _month_at(words: Sequence[Word], at: int, *, beside_number: bool) -> int:
    if at >= len(words):
        return 0
    word = words[at]
    if word.text in _AMBIGUOUS and not (beside_number or word.named):
        return 0
    if word.text in _MONTHS:
        return _MONTHS.index(word.text) + 1
    return _SHORT_MONTHS.get(word.text, 0) if beside_number or word.named else 0


def _year_at(words: Sequence[Word], at: int) -> str:
    match = re.fullmatch(r"#((?:19|20)\d{2})", words[at].text) if at < len(words) else None
    return match[1] if match else ""


def _weekday(word: Word) -> int:
    single = word.text.removesuffix("s") if len(word.text) > 5 else word.text
    if single in _DAYS:
        return _DAYS.index(single) + 1
    return _SHORT_DAYS.get(word.text, 0) if word.named else 0


def _time_at(words: Sequence[Word], at: int) -> tuple[str, int]:
    minutes, used = _minutes_at(words, at)
    return f"@{minutes // 60 % 24:02}:{minutes % 60:02}", used


def _minutes_at(words: Sequence[Word], at: int) -> tuple[int, int]:
    """Return minutes since midnight of the time that starts at a word, and its length in words: 0 if none starts there."""
    texts = [word.text for word in words[at : at + 4]] + [""] * 4
    if texts[0] in ("noon", "midday", "midnight"):
        return (0 if texts[0] == "midnight" else 720), 1
    shifts = {"half": 30, "quarter": 15}
    step = shifts.get(texts[0], int(texts[0][1:]) if re.fullmatch(r"#[1-5]?\d", texts[0]) else 0)
    skip = texts[1] in ("minute", "minutes")
    hour = re.fullmatch(r"#(\d{1,2})", texts[2 + skip])
    if step and hour and texts[1 + skip] in ("past", "to") and int(hour[1]) < 24:
        minutes = int(hour[1]) * 60 + (step if texts[1 + skip] == "past" else -step)
        return _half_of_day(minutes, texts[3 + skip] if not skip else ""), 3 + skip + (
            texts[3 + skip] in ("am", "pm") and not skip
        )
    match = re.fullmatch(r"#?(\d{1,2})(?:[:.](\d{2}))?(?::\d{2})?", texts[0])
    if not match or int(match[1]) > 24:
        return 0, 0
    minutes = int(match[1]) * 60 + int(match[2] or 0)
    if texts[1] in ("am", "pm"):
        return _half_of_day(minutes, texts[1]), 2
    if texts[1] in ("o'clock", "oclock"):
        return _half_of_day(minutes, texts[2]), 2 + (texts[2] in ("am", "pm"))
    return (minutes, 1) if ":" in texts[0] else (0, 0)


def _half_of_day(minutes: int, half: str) -> int:
    """Return the minutes since midnight of a time followed by am, pm or neither."""
    if half == "pm" and minutes < 720:
        return minutes + 720
    return minutes - 720 if half == "am" and minutes >= 720 else minutes
