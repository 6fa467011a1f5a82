"""What each kind of prediction is worth, when it is paused, and when it starts again."""

import pytest

from kvweave.answer_cache.summary import ChunkRef
from kvweave.answer_cache.worth import LEAST_ASKED, LEAST_WORK, WORK_PER_HIT, prediction_status
from kvweave.background.planning import PredictFromDocuments, PredictFromHistory, Summarise, next_job

ANSWER_S = 2.0


def worth(predictions, origin="knowledge"):
    return predictions.worth.all(ANSWER_S)[origin]


def test_questions_count_once_a_prediction_is_ready(predictions):
    predictions.record_question("one?")
    predictions.worth.add("knowledge", ready=1)
    predictions.worth.add("knowledge", seconds=6.0)
    predictions.record_question("two?")
    found = worth(predictions)
    assert (found.ready, found.asked, found.hits, found.seconds, found.work) == (1, 1, 0, 6.0, 3.0)
    assert worth(predictions, "history").asked == 0


def test_a_hit_counts_for_what_its_question_was_predicted_from_until_a_user_asks_it(predictions):
    predictions.predicted.add("one?", "history", ["a"])
    for _ in range(3):
        predictions.record_hit("one?")
        predictions.record_question("one?")
    predictions.record_hit("never predicted?")
    assert worth(predictions, "history").hits == 1
    assert worth(predictions).hits == 0


@pytest.mark.parametrize(
    ("asked", "work", "hits", "answer_s", "paused"),
    [
        (LEAST_ASKED, LEAST_WORK, 0, ANSWER_S, True),
        (LEAST_ASKED - 1, 10 * LEAST_WORK, 0, ANSWER_S, False),
        (10 * LEAST_ASKED, LEAST_WORK - 1, 0, ANSWER_S, False),
        (LEAST_ASKED, WORK_PER_HIT, 1, ANSWER_S, False),
        (LEAST_ASKED, WORK_PER_HIT + 1, 1, ANSWER_S, True),
        (LEAST_ASKED, 10 * LEAST_WORK, 0, None, False),
    ],
)
def test_a_kind_is_paused_only_on_enough_evidence(asked, work, hits, answer_s, paused):
    one = prediction_status(1, asked, hits, work * ANSWER_S, answer_s)
    assert bool(one.paused) == paused
    assert not paused or f"{hits} of {asked} questions" in one.paused


def test_a_change_of_documents_gives_every_kind_its_chance_again(predictions):
    predictions.worth.add("knowledge", ready=1)
    predictions.worth.add("knowledge", seconds=1000.0)
    for number in range(LEAST_ASKED):
        predictions.record_question(f"{number}?")
    assert worth(predictions).paused
    predictions.documents_changed([])
    assert worth(predictions) == prediction_status(0, 0, 0, 0.0, ANSWER_S)


def test_nothing_is_predicted_in_a_paused_way(predictions):
    chunk = ChunkRef("a:0", "a", 30)

    def job(*paused):
        return next_job(predictions, [chunk], lambda: 100, lambda: 2, paused)

    assert isinstance(job("history"), Summarise)
    assert job("knowledge") is None
    predictions.summary.put([chunk], "Something.")
    predictions.record_question("one?")
    assert isinstance(job("knowledge"), PredictFromHistory)
    assert isinstance(job("history"), PredictFromDocuments)
    assert job("knowledge", "history") is None
