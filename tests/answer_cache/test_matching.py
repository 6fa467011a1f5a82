"""What is certainly the same question, what is only near, and what is another one."""

import pytest

from kvweave.answer_cache.english.context import questions_in
from kvweave.answer_cache.english.spelling import corrected, edits
from kvweave.answer_cache.english.veto import veto
from kvweave.answer_cache.english.wordnet import Relation, general_words, relation
from kvweave.answer_cache.matching import ENGLISH, Comparison

BAKERY = "Which members of the bakery arrive before breakfast?"
FEE = "How much is the fee for members?"

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
CONTEXTS = [
    "Sorry, a quick question. How much is the fee for members?",
    "How much is the fee for members? I need to know it asap, thanks.",
    "I forgot to ask: how much is the fee for members?",
    "I just can't remember, so: how much is the fee for memebrs?",
]
NARROWED = [
    "We're standing in the shop right now. How much is the fee for members?",
    "For the spring newsletter: how much is the fee for members?",
    "For the minutes: how much is the fee for members?",
    "I'm asking as a student. How much is the fee for members?",
    "Question on the winter timetable: how much is the fee for members?",
    "I'm travelling with a dog. How much is the fee for members?",
    "We are travelling with three children. How much is the fee for members?",
    "I need it from you, not from me. How much is the fee for members?",
    "I'm a student. How much is the fee for members?",
    "How much is the fee for members? Only for children.",
    "I need it for Delft. How much is the fee for members?",
    "Question about the rowing section: how much is the fee for members?",
    "I mean the other club, sorry. How much is the fee for members?",
    "I am 70, hence the question. How much is the fee for members?",
    "How much is the fee for members? And the fee for guests?",
    "Members ask for the fee. How much is the fee for members?",
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


def test_a_correction_names_what_it_took_for_errors():
    assert corrected("Who arrievs at breakfats?", "Who arrives at breakfast?") == (
        "Who arrives at breakfast?",
        ("arrievs", "breakfats"),
    )
    assert corrected(BAKERY, BAKERY) is None


@pytest.mark.parametrize(
    ("one", "other", "count"),
    [("kept", "kpet", 1), ("arrive", "arive", 1), ("abc", "xyz", 3), ("a", "abcde", 3)],
)
def test_edits_are_counted_up_to_a_limit(one, other, count):
    assert edits(one, other, 2) == edits(other, one, 2) == count


@pytest.mark.parametrize("asked", CONTEXTS)
def test_what_only_says_why_a_question_is_asked_is_left_out(asked):
    assert questions_in(asked)[-1][:20] == FEE[:20]
    assert ENGLISH.same(asked, FEE, 0.5, 0.85)


@pytest.mark.parametrize("asked", NARROWED)
def test_what_may_change_the_answer_is_not_left_out(asked):
    assert questions_in(asked) == (asked,)
    assert not ENGLISH.same(asked, FEE, 1.0, 0.0)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (
            "For the spring newsletter: what is the deadline?",
            "For the autumn newsletter: what is the deadline?",
        ),
        ("Sorry, a quick question. When does it open?", "Sorry, a silly question. When does it open?"),
    ],
)
def test_what_is_said_around_both_questions_is_not_left_out_of_both(one, other):
    assert not ENGLISH.same(one, other, 1.0, 0.0)
    assert not ENGLISH.same(one, "What is the deadline?", 1.0, 0.0)


def test_case_and_punctuation_never_matter():
    assert ENGLISH.same("who paid anna on 3 may", "Who paid Anna on 3 May?", 0.1, 0.99)
    assert not ENGLISH.same("is it > 5", "Is it < 5?", 1.0, 0.0)
    assert not ENGLISH.same("?", "...", 1.0, 0.0)


@pytest.mark.parametrize(
    ("one", "other", "differs"),
    [
        ("Who paid the bill for Anna?", "Which person settled the invoice of Ben?", "names"),
        ("What happened in 1999 to the mill?", "Which events did the mill see in 1998?", "numbers"),
        ("Which guests eat meat?", "Which of the visitors do not eat meat?", "negation"),
        (
            "When did the shop of the baker close down?",
            "Why did the bakery shut its doors?",
            "what is asked for",
        ),
        ("Which shops closed in spring?", "What stores will be shutting down in spring?", "tense"),
        ("Who sang the first song?", "Which singer had the last number?", "order"),
        ("What do all members pay?", "What does only a new member have to give?", "scope"),
        ("Which room is the largest of the hotel?", "What is the smallest hotel bedroom?", "comparison"),
        (
            "How heavy is the boat of the club?",
            "What colour has the club painted its boat?",
            "what is asked for",
        ),
        ("What do we pay per week for the hall?", "What does the hall cost us per month?", "measure or unit"),
        (
            "How do I walk from the pier to town?",
            "What is the way to the pier from town?",
            "direction or roles",
        ),
        ("Where is the lid of the chest hidden?", "Where is the chest hidden?", "part"),
        ("Was the loan to the club approved?", "Who approved the loan to the club?", "what is asked for"),
        ("Tell me the age of the older brother.", "Where is the older brother?", "what is asked for"),
        ("Which nurse did Anna treat?", "By which nurse was Anna treated?", "how the words belong together"),
        ("How much did the club pay for it?", "How much did the club owe for it?", "a word"),
        ("Which tubs stand by the door?", "Which tubs stand by the wall?", "a word"),
    ],
)
def test_a_difference_that_changes_the_answer_is_found(one, other, differs):
    assert veto(one, other) == veto(other, one) == differs


def test_what_the_guard_lets_pass_is_near_from_the_threshold_on():
    stored, asked = "Who lends the amplifier to the band?", "Who is giving the musicians a loan of the amp?"
    assert ENGLISH.compare(asked, stored, 0.9, 0.85) == Comparison("near", "wording")
    assert ENGLISH.compare(asked, stored, 0.8, 0.85) == Comparison("different", "distance")


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


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ("own", "owner", Relation.DERIVED),
        ("decided", "decision", Relation.DERIVED),
        ("kids", "children", Relation.SYNONYM),
        ("deliveries", "delivery", Relation.SAME),
        ("tenant", "landlord", Relation.NONE),
        ("warm", "cold", Relation.NONE),
    ],
)
def test_words_are_related(one, other, expected):
    assert relation(one, other) is relation(other, one) is expected


def test_the_general_words_hold_words_forms_names_and_opposites():
    words = general_words()
    assert all(map(words.is_common, ("mason", "masons", "planned", "kept", "heaviest", "easily")))
    assert not any(map(words.is_known, ("msaon", "plannde", "xqzt")))
    assert words.is_known("london")
    assert not words.is_common("london")
    assert words.are_antonyms("rising", "falls")
    assert not words.are_antonyms("rising", "mason")


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("Who owns the battery retest?", "Who is responsible for the battery retest?", True),
        ("who is in charge of the budget review", "Who is the owner of the budget review?", True),
        ("hey, who's in charge of the budget review?", "Who owns the budget review?", True),
        (
            "Who owns the boat?",
            "Who is responsible for the boat?",
            False,
        ),  # a thing has an owner and a keeper
        ("Who owns the battery retest?", "Who is responsible for the brake retest?", False),
        ("Who owns the review?", "Who is not responsible for the review?", False),
        ("Who owned the review?", "Who is responsible for the review?", False),
        ("Who owns the test bench?", "Who is responsible for the test bench?", False),
    ],
)
def test_who_owns_a_task_is_responsible_for_it(one, other, same):
    assert ENGLISH.same(one, other, 0.7, 0.85) is ENGLISH.same(other, one, 0.7, 0.85) is same


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
    for opening in ("I just want to know:", "Could you just tell me:", "Can you just check for me:"):
        assert ENGLISH.same(f"{opening} {one}", one, 0.99, 0.85)
