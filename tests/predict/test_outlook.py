"""What is written down about questions to come, and what of it goes with a document."""

from kvweave.predict.planning import KNOWLEDGE_ROUNDS, FromHistory, FromKnowledge, SumUp, extent, next_job
from kvweave.predict.store import KEPT, ChunkName, PredictionStore

A0, A1, B0 = ChunkName("a:0", "a", 30), ChunkName("a:1", "a", 30), ChunkName("b:0", "b", 30)


class TestHistory:
    def test_it_holds_the_latest_questions_each_once_in_order(self, predictions):
        for question in ("one?", "two?", "three?", "one?"):
            predictions.history.add(question)
        assert predictions.history.recent(2) == ["three?", "one?"]
        assert predictions.history.recent(9) == ["two?", "three?", "one?"]

    def test_it_is_bounded(self, predictions):
        for number in range(KEPT + 5):
            predictions.history.add(f"{number}?")
        assert predictions.history.recent(1000) == [f"{number}?" for number in range(5, KEPT + 5)]

    def test_news_are_what_came_since_it_was_last_seen(self, predictions):
        assert not predictions.history.has_news
        predictions.history.add("one?")
        number = predictions.history.last
        predictions.history.add("two?")  # while the first is being looked at
        predictions.history.seen(number)
        assert predictions.history.has_news
        predictions.history.seen(predictions.history.last)
        assert not predictions.history.has_news
        predictions.history.add("one?")
        assert predictions.history.has_news

    def test_an_emptied_one_starts_anew(self, predictions):
        predictions.history.add("one?")
        predictions.history.seen(predictions.history.last)
        predictions.history.clear()
        assert not predictions.history.has_news
        predictions.history.add("two?")
        assert predictions.history.has_news


class TestAbstract:
    def test_a_part_goes_with_any_document_in_it_and_the_rest_is_summed_up_again(self, predictions):
        predictions.abstract.put([A0, B0], "Both.")
        predictions.abstract.put([A1], "Only a.")
        assert predictions.abstract.lacking([A0, A1, B0]) == []
        predictions.documents_changed(["b"])
        assert [part.text for part in predictions.abstract.parts()] == ["Only a."]
        assert predictions.abstract.lacking([A0, A1]) == [A0]

    def test_chunks_that_say_nothing_are_no_part_and_not_asked_for_again(self, predictions):
        predictions.abstract.put([A0], "")
        assert predictions.abstract.parts() == []
        assert predictions.abstract.lacking([A0]) == []

    def test_rounds_are_counted_while_the_part_is_there(self, predictions):
        predictions.abstract.put([A0], "Something.")
        (part,) = predictions.abstract.parts()
        assert part.rounds == 0
        assert part.versions == {"a"}
        assert predictions.abstract.used(part.id)
        assert predictions.abstract.parts()[0].rounds == 1
        predictions.documents_changed(["a"])
        assert not predictions.abstract.used(part.id)


class TestLedger:
    def test_a_prediction_goes_with_any_document_it_was_made_from(self, predictions, database):
        predictions.ledger.put("What does Anna own?", "knowledge", ["a", "b"])
        predictions.ledger.put("What does Ben own?", "history", ["a"])
        assert predictions.documents_changed(["b"]) == ["What does Anna own?"]
        assert not predictions.ledger.knows("What does Anna own?")
        assert predictions.ledger.knows("What does Ben own?")
        assert database.query("SELECT count(*) FROM predicted_from") == [(1,)]

    def test_what_a_user_has_asked_in_these_words_is_the_users(self, predictions):
        predictions.ledger.put("What does Anna own?", "knowledge", ["a"])
        predictions.asked("What does Anna own?")
        assert predictions.documents_changed(["a"]) == []
        assert not predictions.ledger.drop("What does Anna own?", "unanswerable")
        assert predictions.ledger.totals().kept == 1

    def test_totals_say_what_was_earned(self, predictions):
        for question in ("one?", "two?", "three?"):
            predictions.ledger.put(question, "knowledge", ["a"])
        predictions.ledger.put("four?", "history", ["a"], dropped="unanswerable")
        assert predictions.ledger.drop("three?", "unanswerable")
        predictions.ledger.gave("one?")
        predictions.ledger.gave("one?")
        predictions.ledger.gave("never predicted?")
        totals = predictions.ledger.totals()
        assert totals.predicted == {"history": 0, "knowledge": 2}
        assert (totals.kept, totals.dropped, totals.served, totals.given) == (2, 2, 1, 2)
        assert totals.given_per_question == 1.0

    def test_a_user_who_repeats_a_predicted_question_has_an_answer_of_their_own(self, predictions):
        predictions.ledger.put("one?", "knowledge", ["a"])
        for _ in range(3):
            predictions.ledger.gave("one?")
            predictions.asked("one?")
        assert predictions.ledger.totals().given == 1


class TestPlan:
    @staticmethod
    def job(predictions, *chunks, batch_tokens=100):
        return next_job(predictions, chunks, lambda: batch_tokens, lambda: 2)

    def test_batches_of_chunks_then_rounds_from_each_part_then_nothing(self, predictions):
        chunks = (A0, A1, B0)
        assert self.job(predictions, *chunks, batch_tokens=70) == SumUp((A0, A1))
        predictions.abstract.put((A0, A1), "About a.")
        for number in range(KNOWLEDGE_ROUNDS):
            job = self.job(predictions, *chunks)
            assert isinstance(job, FromKnowledge)
            assert (job.part.text, job.round, job.others) == ("About a.", number, ())
            predictions.abstract.used(job.part.id)
        assert self.job(predictions, *chunks) == SumUp((B0,))
        predictions.abstract.put((B0,), "About b.")
        job = self.job(predictions, *chunks)
        assert (job.part.text, [part.text for part in job.others]) == ("About b.", ["About a."])
        for _ in range(KNOWLEDGE_ROUNDS):
            predictions.abstract.used(job.part.id)
        assert self.job(predictions, *chunks) is None

    def test_one_chunk_is_summed_up_however_long_it_is(self, predictions):
        assert self.job(predictions, A0, A1, batch_tokens=1) == SumUp((A0,))

    def test_new_questions_come_first_once_there_is_something_to_ask_about(self, predictions):
        for question in ("one?", "two?", "three?"):
            predictions.asked(question)
        assert isinstance(self.job(predictions, A0), SumUp)
        predictions.abstract.put((A0,), "About a.")
        job = self.job(predictions, A0)
        assert isinstance(job, FromHistory)
        assert job.earlier == ("two?", "three?")
        predictions.history.seen(job.number)
        assert isinstance(self.job(predictions, A0), FromKnowledge)


def test_answers_are_computed_ahead_up_to_the_cutoff():
    assert extent(threshold=0.85, cutoff=0.87) == "answer"
    assert extent(threshold=0.87, cutoff=0.87) == "answer"
    assert extent(threshold=0.90, cutoff=0.87) == "prefill"


def test_it_outlives_the_process(database):
    predictions = PredictionStore(database)
    predictions.asked("one?")
    predictions.abstract.put([A0], "About a.")
    predictions.ledger.put("two?", "knowledge", ["a"])
    again = PredictionStore(database)
    assert again.history.recent(1) == ["one?"]
    assert again.abstract.parts() == predictions.abstract.parts()
    assert again.ledger.knows("two?")


def test_emptying_it_leaves_nothing(predictions, database):
    predictions.asked("one?")
    predictions.abstract.put([A0], "About a.")
    predictions.ledger.put("two?", "knowledge", ["a"])
    predictions.clear()
    for table in (
        "question_history",
        "abstract_parts",
        "abstract_chunks",
        "predicted_questions",
        "predicted_from",
    ):
        assert database.query(f"SELECT count(*) FROM {table}") == [(0,)]
