"""Each rule of the guard, with pairs of questions that it tells apart. Most are from the pairs that strangers to it wrote."""

import pytest

from kvweave.answer_cache.guard import RULES, difference, read
from kvweave.answer_cache.matching import ENGLISH, Comparison

DECIDED = {
    "too short": [
        ("What did we concede?", "What did we demand?"),
        ("Where's the funnel of the gauge?", "Where's the gauge?"),
        ("Who used to own the cabin?", "Who owns the cabin now?"),
    ],
    "names": [
        ("Who sits next to Oluchi?", "Who sits next to Gregor?"),
        ("What did Mr Quiroga reply?", "What did Ms Dubois reply?"),
        ("Who paid the bill for Anna?", "Which person settled the invoice of Ben?"),
    ],
    "numbers": [
        ("What costs 12 euros?", "What costs 22 euros?"),
        ("Summarise the mail of 16 June.", "Summarise the mail of 26 June."),
        ("What happened in 1999 to the mill?", "Which events did the mill see in 1998?"),
        ("Who cooks for us on Monday?", "Who cooks for us on Sunday?"),
    ],
    "negation": [
        ("Who did not sign the petition?", "Who signed the petition?"),
        ("List the flats the fitter hadn't visited.", "List the flats the fitter had visited."),
        ("Which guests eat meat?", "Which of the visitors do not eat meat?"),
    ],
    "what is asked for": [
        ("How salty is the rye loaf?", "How heavy is the rye loaf?"),
        ("How many blades are there?", "How sharp are the blades?"),
        ("When did the shop of the baker close down?", "Why did the bakery shut its doors?"),
        ("How heavy is the boat of the club?", "What colour has the club painted its boat?"),
        ("Was the loan to the club approved?", "Who approved the loan to the club?"),
        ("Tell me the age of the older brother.", "Where is the older brother?"),
        ("I wonder if the tower is taller than the mill.", "Why is the tower taller than the mill?"),
    ],
    "tense": [
        ("What will Bilal sing?", "What did Bilal sing?"),
        ("Who led the polonaise?", "Who will lead the polonaise?"),
        ("Who is umpiring the final?", "Who was umpiring the final?"),
        ("Which shops closed in spring?", "What stores will be shutting down in spring?"),
    ],
    "order": [
        ("Who sang the first song?", "Which singer had the last number?"),
        ("Which repair in the log took the most time?", "Which was the first repair in the log?"),
        ("What is the length of the last hill in the club race?", "What is the length of the club race?"),
    ],
    "restriction": [
        ("Which tubs get sun all day?", "Which tubs get sun only in the morning?"),
        ("What do all members pay?", "What does only a new member have to give?"),
        ("What are all of us paying for together?", "What are the bridesmaids alone paying for?"),
    ],
    "comparison": [
        ("What was the loudest piece?", "What was the quietest piece?"),
        ("Which conductor stayed longer than Mr Pugh?", "Which conductor stayed less long than Mr Pugh?"),
        ("Which room is the largest of the hotel?", "What is the smallest hotel bedroom?"),
    ],
    "opposites": [
        ("Which tone is rising?", "Which tone is falling?"),
        ("Which flag means safe?", "Which flag means dangerous?"),
        ("Which doors of the hall are locked?", "Which doors of the hall are unlocked?"),
    ],
    "measure or unit": [
        ("What is the rate in euros per device?", "What is the rate in per cent of the purchase price?"),
        (
            "For how many months are applicants' files kept?",
            "For how many days are applicants' recordings kept?",
        ),
        ("What do we pay per week for the hall?", "What does the hall cost us per month?"),
    ],
    "direction": [
        ("How do I walk from the pier to town?", "What is the way to the pier from town?"),
        ("Who blackmails the vicar?", "Whom does the vicar blackmail?"),
        ("Who fines the contractor?", "Whom does the contractor fine?"),
    ],
    "part": [
        ("When was the paper tray of the big printer replaced?", "When was the big printer replaced?"),
        ("Where is the lid of the chest hidden?", "Where is the chest hidden?"),
        (
            "Where is the entrance to the changing rooms of the sports hall?",
            "Where is the entrance to the sports hall?",
        ),
    ],
    "a word": [
        ("Which planks were rotten?", "Which planks were sound?"),
        ("What shade is the varnish?", "What brand is the varnish?"),
        ("How much did the club pay for it?", "How much did the club owe for it?"),
        ("Which tubs stand by the door?", "Which tubs stand by the wall?"),
    ],
    "order of words": [
        ("Which twin woke the other?", "Which twin was woken by the other?"),
        ("Who handed Minka over to us?", "Who did we hand Minka over to?"),
        (
            "How many lessons were moved from Monday to Thursday?",
            "How many lessons were moved from Thursday to Monday?",
        ),
    ],
}
PAIRS = [(rule, *pair) for rule, pairs in DECIDED.items() for pair in pairs]


def test_each_rule_has_pairs():
    assert DECIDED.keys() == RULES.keys()


@pytest.mark.parametrize(("rule", "one", "other"), PAIRS)
def test_a_rule_tells_its_pairs_apart(rule, one, other):
    first, second = read(one), read(other)
    assert RULES[rule](first, second)
    assert RULES[rule](second, first)
    assert difference(one, other) == difference(other, one) is not None
    assert ENGLISH.compare(one, other, 1.0, 0.0).sameness == "different"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Who lends the amplifier to the band?", "Who is giving the musicians a loan of the amp?"),
        (
            "When is the annual concert of the choir?",
            "Could you tell me on which day the singers give their yearly show?",
        ),
    ],
)
def test_what_passes_every_rule_is_near_from_the_threshold_on(one, other):
    assert difference(one, other) is None
    assert ENGLISH.compare(other, one, 0.9, 0.85) == Comparison("near", "wording")
    assert ENGLISH.compare(other, one, 0.8, 0.85) == Comparison("different", "distance")


def test_a_rule_may_be_left_out():
    pair = "Which planks were rotten?", "Which planks were sound?"
    assert difference(*pair) == "a word"
    assert difference(*pair, without=("a word",)) is None


def test_numbers_and_dates_are_read_in_any_spelling():
    for one, other in (
        ("Who owns the twenty-five boats?", "Who owns the 25 boats?"),
        ("Who came on 3 May?", "Who came on the 3rd of May?"),
        ("Who came on Saturdays?", "Who came on saturday?"),
        ("Who has 1,250 sheep?", "Who has 1250 sheep?"),
    ):
        assert read(one).numbers == read(other).numbers != ()
    assert read("Is it 2.5 kg?").numbers != read("Is it 25 kg?").numbers
    assert read("Which one may march?").numbers == ()
