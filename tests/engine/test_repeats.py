"""Questions asked again, through the public face: given, kept, forgotten, and the model left alone."""

import pytest

import kvweave
from kvweave.answer_cache.records import AnswerSettings
from kvweave.results import Plan

GLORRIC = "What is the password of Glorric?"
AGAIN = "Please tell me the password of Glorric."


@pytest.fixture
def base(open_kb, documents):
    """A knowledge base with three documents and the answer bank on."""
    kb = open_kb(answer_limit_bytes=10**7)
    kb.add(documents)
    return kb


def is_banked(answer):
    return answer.plan.cache_hit is not None


def test_the_same_question_is_answered_from_the_bank_and_says_so(base):
    first = base.ask(GLORRIC)
    assert not is_banked(first)
    again = base.ask(GLORRIC)
    assert again.plan.cache_hit.question == GLORRIC
    assert again.plan.cache_hit.similarity == 1
    assert (again.text, again.sources) == (first.text, first.sources)
    assert again.plan.spans == ()
    assert again.timing.ttft_s == again.timing.total_s > 0


def test_a_paraphrase_gets_the_answer_and_waits_for_its_own(base):
    base.ask(GLORRIC)
    assert base.answers.pending() == []
    stream = base.stream(AGAIN)
    assert "".join(stream) == "walnut"
    assert 0.85 <= stream.answer.plan.cache_hit.similarity < 1
    assert stream.explain() == ()
    (waiting,) = base.answers.pending()
    assert (waiting.question, waiting.reason) == (AGAIN, "matched")
    own = base.ask(AGAIN, cache="refresh")
    assert not is_banked(own)
    assert base.answers.pending() == []
    assert base.ask(AGAIN).plan.cache_hit.question == AGAIN


def test_an_answer_that_may_not_be_given_is_a_draft_of_the_same_one(open_kb, documents):
    base = open_kb(answer_limit_bytes=10**7, answer_threshold=0.5, prompt_lookup_tokens=0)
    base.add(documents)
    first = base.ask(GLORRIC)
    other = "Which password was noted for Glorric?"
    alone = base.ask(other, cache="off")
    assert alone.timing.accepted_draft_tokens == 0
    answer = base.ask(other)
    assert not is_banked(answer)
    assert answer.text == alone.text == first.text
    assert answer.timing.accepted_draft_tokens == answer.timing.answer_tokens - 1 > 0


def test_the_prompt_is_a_draft_of_what_it_is_asked_for(open_kb, documents):
    plain, quoting = (open_kb(answer_limit_bytes=0, prompt_lookup_tokens=most) for most in (0, 31))
    plain.add(documents)
    alone, answer = plain.ask(GLORRIC), quoting.ask(GLORRIC)
    assert answer.text == alone.text
    assert (alone.timing.accepted_draft_tokens, answer.timing.accepted_draft_tokens) == (
        0,
        answer.timing.answer_tokens - 1,
    )


@pytest.mark.parametrize(
    "other",
    [
        "What is the password of Plabry?",
        "What is the badge number of Glorric?",
        "What is not the password of Glorric?",
        "Who has the password of Glorric?",
        "What was the password of Glorric?",
    ],
)
def test_another_question_does_not(base, other):
    base.ask(GLORRIC)
    assert not is_banked(base.ask(other))


def test_other_settings_and_sampling_do_not(base, open_kb):
    base.ask(GLORRIC)
    assert not is_banked(base.ask(GLORRIC, recipe="full"))
    assert not is_banked(base.ask(GLORRIC, ratio=1.0))
    assert not is_banked(base.ask(GLORRIC, top_k=1))
    assert is_banked(base.ask(GLORRIC, top_k=1))
    sampled = open_kb(answer_limit_bytes=10**7, temperature=0.5)
    assert not is_banked(sampled.ask(GLORRIC))
    assert not is_banked(sampled.ask(GLORRIC))


def test_what_is_to_be_ignored_is_neither_given_nor_kept(base):
    base.ask(GLORRIC, cache="off")
    assert not is_banked(base.ask(GLORRIC))
    assert not is_banked(base.ask(GLORRIC, cache="off"))


def test_what_depends_on_today_is_never_kept(base):
    asked = "What is the password of Glorric today?"
    base.ask(asked)
    assert not is_banked(base.ask(asked))
    assert base.answers.totals().questions == 0


def test_without_room_there_is_no_bank(open_kb, documents):
    kb = open_kb(answer_limit_bytes=0)
    kb.add(documents)
    kb.ask(GLORRIC)
    assert not is_banked(kb.ask(GLORRIC))


def test_a_banked_answer_needs_neither_model_nor_index_nor_vectors_for_the_same_words(
    base, open_kb, monkeypatch
):
    base.ask(GLORRIC)
    base.close()
    again = open_kb(answer_limit_bytes=10**7)

    def refuse(*args, **kwargs):
        raise AssertionError("was loaded")

    monkeypatch.setattr("kvweave.models.loading.load_model", refuse)
    monkeypatch.setattr("kvweave.embedding.TextEncoder.load", refuse)
    monkeypatch.setattr("kvweave.embedding.TextEncoder.encode", refuse)
    monkeypatch.setattr("kvweave.index.vector_index.VectorIndex.search", refuse)
    assert again.ask(GLORRIC).text == "walnut"


def test_a_changed_document_takes_its_answers_along_in_the_same_commit(base, documents):
    base.ask(GLORRIC)
    assert cache_hit(base) is not None
    (documents / "passwords.md").write_text("The password of Glorric is needle.")

    class Stop(Exception):
        pass

    def stop_after_the_commit(stage, done, total):
        if stage == "reading" and done == total:
            raise Stop

    with pytest.raises(Stop):
        base.add(documents, progress=stop_after_the_commit)
    assert cache_hit(base) is None
    assert [waiting.reason for waiting in base.answers.pending()] == ["changed"]
    answer = base.ask(GLORRIC)
    assert not is_banked(answer)
    assert answer.text == "needle"
    assert base.answers.pending() == []


def test_a_removed_document_takes_its_answers_along(base, documents):
    base.ask(GLORRIC)
    base.remove(documents / "passwords.md")
    answer = base.ask(GLORRIC)
    assert not is_banked(answer)
    assert answer.text != "walnut"


def test_a_removed_document_that_an_answer_does_not_rest_on_leaves_it(base, documents):
    source = {s.document for s in base.ask(GLORRIC, top_k=1).sources}
    assert source == {str(documents / "passwords.md")}
    base.remove(documents / "supper.md")
    assert is_banked(base.ask(GLORRIC, top_k=1))


def test_a_new_chunk_among_the_best_makes_the_answer_stale_before_anyone_gets_it(base, documents):
    base.ask(GLORRIC, top_k=1)
    (documents / "news.txt").write_text("What is the password of Glorric? The password of Glorric is needle.")
    base.add(documents)
    answer = base.ask(GLORRIC, top_k=1)
    assert not is_banked(answer)
    assert answer.text == "needle"


def test_new_chunks_elsewhere_leave_it_and_are_looked_at_once(base, documents, monkeypatch):
    base.ask(GLORRIC, top_k=1)
    (documents / "news.txt").write_text("The guest was Bertnis. She ordered the fig.")
    base.add(documents)
    assert is_banked(base.ask(GLORRIC, top_k=1))
    monkeypatch.setattr("kvweave.index.vector_index.VectorIndex.search", None)
    assert is_banked(base.ask(GLORRIC, top_k=1))


def test_refreshing_finds_what_was_overtaken_ahead_of_time(base, documents):
    base.ask(GLORRIC, top_k=1)
    base.ask("What did the guest order?", top_k=1)
    (documents / "news.txt").write_text("What is the password of Glorric? The password of Glorric is needle.")
    base.add(documents)
    assert base.refresh_answers() == 1
    assert [(one.question, one.reason) for one in base.answers.pending()] == [(GLORRIC, "stale")]
    assert base.refresh_answers() == 0
    waiting = base.answers.pending()[0]
    assert base.ask(waiting.question, top_k=waiting.settings.top_k).text == "needle"
    assert base.answers.pending() == []


def test_an_answer_from_a_document_that_is_removed_meanwhile_is_not_kept(base, documents):
    stream = base.stream(GLORRIC)
    pieces = iter(stream)
    next(pieces)
    base.remove(documents / "passwords.md")
    assert "".join(pieces) is not None
    assert base.answers.totals().questions == 0


def test_an_answer_during_which_a_document_came_is_looked_at_before_it_is_given(base, documents):
    stream = base.stream(GLORRIC, top_k=1)
    pieces = iter(stream)
    next(pieces)
    (documents / "news.txt").write_text("What is the password of Glorric? The password of Glorric is needle.")
    base.add(documents)
    "".join(pieces)
    assert stream.answer.text == "walnut"
    answer = base.ask(GLORRIC, top_k=1)
    assert not is_banked(answer)
    assert answer.text == "needle"


def test_an_answer_that_was_not_read_to_its_end_is_not_kept(base):
    pieces = iter(base.stream(GLORRIC))
    next(pieces)
    pieces.close()
    assert base.answers.totals().questions == 0


def test_emptying_the_knowledge_base_empties_the_bank(base, documents):
    base.ask(GLORRIC)
    base.remove_all()
    assert base.answers.totals().questions == 0
    (documents / "passwords.md").write_text("The password of Glorric is needle.")
    base.add(documents)
    assert base.ask(GLORRIC).text == "needle"


def test_a_bank_that_cannot_be_written_to_does_not_take_the_answer_back(base, monkeypatch, caplog):
    def fail(*args, **kwargs):
        raise kvweave.errors.StoreBusy("locked")

    monkeypatch.setattr(base.answers, "put", fail)
    assert base.ask(GLORRIC).text == "walnut"
    assert "answer cache could not be written to: locked" in caplog.text


def test_two_open_knowledge_bases_share_the_bank(base, open_kb, documents):
    other = open_kb(answer_limit_bytes=10**7)
    base.ask(GLORRIC)
    assert is_banked(other.ask(GLORRIC))
    other.remove(documents / "passwords.md")
    assert not is_banked(base.ask(GLORRIC))


def test_a_plan_without_a_prompt_counts_nothing(base):
    base.ask(GLORRIC)
    plan: Plan = base.ask(GLORRIC).plan
    assert (plan.prompt_tokens, plan.fresh_tokens, plan.reused_share) == (0, 0, 0.0)


def cache_hit(base):
    """What the bank itself would give, whatever the index says."""
    chunks = sum(document.chunks for document in base.documents())
    top_k = min(base.config.retrieval.top_k, chunks)
    asked = AnswerSettings(base.config.recipe, None, None, top_k, None, False, None, None)
    return base.answers.find(GLORRIC, None, asked, 0.85)
