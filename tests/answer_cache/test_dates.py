"""Numbers, dates and times have one standard form, however they are written."""

import pytest

from kvweave.answer_cache.english.dates import fold_dates
from kvweave.answer_cache.english.normalize import clean_text
from kvweave.answer_cache.english.words import split_words


def folded(text):
    return [word.base for word in fold_dates(split_words(clean_text(text)))]


@pytest.mark.parametrize(
    ("written", "number"),
    [
        ("7", 7),
        ("seven", 7),
        ("twenty-five", 25),
        ("twenty five", 25),
        ("one hundred and five", 105),
        ("a hundred", 100),
        ("two thousand three hundred", 2300),
        ("three million", 3_000_000),
        ("two dozen", 24),
        ("1,250", 1250),
        ("0012", 12),
        ("1.250.000", 1_250_000),
        ("1.250,5", "1250.5"),
        ("1,250.5", "1250.5"),
    ],
)
def test_numbers(written, number):
    assert folded(f"there are {written} sheep")[2] == f"#{number}"


def test_fractions_keep_their_point():
    assert folded("it weighs 2.5 kg")[2] == "#2.5"
    assert folded("it weighs 2.50 kg")[2] != "#25"
    assert folded("it weighs 1.500 kg")[2] not in ("#1500", folded("it weighs 15.00 kg")[2])


def test_ordinals_are_not_numbers():
    assert folded("the third floor")[1] == folded("the 3rd floor")[1] != folded("the three floor")[1]
    assert folded("the twenty-first floor")[1] == folded("the 21st floor")[1] == "#21th"


def test_one_as_a_pronoun_is_no_number():
    assert "one" in folded("which one is it")
    assert "#1" in folded("who has one sheep")


@pytest.mark.parametrize("written", ["3 May", "May 3", "May 3rd", "3rd May", "the 3rd of May", "3 may"])
def test_dates_without_a_year(written):
    assert "@date:-05-03" in folded(f"who came on {written}")


@pytest.mark.parametrize(
    "written", ["3 May 2026", "May 3, 2026", "the 3rd of May, 2026", "2026-05-03", "3.5.2026", "03.05.2026"]
)
def test_dates_with_a_year(written):
    assert folded(f"who came on {written}")[-1] == "@date:2026-05-03"


def test_an_ambiguous_date_is_unchanged():
    assert folded("who came on 3/5/2026")[-1] == "3/5/2026"


def test_months_and_weekdays_need_a_capital_where_they_are_also_other_words():
    assert folded("who may march")[1:] == ["may", "march"]
    assert folded("who came in May")[-1] == "@date:-05-00"
    assert (
        folded("who came on Mondays")[-1] == folded("who came on monday")[-1] == folded("who came on Mon")[-1]
    )


@pytest.mark.parametrize("written", ["3 pm", "3pm", "3 p.m.", "15:00", "3:00 pm", "3 o'clock pm"])
def test_times_of_day(written):
    assert folded(f"who came at {written}")[-1] == "@15:00"


@pytest.mark.parametrize(
    ("written", "time"),
    [
        ("noon", "12:00"),
        ("midnight", "00:00"),
        ("12 am", "00:00"),
        ("half past three", "03:30"),
        ("quarter to four pm", "15:45"),
        ("ten past six", "06:10"),
        ("3:30", "03:30"),
    ],
)
def test_times_in_words(written, time):
    assert folded(f"who came at {written}")[-1] == f"@{time}"
