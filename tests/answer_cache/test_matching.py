"""What is certainly the same question, what is only near, and what is another one."""

import pytest

from kvweave.answer_cache.matching import ENGLISH, Comparison
from kvweave.answer_cache.spelling import edits, is_word
from kvweave.answer_cache.wordnet import general_words

BAKERY = "Which members of the bakery arrive before breakfast?"

TYPING_ERRORS = [
    (BAKERY, "Which mebmers of the bakery arrive before breakfast?"),
    (BAKERY, "which memebrs of the bakrey arrive before breakfats"),
    (BAKERY, "Which members of teh bakery arrive before brekfast"),
    ("When is the annual concert of the choir?", "When is the annual conecrt of teh choir?"),
]
NO_TYPING_ERRORS = [
    ("Which members of the bakery arrive?", "Which members of the bravery arrive?"),  # a word
    ("When does the plane leave?", "When does the plan leave?"),
    ("Who is Katrin?", "Who is Katrina?"),  # names
    ("who is katrin?", "who is katrina?"),
    ("Where is room B1234?", "Where is room B1243?"),
    ("Who has 25 keys?", "Who has 52 keys?"),
    ("Where is the lid?", "Where is the lxd?"),  # short
    ("Is the casing metalic?", "Is the casing unmetalic?"),
    ("Which members arrive?", "Which members arrive mebmers?"),
    ("Which car parks are monitored?", "Which car parks are unmonitored?"),
    ("Which parcels were delivered?", "Which parcels were undelivered?"),
    ("How do I subscribe?", "How do I unsubscribe?"),
    ("Is the list in ascending order?", "Is the list in decending order?"),
    ("What happens on Thursday?", "What happens on Thuesday?"),
    ("What happens on Tuesday?", "What happens on Thuesday?"),
    ("Who does the external audit?", "Who does the enternal audit?"),
    ("What happens on the thirtieth of May?", "What happens on the thirteeth of May?"),
    ("where does miller live", "where does millar live"),
    ("What are the rules of emigration?", "What are the rules of imigration?"),
    ("What are the rules of migration?", "What are the rules of imigration?"),
]
SLIPS = [
    ("How do we climb from the hut to the pass?", "how do we clmib form the hut to the psas"),
    ("What did we do before frying?", "What did we do befor frying?"),
    ("How many siskins came to the feeder in January?", "How many siksins came to teh feeder in Januray?"),
    ("How do we get to Craignure?", "How do we get to Criagnure?"),
    ("Where is the lid of the feed bin?", "Where is the ldi of the fede bin?"),
    ("Who will sing at the open-air stage?", "Who willl snig at the opne-air satge?"),
    ("What is the mast of the Seagull made of?", "What is the mast of the Seagul made of?"),
]
NO_SLIPS = [
    ("What does the child take?", "What dose the child take?"),
    ("Where is Ailsa?", "Where is Alisa?"),
    ("Where is Hassan's office?", "Where is Hasan's office?"),
    ("Who pays the eighth bill?", "Who pays the eigth bill?"),
    ("What does the carer do?", "What does the career do?"),
    ("Who trained the angel?", "Who trained the angle?"),
    ("Who looks after the barn?", "Who locks after the brn?"),
    ("When is the trial run?", "When is the trail run?"),
    ("How do we climb from the hut?", "How do we clmib to the hut?"),
    ("Which faults are repaired for nothing?", "Which faults aren't repaired for nothing?"),
]


@pytest.mark.parametrize(("stored", "asked"), TYPING_ERRORS)
def test_typing_errors_in_long_words_change_nothing(stored, asked):
    compared = ENGLISH.compare(asked, stored, 0.1, 0.85)
    assert (compared.sameness, compared.kind) == ("same", "spelling")
    assert compared.errors
    assert ENGLISH.same(stored, asked, 0.1, 0.85)


@pytest.mark.parametrize(("stored", "asked"), NO_TYPING_ERRORS)
def test_words_names_numbers_and_short_words_are_no_typing_errors(stored, asked):
    assert not ENGLISH.same(stored, asked, 1.0, 0.0)
    assert not ENGLISH.same(asked, stored, 1.0, 0.0)


@pytest.mark.parametrize(("stored", "asked"), SLIPS)
def test_slips_change_nothing_where_all_else_is_equal(stored, asked):
    for one, other in ((stored, asked), (asked, stored)):
        compared = ENGLISH.compare(one, other, 0.1, 0.85)
        assert (compared.sameness, compared.kind) == ("same", "spelling")
        assert compared.errors


@pytest.mark.parametrize(("stored", "asked"), NO_SLIPS)
def test_what_may_be_another_word_is_no_slip(stored, asked):
    assert not ENGLISH.same(stored, asked, 1.0, 0.0)
    assert not ENGLISH.same(asked, stored, 1.0, 0.0)


@pytest.mark.parametrize(
    ("one", "other", "count"),
    [("kept", "kpet", 1), ("arrive", "arive", 1), ("abc", "xyz", 3), ("a", "abcde", 3)],
)
def test_edits_are_counted_up_to_a_limit(one, other, count):
    assert edits(one, other, 2) == edits(other, one, 2) == count


def test_case_and_punctuation_never_matter():
    assert ENGLISH.same("who paid anna on 3 may", "Who paid Anna on 3 May?", 0.1, 0.99)
    assert not ENGLISH.same("is it > 5", "Is it < 5?", 1.0, 0.0)
    assert not ENGLISH.same("?", "...", 1.0, 0.0)


KEYWORDS = [
    ("Which goalkeeper has the larger pads?", "goalkeeper with larger pads"),
    ("How high is the temple rock?", "temple rock height"),
    ("What width does the lining fabric have?", "lining fabric width"),
    ("Who was president in the year of the jubilee?", "President in the jubilee year?"),
    ("How many millimetres of profile do the tyres have?", "tyre profile in mm"),
    ("How many chairs are in the hall?", "number of chairs in the hall"),
]
OTHER_KEYWORDS = [
    ("When was the temple rock found?", "temple rock found"),  # what is asked for is not said
    ("How many goalkeepers have larger pads?", "goalkeeper larger pads"),
    ("Which family moved into the flat?", "family moving in flat"),
    ("Does Anna pay Ben?", "Ben pay Anna"),
    ("Which goalkeeper has the larger pads?", "goalkeeper smaller pads"),
    ("Which goalkeeper has the larger pads?", "goalkeeper larger pads club"),
    ("Which goalkeeper has the larger pads?", "goalkeeper large pads"),
    ("Which path leads from the mill to the church?", "path from church to mill"),
    ("Which fish need warm water?", "fish need cold water"),
    ("Which row is louder than row two?", "row quieter than row two"),
]


@pytest.mark.parametrize(("stored", "asked"), KEYWORDS)
def test_keywords_that_hold_all_words_of_a_question_ask_the_same(stored, asked):
    for one, other in ((stored, asked), (asked, stored)):
        assert ENGLISH.compare(one, other, 0.8, 0.85) == Comparison("same", "keywords")


@pytest.mark.parametrize(("stored", "asked"), OTHER_KEYWORDS)
def test_keywords_that_may_ask_something_else_do_not(stored, asked):
    assert not ENGLISH.same(stored, asked, 1.0, 0.0)
    assert not ENGLISH.same(asked, stored, 1.0, 0.0)


def test_the_general_words_hold_words_forms_names_and_opposites():
    words = general_words()
    assert all(map(words.is_common, ("mason", "masons", "planned", "kept", "heaviest", "easily")))
    assert not any(map(is_word, ("msaon", "plannde", "xqzt")))
    assert is_word("london")
    assert not words.is_common("london")
    assert words.are_antonyms("rising", "falls")
    assert not words.are_antonyms("rising", "mason")


def test_capitals_do_not_matter_where_either_text_is_english():
    asked = "Meaning of dishwasher error E15?"
    assert ENGLISH.same(asked, asked.lower(), 0.99, 0.85)
    assert ENGLISH.same(asked.upper(), asked, 0.99, 0.85)
    assert not ENGLISH.same(asked, "meaning of dishwasher error e16?", 0.99, 0.85)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Do just members pay?", "Do members pay?"),
        ("What does just the boat cost?", "What does the boat cost?"),
    ],
)
def test_a_word_that_limits_the_question_is_no_filler(one, other):
    assert not ENGLISH.same(one, other, 0.99, 0.85)
    assert not ENGLISH.same(other, one, 0.99, 0.85)
