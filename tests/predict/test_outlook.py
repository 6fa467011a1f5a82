"""What is written down about questions to come, and what of it goes with a document."""

from kvweave.predict.planning import KNOWLEDGE_ROUNDS, FromHistory, FromKnowledge, SumUp, extent, next_job
from kvweave.predict.store import KEPT, ChunkName, Outlook

A0, A1, B0 = ChunkName("a:0", "a", 30), ChunkName("a:1", "a", 30), ChunkName("b:0", "b", 30)


class TestHistory:
    def test_it_holds_the_latest_questions_each_once_in_order(self, outlook):
        for question in ("one?", "two?", "three?", "one?"):
            outlook.history.add(question)
        assert outlook.history.recent(2) == ["three?", "one?"]
        assert outlook.history.recent(9) == ["two?", "three?", "one?"]

    def test_it_is_bounded(self, outlook):
        for number in range(KEPT + 5):
            outlook.history.add(f"{number}?")
        assert outlook.history.recent(1000) == [f"{number}?" for number in range(5, KEPT + 5)]

    def test_news_are_what_came_since_it_was_last_seen(self, outlook):
        assert not outlook.history.has_news
        outlook.history.add("one?")
        number = outlook.history.last
        outlook.history.add("two?")  # while the first is being looked at
        outlook.history.seen(number)
        assert outlook.history.has_news
        outlook.history.seen(outlook.history.last)
        assert not outlook.history.has_news
        outlook.history.add("one?")
        assert outlook.history.has_news

    def test_an_emptied_one_starts_anew(self, outlook):
        outlook.history.add("one?")
        outlook.history.seen(outlook.history.last)
        outlook.history.clear()
        assert not outlook.history.has_news
        outlook.history.add("two?")
        assert outlook.history.has_news


class TestAbstract:
    def test_a_part_goes_with_any_document_in_it_and_the_rest_is_summed_up_again(self, outlook):
        outlook.abstract.put([A0, B0], "Both.")
        outlook.abstract.put([A1], "Only a.")
        assert outlook.abstract.lacking([A0, A1, B0]) == []
        outlook.documents_changed(["b"])
        assert [part.text for part in outlook.abstract.parts()] == ["Only a."]
        assert outlook.abstract.lacking([A0, A1]) == [A0]

    def test_chunks_that_say_nothing_are_no_part_and_not_asked_for_again(self, outlook):
        outlook.abstract.put([A0], "")
        assert outlook.abstract.parts() == []
        assert outlook.abstract.lacking([A0]) == []

    def test_rounds_are_counted_while_the_part_is_there(self, outlook):
        outlook.abstract.put([A0], "Something.")
        (part,) = outlook.abstract.parts()
        assert part.rounds == 0
        assert part.versions == {"a"}
        assert outlook.abstract.used(part.id)
        assert outlook.abstract.parts()[0].rounds == 1
        outlook.documents_changed(["a"])
        assert not outlook.abstract.used(part.id)


class TestLedger:
    def test_a_prediction_goes_with_any_document_it_was_made_from(self, outlook, database):
        outlook.ledger.put("What does Anna own?", "knowledge", ["a", "b"])
        outlook.ledger.put("What does Ben own?", "history", ["a"])
        assert outlook.documents_changed(["b"]) == ["What does Anna own?"]
        assert not outlook.ledger.knows("What does Anna own?")
        assert outlook.ledger.knows("What does Ben own?")
        assert database.query("SELECT count(*) FROM predicted_from") == [(1,)]

    def test_what_a_user_has_asked_in_these_words_is_the_users(self, outlook):
        outlook.ledger.put("What does Anna own?", "knowledge", ["a"])
        outlook.asked("What does Anna own?")
        assert outlook.documents_changed(["a"]) == []
        assert not outlook.ledger.drop("What does Anna own?", "unanswerable")
        assert outlook.ledger.totals().kept == 1

    def test_totals_say_what_was_earned(self, outlook):
        for question in ("one?", "two?", "three?"):
            outlook.ledger.put(question, "knowledge", ["a"])
        outlook.ledger.put("four?", "history", ["a"], dropped="unanswerable")
        assert outlook.ledger.drop("three?", "unanswerable")
        outlook.ledger.gave("one?")
        outlook.ledger.gave("one?")
        outlook.ledger.gave("never predicted?")
        totals = outlook.ledger.totals()
        assert totals.predicted == {"history": 0, "knowledge": 2}
        assert (totals.kept, totals.dropped, totals.served, totals.given) == (2, 2, 1, 2)
        assert totals.given_per_question == 1.0

    def test_a_user_who_repeats_a_predicted_question_has_an_answer_of_their_own(self, outlook):
        outlook.ledger.put("one?", "knowledge", ["a"])
        for _ in range(3):
            outlook.ledger.gave("one?")
            outlook.asked("one?")
        assert outlook.ledger.totals().given == 1


class TestPlan:
    @staticmethod
    def job(outlook, *chunks, batch_tokens=100):
        return next_job(outlook, chunks, lambda: batch_tokens, lambda: 2)

    def test_batches_of_chunks_then_rounds_from_each_part_then_nothing(self, outlook):
        chunks = (A0, A1, B0)
        assert self.job(outlook, *chunks, batch_tokens=70) == SumUp((A0, A1))
        outlook.abstract.put((A0, A1), "About a.")
        for number in range(KNOWLEDGE_ROUNDS):
            job = self.job(outlook, *chunks)
            assert isinstance(job, FromKnowledge)
            assert (job.part.text, job.round, job.others) == ("About a.", number, ())
            outlook.abstract.used(job.part.id)
        assert self.job(outlook, *chunks) == SumUp((B0,))
        outlook.abstract.put((B0,), "About b.")
        job = self.job(outlook, *chunks)
        assert (job.part.text, [part.text for part in job.others]) == ("About b.", ["About a."])
        for _ in range(KNOWLEDGE_ROUNDS):
            outlook.abstract.used(job.part.id)
        assert self.job(outlook, *chunks) is None

    def test_one_chunk_is_summed_up_however_long_it_is(self, outlook):
        assert self.job(outlook, A0, A1, batch_tokens=1) == SumUp((A0,))

    def test_new_questions_come_first_once_there_is_something_to_ask_about(self, outlook):
        for question in ("one?", "two?", "three?"):
            outlook.asked(question)
        assert isinstance(self.job(outlook, A0), SumUp)
        outlook.abstract.put((A0,), "About a.")
        job = self.job(outlook, A0)
        assert isinstance(job, FromHistory)
        assert job.earlier == ("two?", "three?")
        outlook.history.seen(job.number)
        assert isinstance(self.job(outlook, A0), FromKnowledge)


def test_answers_are_computed_ahead_up_to_the_cutoff():
    assert extent(threshold=0.85, cutoff=0.87) == "answer"
    assert extent(threshold=0.87, cutoff=0.87) == "answer"
    assert extent(threshold=0.90, cutoff=0.87) == "prefill"


def test_it_outlives_the_process(database):
    outlook = Outlook(database)
    outlook.asked("one?")
    outlook.abstract.put([A0], "About a.")
    outlook.ledger.put("two?", "knowledge", ["a"])
    again = Outlook(database)
    assert again.history.recent(1) == ["one?"]
    assert again.abstract.parts() == outlook.abstract.parts()
    assert again.ledger.knows("two?")


def test_emptying_it_leaves_nothing(outlook, database):
    outlook.asked("one?")
    outlook.abstract.put([A0], "About a.")
    outlook.ledger.put("two?", "knowledge", ["a"])
    outlook.clear()
    for table in (
        "question_history",
        "abstract_parts",
        "abstract_chunks",
        "predicted_questions",
        "predicted_from",
    ):
        assert database.query(f"SELECT count(*) FROM {table}") == [(0,)]
