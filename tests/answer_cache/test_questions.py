"""Questions in other languages are compared letter by letter; answers that depend on the day are not stored."""

from itertools import combinations

import pytest

from kvweave.answer_cache.matching import ENGLISH
from kvweave.answer_cache.questions import is_english, is_surely_english
from kvweave.text import clean_text

# In each group every two questions ask something else: another preposition, article, negation, role, person, number, tense,
# accent, order, name or sense of a word. Embeddings find them as near as paraphrases.
LOOK_ALIKES = {
    "german": """
        Was kostet der Eintritt? | Was kostet ein Eintritt? | Was kostete der Eintritt? | Was kostet kein Eintritt?
        Was hängt an der Wand? | Was hängt in der Wand? | Was hängt vor der Wand? | Was hängt nicht an der Wand?
        Was will Anna? | Was will Anna nicht? | Was wollte Anna? | Was will Anna an Ben?
        Wo wohnen Sie? | Wo wohnen sie? | Wo wohnt sie? | Wo wohnten sie?
        Was hat der Mann den Hund? | Was hat den Mann der Hund? | Was hat der Hund den Mann?
        Sieht der Lehrer den Schüler? | Sieht den Lehrer der Schüler? | Sehen die Lehrer den Schüler?
        War Anna am See? | War Anna an dem See nicht? | War Anna im See? | Waren Anna und Ben am See?
        Wann am Morgen öffnet das Amt? | Wann am Abend öffnet das Amt? | Wann öffnet das Amt?
        Wer ist der Chef von Anna? | Wer ist Annas Chef nicht? | Ist Anna der Chef von wem? | Wessen Chef ist Anna?
        Ist das Haus an der Elbe? | Ist ein Haus an der Elbe? | Ist das Haus an einer Elbe?
        Wer darf am Montag kommen? | Wer muss am Montag kommen? | Wer darf am Mittwoch kommen?
        Was macht Anna? | Was machte Anna? | Was machen Anna und Ben? | Macht Anna was?""",
    "french": """
        Où est le bateau ? | Ou est le bateau ? | Où était le bateau ? | Où sont les bateaux ? | Où n'est pas le bateau ?
        Qui a la clé ? | Qui avait la clé ? | Qui à la clé ? | Qui n'a pas la clé ? | Qui a une clé ?
        Paul a vu Marie ? | Marie a vu Paul ? | Paul a vu marié ? | Paul n'a vu Marie ?
        Qui aime Anna ? | Qui Anna aime-t-elle ? | Qui aima Anna ?
        Quand ouvre le musée ? | Quand ouvre un musée ? | Quand ferme le musée ? | Quand ouvrait le musée ?
        Combien coûte l'entrée ? | Combien coûtait l'entrée ? | Combien coûte une entrée ? | Combien coûtent les entrées ?
        As-tu la clé de Paul ? | A-t-il la clé de Paul ? | As-tu la clé pour Paul ?
        Est-ce que Paul est arrivé ? | Est-ce que Paul est-il parti ? | Est-ce que Paul n'est pas arrivé ?""",
    "spanish": """
        ¿Quién tiene la llave? | ¿Quién tiene una llave? | ¿Quién no tiene la llave? | ¿Quién tenía la llave?
        ¿Has visto a Ana? | ¿Has visto a Ana hoy? | ¿Ha visto a Ana? | ¿Ha visto Ana? | ¿No has visto a Ana?
        Has visto el barco | Has visto un barco | Has visto los barcos | No has visto el barco
        ¿Cuándo abre el museo? | ¿Cuando abre el museo? | ¿Cuándo cierra el museo? | ¿Cuándo abren los museos?
        ¿A quién ama Ana? | ¿Quién ama a Ana? | ¿Quién amaba a Ana?
        ¿Cuántos años tiene él? | ¿Cuántos anos tiene él? | ¿Cuántos años tiene el? | ¿Cuántos años tenía él?
        ¿Me das el libro? | ¿Me das los libros? | ¿Te das el libro? | ¿Me da el libro?
        ¿Está él en casa? | ¿Esta él en casa? | ¿Está el en casa? | ¿No está él en casa? | ¿Está él en la casa?""",
    "chinese": """
        合同什么时候续签？ | 合同什么时候终止？ | 合同什么时候不续签？ | 合同什么时候续签过？ | 合同什么地方续签？
        谁有钥匙？ | 谁没有钥匙？ | 谁有过钥匙？ | 有谁的钥匙？ | 谁有两把钥匙？
        小王借给小李多少钱？ | 小李借给小王多少钱？ | 小王借小李多少钱？ | 小王还给小李多少钱？
        三月一日谁值班？ | 三月二日谁值班？ | 二月一日谁值班？ | 三月一日谁不值班？
        他在家吗？ | 她在家吗？ | 他不在家吗？ | 他在家吧？ | 他在公司吗？
        门票多少钱 | 门票多少張 | 两张门票多少钱 | 儿童门票多少钱""",
    "arabic": """
        متى يفتح المتجر؟ | متى يغلق المتجر؟ | متى يفتح متجر؟ | متى لا يفتح المتجر؟ | أين يفتح المتجر؟ | متى فتح المتجر؟
        من لديه المفتاح؟ | من ليس لديه المفتاح؟ | من لديها المفتاح؟ | من لديه مفتاح؟ | لمن المفتاح؟
        هل رأى أحمد عليا؟ | هل رأى علي أحمدا؟ | هل لم ير أحمد عليا؟ | هل يرى أحمد عليا؟
        مَنْ عَلَّمَ الولد؟ | مَنْ عُلِّمَ الولد؟ | مِنْ عَلَّمَ الولد؟
        كم سعر التذكرة؟ | كم سعر التذاكر؟ | كم كان سعر التذكرة؟ | ما سعر التذكرة؟
        أين كتاب سارة؟ | أين كتب سارة؟ | أين كتاب سامي؟ | من كتاب سارة؟""",
}
GROUPS = [
    (language, [question.strip() for question in line.split("|")])
    for language, text in LOOK_ALIKES.items()
    for line in text.strip().splitlines()
]
QUESTIONS = sorted({question for _, group in GROUPS for question in group})


@pytest.mark.parametrize(("language", "group"), GROUPS, ids=[group[0] for _, group in GROUPS])
def test_look_alikes_never_share_an_answer(language, group):
    for one, other in combinations(group, 2):
        assert not ENGLISH.same(one, other, 1.0, 0.0), (one, other)
        assert not ENGLISH.same(other, one, 1.0, 0.0), (one, other)


def test_no_two_of_all_questions_share_an_answer():
    for one, other in combinations(QUESTIONS, 2):
        assert not ENGLISH.same(one, other, 1.0, 0.0), (one, other)


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_repeat_shares_the_answer_unless_it_depends_on_the_day(question):
    today = ENGLISH.is_time_sensitive(question)
    repeats = [question, f"  {question} ", question.rstrip(" ?؟？"), question.replace(" ", "\u00a0")]
    for repeat in repeats:
        assert ENGLISH.key(repeat) == ENGLISH.key(question)
        assert ENGLISH.same(question, repeat, 1.0, 0.0) != today


@pytest.mark.parametrize(
    "question",
    """Was gibt es heute zu essen? | Wer kommt morgen? | Was stand gestern im Plan? | Wer hat diese Woche Dienst?
    Qu'y a-t-il aujourd'hui ? | Qui vient demain ? | Qui est venu hier ? | Qui travaille cette semaine ?
    ¿Qué hay hoy? | ¿Quién viene mañana? | ¿Quién vino ayer? | ¿Quién trabaja esta semana?
    今天吃什么？ | 明天谁来？ | 昨天谁来了？ | 下周谁值班？ | 今日の予定は？ | 来週は誰ですか
    ماذا نأكل اليوم؟ | من يأتي غدا؟ | من جاء أمس؟ | Кто придёт завтра? | Кто дежурит на этой неделе?""".replace(
        "\n", "|"
    ).split("|"),
)
def test_an_answer_that_depends_on_the_day_is_not_cached(question):
    assert ENGLISH.is_time_sensitive(question)
    assert not ENGLISH.same(question, question, 1.0, 0.0)


@pytest.mark.parametrize(
    "question",
    """Who owns the boat? | Is Anna tall? | Was Anna late? | Who met Ben? | Who owns the café? | Will Anna die?
    When is Zoë's train? | Who wrote Der Prozess? | Who is the author of Le Monde de demain? | Who is at the door?
    What does the son of Anna sell? | When does the ferry to São Paulo leave? | Who is Иван? | What is the α value of it?
    Whose are the hats? | Can you tell me when the shop opens?""".replace("\n", "|").split("|"),
)
def test_an_english_question_with_foreign_names_stays_english(question):
    assert is_english(clean_text(question))


def test_raised_digits_and_fractions_are_not_those_beside_them():
    for one, other in (
        ("What is 5\u00b2?", "What is 52?"),
        ("Is it 1\u00bd?", "Is it 11/2?"),
        ("H\u2082 O?", "H2 O?"),
    ):
        assert not ENGLISH.same(one, other, 1.0, 0.0)
    assert ENGLISH.same("Who owns \ufb01re 5?", "Who owns fire 5?", 1.0, 0.0)


@pytest.mark.parametrize(
    "question",
    [
        "What is on the menu today?",
        "Who is on duty tonight?",
        "When did we meet last week?",
        "What is planned for next Monday?",
        "Who left two days ago?",
        "How many orders came this month?",
        "Who is on duty in two days?",
        "When does the tour start, if we leave in 20 minutes?",
        "Who is on duty in the next two days?",
        "What did we sell in the last 3 months?",
        "Who is on duty two days from now?",
        "Where is the bus now?",
        "Which rooms are currently free?",
        "Who is on duty in a week?",
        "What is planned in a couple of days?",
        "Who is on duty in the next few days?",
        "How many guests come in two days?",
        "Who fell ill in the last 3 weeks of the year?",
        "What did we do in the last few weeks?",
    ],
)
def test_questions_about_the_present_are_time_sensitive(question):
    assert ENGLISH.is_time_sensitive(question)


@pytest.mark.parametrize(
    "question",
    [
        "What is the last name of Anna?",
        "Who sat at the next table?",
        "What is on the menu on Monday?",
        "How many goals did we score in two hours?",
        "How much does one person build in a day?",
        "Who won the last two matches?",
        "How far is it from Skelt to Brill?",
        "Who dies in the last 20 minutes of the film?",
        "What is due in the last week of the course?",
        "How many hours are in two days?",
        "How many days are there in a week?",
        "How often do we train in a week?",
        "What is open in the morning?",
        "Who looks after the dog, now that Anna has moved?",
    ],
)
def test_other_questions_are_not_time_sensitive(question):
    assert not ENGLISH.is_time_sensitive(question)


def test_a_text_is_english_by_its_function_words_or_most_of_its_words():
    assert all(map(is_surely_english, ("Who leads it?", "battery retest date", "skelt ferry")))
    assert not any(map(is_surely_english, ("Hat Sie Recht?", "Qui a vu Paul?", "Amt Bern Termin")))
