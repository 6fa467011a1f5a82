"""Other wordings of questions that have an answer: which ones change the meaning, and what is stored of the others."""

import pytest

from kvweave.answer_cache.guard import changes_meaning
from kvweave.answer_cache.records import AnswerProvenance
from kvweave.answer_cache.worth import LEAST_ASKED, LEAST_WORK
from kvweave.background import jobs as background_jobs
from kvweave.background import prediction as question_prediction
from kvweave.background.budget_trials import counted_rows
from kvweave.background.paraphrases import Paraphraser
from kvweave.background.prediction import QuestionPredictor, request_prompt
from kvweave.background.prompts import FewShotPrompts
from kvweave.state.background_budget import Spent

RECIPE = "reuse"
pytestmark = pytest.mark.usefixtures("chunks_computed_once")
GLORRIC = "What is the password of Glorric?"
OTHERWISE = "What is known to be the password of Glorric?"


@pytest.mark.parametrize(
    ("one", "other", "changes"),
    [
        ("Who owns the battery retest?", "Who is responsible for the battery retest?", False),
        ("When does the ferry to Skelt leave?", "At what time does the ferry to Skelt depart?", False),
        ("What is the price of the lamp?", "How much does the lamp cost?", False),
        ("Who did Anna pay?", "Who paid Anna?", True),
        ("When does it open?", "When does it not open?", True),
        ("When does the ferry to Skelt leave?", "Where does the ferry to Skelt leave?", True),
        ("When did Ann leave on 3 May?", "When did Ann leave on 4 May?", True),
        ("When did Ann leave?", "When will Ann leave?", True),
        ("When does the library open?", "When does the library close?", True),
        ("How do I get from the pier to town?", "How do I get to the pier from town?", True),
        ("Can members borrow a boat if it rains?", "Can members borrow a boat unless it rains?", True),
        ("When does the library open?", "When does the library open on feast days?", True),
        ("What is the first song of the evening?", "What is the last song of the evening?", True),
        ("When does the ferry to Skelt leave?", "When does the ferry to Brill leave?", True),
    ],
)
def test_what_changes_the_meaning(one, other, changes):
    assert changes_meaning(one, other) == changes
    assert changes_meaning(other, one) == changes


@pytest.fixture
def base(open_kb, documents, monkeypatch):
    """A knowledge base whose model predicts nothing and can put questions in other words."""
    monkeypatch.setattr(background_jobs, "can_paraphrase", lambda model: True)
    monkeypatch.setattr(question_prediction, "prompts_for", lambda model, chat: FewShotPrompts(wordings=9))
    monkeypatch.setattr(QuestionPredictor, "next_job", lambda own: None)
    kb = open_kb(answer_limit_bytes=10**7, idle_power="any", answer_threshold=0.5)
    kb.add(documents)
    return kb


@pytest.fixture
def wordings(monkeypatch):
    """The model's wordings, as a test sets them."""
    lines = []
    monkeypatch.setattr(QuestionPredictor, "reply", lambda own, notes, request, draw: "\n".join(lines))
    return lines


def test_a_wording_gets_the_answer_and_its_user_is_served(base, wordings):
    wordings += [OTHERWISE, "The password of Glorric?"]
    asked = base.ask(GLORRIC)
    report = base.idle()
    assert report.jobs == {"paraphrase": 1}
    assert not base.predictions.predicted.contains("The password of Glorric?")  # is recognised
    before = base.background_budget.worth()
    answer = base.ask(OTHERWISE)
    assert answer.plan.cache_hit.question == OTHERWISE
    assert answer.text == asked.text
    assert base.background_budget.worth().hits == before.hits + 1
    worth = base.predictions.worth.all(None)["paraphrase"]
    assert (worth.ready, worth.asked, worth.hits) == (1, 1, 1)
    assert worth.seconds > 0


def test_wordings_that_ask_something_else_are_dropped_by_reason(base, wordings):
    wordings += [
        "What is the password of Sendbel?",
        "What is not the password of Glorric?",
        "What is the password of the password of the password of Glorric?",
        "What is the simppting password of Glorric?",
        "Was ist das Passwort von Glorric?",
    ]
    base.ask(GLORRIC)
    base.idle()
    totals = base.predictions.predicted.totals()
    assert totals.kept == 0
    assert totals.reasons == {
        "other language": 1,
        "other meaning": 2,
        "repetition": 1,
        "unknown words": 1,
    }
    assert base.answers.totals().questions == 1


def test_a_wording_with_other_evidence_gets_an_answer_of_its_own(base, wordings):
    wordings += [OTHERWISE]
    base.ask(GLORRIC)
    ((_, settings),) = base.answers.most_used()
    found = base.answers.stored(GLORRIC, settings)
    origin = AnswerProvenance(base.state.documents.visible_versions(), found.chunks[:1], found.epoch)
    base.answers.put(GLORRIC, found.vector, settings, "a stale word", found.sources, origin)
    report = base.idle()
    assert report.jobs == {"paraphrase": 1, "population": 1}
    answer = base.ask(OTHERWISE)
    assert answer.plan.cache_hit.question == OTHERWISE
    assert answer.text == base.ask(GLORRIC, cache="off").text


@pytest.mark.parametrize("meanwhile", [False, True])
def test_an_answer_of_a_users_own_is_not_replaced(base, wordings, monkeypatch, meanwhile):
    wordings += [OTHERWISE]
    base.ask(GLORRIC)
    ((_, settings),) = base.answers.most_used()
    found = base.answers.stored(GLORRIC, settings)

    def put_own():
        origin = AnswerProvenance(base.state.documents.visible_versions(), found.chunks, found.epoch)
        base.answers.put(OTHERWISE, found.vector, settings, "the user's own", found.sources, origin)

    if meanwhile:
        screened = Paraphraser._wording

        def late(own, text, answer):
            wording = screened(own, text, answer)
            put_own()
            return wording

        monkeypatch.setattr(Paraphraser, "_wording", late)
    else:
        put_own()
    base.idle()
    assert base.answers.stored(OTHERWISE, settings).text == "the user's own"


def test_a_paused_kind_writes_nothing_until_documents_change(base, wordings, documents):
    wordings += [OTHERWISE]
    base.ask(GLORRIC)
    base.background_budget.add("population", Spent(1, 1.0, 0.0))
    base.predictions.worth.add("paraphrase", ready=1)
    base.predictions.worth.add("paraphrase", seconds=LEAST_WORK)
    base.state.database.execute("UPDATE prediction_worth SET asked = ?", (LEAST_ASKED,))
    assert base.idle().jobs == {}
    status = base.idle_status().predictions
    assert "starts again when documents change" in status["paraphrase"].paused
    assert not status["knowledge"].paused
    (documents / "more.txt").write_text("The lamp on the pier is green.")
    base.add(documents)
    assert base.idle().jobs["paraphrase"] == 1


def test_worked_examples_are_computed_once_and_replies_stay_the_same(base):
    context, options = base.components.request_context(), base._settings.options("Answer.")

    def predictor():
        return QuestionPredictor(
            lambda: context, base.state.documents, base.answers, base.predictions,
            base._settings.recipe_of(options), options, "Answer.", 0.9, 2,
        )  # fmt: skip

    request = FewShotPrompts().ask_for("3 May", "When")
    prompt = request_prompt(context.adapter.template, ["Another note."], request, "Answer.")
    examples = prompt.spans[1].end
    assert examples > prompt.tokens / 2
    replies, rows, own = [], [], predictor()
    for each in (own, own, predictor()):
        with counted_rows(context.adapter) as counted:
            replies.append(each.reply(["Another note."], request, 0))
        rows.append(counted[0])
    assert replies[0] == replies[1] == replies[2]
    # In the last layer only the last row of a prompt goes through attention.
    assert rows[0] == rows[2] == rows[1] + examples * (context.adapter.geometry.layers - 1)
