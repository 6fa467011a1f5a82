"""A question that is stored is found whatever typing errors it has, and never for a question that only looks like one."""

import pytest

from kvweave.answer_cache.matching import ENGLISH
from kvweave.answer_cache.mistyped import mistyped

MISTYPED = [
    ("monthly membership fee", "montly membership fee"),
    ("When do we recieve the calender?", "When do we receive the calender?"),
    ("How much is the monthly rent?", "how mcuh is teh monhtly rnet"),
    ("Who was absent from practice?", "whowas absent fromm practise"),
    ("When does the early ferry sail?", "When doe sthe early ferry sail?"),
    ("What is the address of the accommodation?", "What is the adress of the accomodaton?"),
    ("Which bricks cost more than planned?", "Which birkcs cost more then palnned?"),
    ("Where is the new boat house?", "Were is teh new boathouse?"),
    ("Who paid for the coach's whistle?", "Who payed for the coachs whistle?"),
    ("What's the fee if you don't cancel?", "Whats the fee if you dont cancel"),
    ("What is the members' discount?", "what is the members discount"),
    ("How old is Anna's lamp?", "How odl is Annas lapm?"),
    ("Is the garden their own?", "Is the garden there own?"),
    ("How much is it budgeted for?", "How much is it budgetted for?"),
    ("What happens on Wednesday in February?", "What happens on Wendesday in Febuary?"),
    ("When is the café open?", "When is the the cafe opne?"),
    ("Which colleague is fifteen minutes late?", "which collegue is fiften minutes late"),
    ("What is the score at 3 > 2?", "Waht is the socre at 3 > 2?"),
    ("Is the fridge by the stairs defective?", "Is the fridge by the stiars defectiv?"),
    ("What is the deposit for the refrigerator?", "What is teh depsit for the refrigiratr?"),
    ("How do we get from the station to the hall?", "How do we get form the staton to the hal?"),
    ("Which side-car is for sale?", "Which side car is for sael?"),
    ("What happens if I oversleep?", "What happens ifI ovresleep?"),
    ("What did the jury say?", "Wht did the jury say?"),
    ("Which alert fired first?", "Which alert fireed first?"),
    ("What is planned for the wedding?", "What is planned for the weding?"),
    ("Which room is bigger?", "Which room is biggger?"),
    ("How many chairs were delivered?", "How may chairs were delivered?"),
    ("How long did the nap take?", "How lzng did the nap take?"),
    ("Which row is louder than the choir?", "Which row is louder tan the choir?"),
    ("What does the tag say?", "What des the tag say?"),
    ("Who called the hotline?", "Who called the hotine?"),
    ("Where is the café?", "Where is the caafé?"),
]
OTHERS = [
    ("Who met the celt?", "Who met the cult?"),
    ("What did the saab cost?", "What did the scab cost?"),
    ("Where is my carl?", "Where is my card?"),
    ("What does the webhook do?", "What does the webbook do?"),
    ("Where is the runbook?", "Where is the sunbook?"),
    ("Who repaired the fireline?", "Who repaired the wireline?"),
    ("Who is the principal of the school?", "Who is the principle of the school?"),
    ("Does it open at 2 pm?", "Does it open at 3 pm?"),
    ("When did Jon leave?", "When did Joan leave?"),
    ("when did jon leave", "when did joan leave"),
    ("What did the rain affect?", "What did the rain effect?"),
    ("Where is part AB-12?", "Where is part AB-21?"),
    ("Where is part ABX12?", "Where is part ABX122?"),
    ("Which valve is X200?", "Which valve is X20O?"),
    ("Is it 10.5 bar?", "Is it 105 bar?"),
    ("What is new in version 1.2?", "What is new in version 12?"),
    ("Where is Meyer?", "Where is Mayer?"),
    ("where does miller live", "where does millar live"),
    ("Who paid Hansen?", "Who paid Hanson?"),
    ("What is planned for Monday?", "What is planned for Munday?"),
    ("What is planned for Sunday?", "What is planned for Munday?"),
    ("Who has fourth place?", "Who has fourt place?"),
    ("Do we need 5 kg?", "Do we need 5 g?"),
    ("How many mm is it long?", "How many cm is it long?"),
    ("Is the result notable?", "Is the result not able?"),
    ("Is it nowhere?", "Is it now here?"),
    ("What does the employer pay?", "What does the employe pay?"),
    ("What does the employee pay?", "What does the employe pay?"),
    ("Who does the internal audit?", "Who does the enternal audit?"),
    ("Who is able to come?", "Who is uable to come?"),
    ("Was the ending convincing?", "Was the ending nconvincing?"),
    ("Is the plan symmetrical?", "Is the plan asymetrical?"),
    ("Who left the keys?", "hwo left the keys"),
    ("How left the keys?", "hwo left the keys"),
    ("Which train goes into the valley?", "Which train goes nto the valley?"),
    ("Who is the lessee of the flat?", "Who is the lessor of the flat?"),
    ("When do we eat dessert?", "When do we eat desert?"),
    ("What was the nitrate value?", "What was the nitrite value?"),
    ("What is the casual rate?", "What is the causal rate?"),
    ("Where is William's office?", "Where is Williams office?"),
    ("Where is Anna Lee?", "Where is Annalee?"),
    ("Did he resign?", "Did he re-sign?"),
    ("Is it \u00a35 each?", "Is it $5 each?"),
    ("Is it -5 outside?", "Is it 5 outside?"),
    ("Who came then?", "Who came than?"),
    ("Is the drug legal?", "Is the drug ilegal?"),
    ("Which keys are needed?", "Which keys are uneeded?"),
    ("Who wrote the foreword?", "Who wrote the forward?"),
    ("What did the boar eat?", "What did the bear eat?"),
    ("Is it the wrist?", "Is it the wrisst not?"),
    ("Which doors are unlocked?", "Which doors are locked?"),
    ("What is the weight of room 12b?", "What is the weight of room 12d?"),
    ("Is the lid here?", "Is the lxd here?"),
    ("Why did they leave early?", "Wht did they leave early?"),
    ("How many guests enter?", "How may guests enter?"),
    ("How many guests who are late enter?", "How may guests who are late enter?"),
    ("What dose did the nurse give?", "What does did the nurse give?"),
    ("How many days do we have?", "How many days do we save?"),
    ("Who drank your milk?", "Who drank sour milk?"),
    ("Did the cabin burn?", "Did cain burn?"),
    ("Who leads the Jorvik project?", "Who leads the Jarvik project?"),
    ("Who took the pexidol?", "Who took the pexidal?"),
    ("Where is the house?", "Where is the hose?"),
    ("Did Dr Mendez sign?", "Did Dr Mendes sign?"),
]


@pytest.mark.parametrize(("stored", "asked"), MISTYPED)
def test_a_stored_question_is_found_with_its_typing_errors(stored, asked):
    for one, other in ((stored, asked), (asked, stored)):
        compared = ENGLISH.compare(one, other, 0.0, 1.0)
        assert (compared.sameness, compared.kind) == ("same", "spelling")


@pytest.mark.parametrize(("stored", "asked"), OTHERS)
def test_another_word_name_number_or_code_is_no_typing_error(stored, asked):
    for one, other in ((stored, asked), (asked, stored)):
        assert not ENGLISH.same(one, other, 1.0, 0.0)


def test_words_that_an_error_may_stand_for_as_well_are_named_for_the_caller():
    found = mistyped("When is the internal audit?", "When is the inernal audit?")
    assert found == ("inernal", "infernal")
    compared = ENGLISH.compare("When is the inernal audit?", "When is the internal audit?", 0.0, 1.0)
    assert compared.errors == ("inernal", "infernal")
    assert mistyped("When is the audit?", "When is the audit?") is None
