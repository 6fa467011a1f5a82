"""What question prediction stores, what is deleted with a document, and which job is due."""

from kvweave.answer_cache.predictions import HISTORY_LIMIT, ChunkRef, PredictionCounts, PredictionStore
from kvweave.background.planning import (
    ROUNDS_PER_PART,
    PredictFromDocuments,
    PredictFromHistory,
    Summarise,
    next_job,
)

A0, A1, B0 = ChunkRef("a:0", "a", 30), ChunkRef("a:1", "a", 30), ChunkRef("b:0", "b", 30)


class TestHistory:
    def test_it_holds_the_latest_questions_each_once_in_order(self, predictions):
        for question in ("one?", "two?", "three?", "one?"):
            predictions.history.add(question)
        assert predictions.history.recent(2) == ["three?", "one?"]
        assert predictions.history.recent(9) == ["two?", "three?", "one?"]

    def test_it_is_bounded(self, predictions):
        for number in range(HISTORY_LIMIT + 5):
            predictions.history.add(f"{number}?")
        assert predictions.history.recent(1000) == [f"{number}?" for number in range(5, HISTORY_LIMIT + 5)]

    def test_a_question_is_new_until_it_is_marked_seen(self, predictions):
        assert not predictions.history.has_new
        predictions.history.add("one?")
        number = predictions.history.last
        predictions.history.add("two?")  # while questions are predicted from the first
        predictions.history.mark_seen(number)
        assert predictions.history.has_new
        predictions.history.mark_seen(predictions.history.last)
        assert not predictions.history.has_new
        predictions.history.add("one?")
        assert predictions.history.has_new

    def test_a_cleared_history_starts_again(self, predictions):
        predictions.history.add("one?")
        predictions.history.mark_seen(predictions.history.last)
        predictions.clear()
        assert not predictions.history.has_new
        predictions.history.add("two?")
        assert predictions.history.has_new


class TestSummary:
    def test_a_part_is_deleted_with_any_of_its_documents_and_the_others_are_missing_again(self, predictions):
        predictions.summary.put([A0, B0], "Both.")
        predictions.summary.put([A1], "Only a.")
        assert predictions.summary.missing([A0, A1, B0]) == []
        predictions.documents_changed(["b"])
        assert [part.text for part in predictions.summary.parts()] == ["Only a."]
        assert predictions.summary.missing([A0, A1]) == [A0]

    def test_chunks_without_content_are_no_part_and_not_summarised_again(self, predictions):
        predictions.summary.put([A0], "")
        assert predictions.summary.parts() == []
        assert predictions.summary.missing([A0]) == []

    def test_rounds_are_counted_while_the_part_exists(self, predictions):
        predictions.summary.put([A0], "Something.")
        (part,) = predictions.summary.parts()
        assert part.rounds == 0
        assert part.versions == {"a"}
        assert predictions.summary.record_round(part.id)
        assert predictions.summary.parts()[0].rounds == 1
        predictions.documents_changed(["a"])
        assert not predictions.summary.record_round(part.id)


class TestPredictedQuestions:
    def test_a_prediction_is_deleted_with_any_document_it_was_made_from(self, predictions, database):
        predictions.predicted.add("What does Anna own?", "knowledge", ["a", "b"])
        predictions.predicted.add("What does Ben own?", "history", ["a"])
        assert predictions.documents_changed(["b"]) == ["What does Anna own?"]
        assert not predictions.predicted.contains("What does Anna own?")
        assert predictions.predicted.contains("What does Ben own?")
        assert database.query("SELECT count(*) FROM predicted_from") == [(1,)]

    def test_a_question_that_a_user_asked_is_not_deleted_or_dropped(self, predictions):
        predictions.predicted.add("What does Anna own?", "knowledge", ["a"])
        predictions.record_question("What does Anna own?")
        assert predictions.documents_changed(["a"]) == []
        assert not predictions.predicted.drop("What does Anna own?", "unanswerable")
        assert predictions.predicted.totals().kept == 1

    def test_totals_count_predictions_and_hits(self, predictions):
        for question in ("one?", "two?", "three?"):
            predictions.predicted.add(question, "knowledge", ["a"])
        predictions.predicted.add("four?", "history", ["a"], dropped="unanswerable")
        assert predictions.predicted.drop("three?", "unanswerable")
        predictions.predicted.record_hit("one?")
        predictions.predicted.record_hit("one?")
        predictions.predicted.record_hit("never predicted?")
        totals = predictions.predicted.totals()
        assert totals.predicted == {"history": 0, "knowledge": 2}
        assert (totals.kept, totals.dropped, totals.served, totals.given) == (2, 2, 1, 2)
        assert totals.given_per_question == 1.0

    def test_what_predictions_were_worth_outlives_them(self, predictions, database):
        predicted = predictions.predicted
        predicted.add("one?", "knowledge", ["a"])
        predicted.add("one?", "history", ["a"])  # known
        predicted.add("two?", "knowledge", ["a"])
        predicted.add("three?", "knowledge", ["a"], dropped="unclear")
        predicted.drop("two?", "unsupported")
        predicted.record_hit("one?")
        predicted.record_hit("one?")
        predicted.record_rejection(["one?", "never predicted?"])
        for question in ("one?", "two?", "two?", "never predicted?"):
            predictions.record_question(question)
        predictions.documents_changed(["a"])
        assert PredictionStore(database).predicted.counts() == PredictionCounts(3, 2, 2, 2, 1)

    def test_only_the_first_answer_to_a_predicted_question_counts_as_given(self, predictions):
        predictions.predicted.add("one?", "knowledge", ["a"])
        for _ in range(3):
            predictions.predicted.record_hit("one?")
            predictions.record_question("one?")
        assert predictions.predicted.totals().given == 1


class TestNextJob:
    @staticmethod
    def job(predictions, *chunks, batch_tokens=100):
        return next_job(predictions, chunks, lambda: batch_tokens, lambda: 2)

    def test_a_round_follows_each_batch_and_later_rounds_follow_the_last_then_nothing(self, predictions):
        chunks = (A0, A1, B0)
        assert self.job(predictions, *chunks, batch_tokens=70) == Summarise((A0, A1))
        predictions.summary.put((A0, A1), "About a.")
        job = self.job(predictions, *chunks)
        assert isinstance(job, PredictFromDocuments)
        assert (job.part.text, job.part.rounds, job.others) == ("About a.", 0, ())
        predictions.summary.record_round(job.part.id)
        assert self.job(predictions, *chunks) == Summarise((B0,))
        predictions.summary.put((B0,), "About b.")
        job = self.job(predictions, *chunks)
        assert (job.part.text, [part.text for part in job.others]) == ("About b.", ["About a."])
        predictions.summary.record_round(job.part.id)
        for number in range(1, ROUNDS_PER_PART):
            for text in ("About a.", "About b."):
                job = self.job(predictions, *chunks)
                assert (job.part.text, job.part.rounds) == (text, number)
                predictions.summary.record_round(job.part.id)
        assert self.job(predictions, *chunks) is None

    def test_documents_take_turns(self, predictions):
        assert self.job(predictions, A0, A1, B0, batch_tokens=30) == Summarise((A0,))
        predictions.summary.put((A0,), "")
        assert self.job(predictions, A0, A1, B0, batch_tokens=30) == Summarise((B0,))
        predictions.summary.put((B0,), "")
        assert self.job(predictions, A0, A1, B0, batch_tokens=30) == Summarise((A1,))

    def test_a_single_chunk_is_summarised_however_long_it_is(self, predictions):
        assert self.job(predictions, A0, A1, batch_tokens=1) == Summarise((A0,))

    def test_new_questions_come_first_once_there_is_a_summary(self, predictions):
        for question in ("one?", "two?", "three?"):
            predictions.record_question(question)
        assert isinstance(self.job(predictions, A0), Summarise)
        predictions.summary.put((A0,), "About a.")
        job = self.job(predictions, A0)
        assert isinstance(job, PredictFromHistory)
        assert job.earlier == ("two?", "three?")
        predictions.history.mark_seen(job.number)
        assert isinstance(self.job(predictions, A0), PredictFromDocuments)


def test_everything_is_there_after_reopening(database):
    predictions = PredictionStore(database)
    predictions.record_question("one?")
    predictions.summary.put([A0], "About a.")
    predictions.predicted.add("two?", "knowledge", ["a"])
    again = PredictionStore(database)
    assert again.history.recent(1) == ["one?"]
    assert again.summary.parts() == predictions.summary.parts()
    assert again.predicted.contains("two?")


def test_clearing_deletes_everything(predictions, database):
    predictions.record_question("one?")
    predictions.summary.put([A0], "About a.")
    predictions.predicted.add("two?", "knowledge", ["a"])
    predictions.clear()
    for table in (
        "question_history",
        "abstract_parts",
        "abstract_chunks",
        "predicted_questions",
        "predicted_from",
    ):
        assert database.query(f"SELECT count(*) FROM {table}") == [(0,)]


def test_the_latest_predictions_with_those_that_were_of_use_first(predictions):
    predicted = predictions.predicted
    for question in ("one?", "two?", "three?"):
        predicted.add(question, "knowledge", ["v1"])
    predicted.add("four?", "history", ["v1"], dropped="unanswerable")
    predicted.record_hit("one?")
    predicted.record_asked("two?")
    found = predicted.latest(10)
    assert {each.question for each in found[:2]} == {"one?", "two?"}
    assert {(each.question, each.origin, each.dropped, each.given, each.asked) for each in found} == {
        ("one?", "knowledge", None, 1, False),
        ("two?", "knowledge", None, 0, True),
        ("three?", "knowledge", None, 0, False),
        ("four?", "history", "unanswerable", 0, False),
    }
    assert len(predicted.latest(3)) == 3
