"""Capitals make another question where both spellings of a word are words of their own, and nowhere else."""

import time

import pytest

from kvweave.answer_cache.matching import ENGLISH

OTHERS = [
    ("Does this apply to us?", "Does this apply to US?"),
    ("Does this apply to us staff?", "Does this apply to US staff?"),
    ("What does it say?", "What does IT say?"),
    ("What Does It Say About Leave?", "What does IT say about leave?"),
    ("What does who recommend?", "What does WHO recommend?"),
    ("Who aids the clinic?", "Who AIDS the clinic?"),
    ("Where is the pin of the door?", "Where is the PIN of the door?"),
    ("How many mW does the pump take?", "How many MW does the pump take?"),
    ("How many mW does the pump take?", "How many mw does the pump take?"),
    ("How many Mb does the disk hold?", "How many MB does the disk hold?"),
    ("Is the limit 10kb?", "Is the limit 10KB?"),
    ("Is the line 5 m long?", "Is the line 5 M long?"),
    ("When does May start?", "When does may start?"),
    ("Who joined the March?", "Who joined the march?"),
    ("Who speaks Polish?", "Who speaks polish?"),
    ("Where do we buy Polish for the floor?", "Where do we buy polish for the floor?"),
    ("What does Apple cost?", "What does apple cost?"),
    ("Who sells China?", "Who sells china?"),
    ("Can you tell me what IT costs?", "What does it cost?"),
    ("How many mΩ has the coil?", "How many MΩ has the coil?"),
    ("How many mL does the tank hold?", "How many ML does the tank hold?"),
    ("Is it below 300 K?", "Is it below 300 k?"),
    ("How many g does the pilot feel?", "How many G does the pilot feel?"),
    ("Does the coil have 2 h?", "Does the coil have 2 H?"),
    ("Is the torque 5 Nm?", "Is the torque 5 nm?"),
    ("What does grep -i do?", "What does grep -I do?"),
    ("what does ls -a do?", "what does ls -A do?"),
    ("Who runs the Met?", "Who runs the met?"),
    ("Hat Sie Recht?", "Hat sie Recht?"),
    ("Hat Sie Recht?", "HAT SIE RECHT?"),
    ("Hat man Sie in Bern?", "hat man sie in Bern?"),
    ("Kam die Arme an?", "Kam die arme an?"),
    ("Wer hat Recht?", "wer hat recht?"),
]
UNSAID = [
    ("who speaks polish?", "Who speaks Polish?"),
    ("how do I learn polish?", "How do I learn Polish?"),
    ("WHO SPEAKS POLISH?", "Who speaks Polish?"),
    ("why was the may invoice disputed", "Why was the May invoice disputed?"),
    ("how much vat is due", "How much VAT is due?"),
    ("how many mw does the pump take?", "How many MW does the pump take?"),
    ("HOW MANY MW DOES THE PUMP TAKE?", "How many mW does the pump take?"),
    ("does this apply to us staff?", "Does this apply to US staff?"),
    ("DOES THIS APPLY TO US STAFF?", "Does this apply to US staff?"),
    ("what does it cost", "What does IT cost?"),
    ("WHAT DOES IT COST?", "What does IT cost?"),
]
SAME = [
    ("who leads the harlow project?", "Who leads the Harlow project?"),
    ("WHO LEADS THE HARLOW PROJECT?", "Who leads the Harlow project?"),
    ("Who Leads the Harlow Project?", "Who leads the Harlow project?"),
    ("Who Leads The Harlow Project?", "WHO LEADS THE HARLOW PROJECT?"),
    ("who Leads the Harlow Project?", "Who leads the harlow project?"),
    ("WHEN DOES IT OPEN FOR US?", "When does it open for us?"),
    ("When Will It Open?", "when will it open"),
    ("When is the Board Meeting?", "when is the board meeting?"),
    ("When is the Board Meeting?", "When is the board meeting?"),
    ("Where is the nasa office?", "Where is the NASA office?"),
    ("What is the Pdf called?", "What is the PDF called?"),
    ("Who must NOT come?", "Who must not come?"),
    ("PLEASE tell me WHEN it opens", "Please tell me when it opens"),
    ("What is the ANNUAL fee?", "What is the annual fee?"),
    ("How heavy is a 5 KG bag?", "How heavy is a 5 kg bag?"),
    ("who met Anna?", "Who met Anna?"),
    ("When does the well-known Film start?", "When does the well-known film start?"),
    ("who polishes the floor", "WHO POLISHES THE FLOOR?"),
    ("HOW DO WE POLISH THE FLOOR?", "How do we polish the floor?"),
    ("HOW MANY MM IS IT LONG?", "How many mm is it long?"),
    ("what happened on 3 march", "What happened on 3 March?"),
    ("what did the tenant pay in may", "What did the tenant pay in May?"),
    ("What did the newsletter of may 2015 say?", "What did the newsletter of May 2015 say?"),
    ("who is the landlord of 8 mill lane", "Who is the landlord of 8 Mill Lane?"),
    ("Who has room 12b?", "Who has room 12B?"),
    ("Who won the 5k run?", "Who won the 5K run?"),
    ("Is it 5 l of paint?", "Is it 5 L of paint?"),
    ("IS THE ROPE 5 M LONG?", "Is the rope 5 m long?"),
    ("Does it open at 5 AM?", "Does it open at 5 am?"),
    ("battery retest date", "Battery Retest Date"),
    ("Polish lessons: when are they?", "polish lessons: when are they?"),
    ("wann öffnet das Amt?", "Wann öffnet das Amt?"),
    ("Where is St. Anne's hall?", "where is st. anne's hall?"),
]


@pytest.mark.parametrize("cosine", [0.3, 0.99])
@pytest.mark.parametrize(("one", "other"), OTHERS + UNSAID)
def test_capitals_that_change_a_word_make_another_question(one, other, cosine):
    for first, second in ((one, other), (other, one)):
        assert ENGLISH.compare(first, second, cosine, 0.85).sameness == "different"


@pytest.mark.parametrize("cosine", [0.3, 0.99])
@pytest.mark.parametrize(("one", "other"), SAME)
def test_other_capitals_change_nothing(one, other, cosine):
    for first, second in ((one, other), (other, one)):
        assert ENGLISH.same(first, second, cosine, 0.85)


def test_each_of_two_equal_words_has_its_capitals():
    question = "Does the rule of US law apply to us?"
    assert ENGLISH.same(question, "does the rule of US law apply to us", 0.99, 0.85)
    assert not ENGLISH.same(question, "Does the rule of us law apply to US?", 0.99, 0.85)


def test_a_long_text_takes_linear_time():
    text = "When does May start? " * 3000
    began = time.perf_counter()
    assert not ENGLISH.same(text, text.replace("May", "may"), 0.99, 0.85)
    assert time.perf_counter() - began < 5
