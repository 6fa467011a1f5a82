"""Cached answers through the public interface: reuse, storage, invalidation, and that no model is loaded."""

import pytest

import kvweave
from kvweave.background import jobs
from kvweave.background.jobs import JobSource
from kvweave.config import GenerationConfig
from kvweave.options import AskOptions
from kvweave.results import Plan

RECIPE = "reuse"
pytestmark = pytest.mark.usefixtures("chunks_computed_once")

GLORRIC = "What is the password of Glorric?"
AGAIN = "The password of Glorric?"


@pytest.fixture
def base(open_kb, documents):
    """A knowledge base with three documents and an answer cache."""
    kb = open_kb(answer_limit_bytes=10**7)
    kb.add(documents)
    return kb


def is_cached(answer):
    return answer.plan.cache_hit is not None


def test_the_same_question_is_answered_from_the_cache_and_says_so(base):
    first = base.ask(GLORRIC)
    assert not is_cached(first)
    again = base.ask(GLORRIC)
    assert again.plan.cache_hit.question == GLORRIC
    assert again.plan.cache_hit.similarity == 1
    assert (again.text, again.sources) == (first.text, first.sources)
    assert again.plan.spans == ()
    assert again.timing.ttft_s == again.timing.total_s > 0


def test_other_capitals_get_the_cached_answer_unless_they_change_a_word(base):
    base.ask(GLORRIC)
    assert is_cached(base.ask(GLORRIC.upper()))
    assert is_cached(base.ask(GLORRIC.lower()))
    base.ask("What does the password of Glorric tell US staff?")
    assert not is_cached(base.ask("What does the password of Glorric tell us staff?"))
    assert not is_cached(base.ask("what does the password of glorric tell us STAFF?"))


def test_a_paraphrase_gets_the_cached_answer_and_is_pending(base):
    base.ask(GLORRIC)
    assert base.answers.pending() == []
    stream = base.stream(AGAIN)
    assert "".join(stream) == "walnut"
    assert 0.85 <= stream.answer.plan.cache_hit.similarity < 1
    assert stream.explain() == ()
    (waiting,) = base.answers.pending()
    assert (waiting.question, waiting.reason) == (AGAIN, "matched")
    own = base.ask(AGAIN, cache="refresh")
    assert not is_cached(own)
    assert base.answers.pending() == []
    assert base.ask(AGAIN).plan.cache_hit.question == AGAIN


def test_an_answer_that_goes_round_in_circles_does_not_replace_a_given_one(base, monkeypatch):
    base.ask(GLORRIC)
    assert base.ask(AGAIN).plan.cache_hit.question == GLORRIC
    monkeypatch.setattr(jobs, "repeats", lambda text: True)
    monkeypatch.setattr(JobSource, "_prediction", lambda source: None)
    assert base.idle().jobs["answers"] == 1
    assert base.answers.pending() == []
    again = base.ask(AGAIN)
    assert (again.plan.cache_hit.question, again.text) == (GLORRIC, "walnut")


def test_an_unusable_cached_answer_serves_as_a_draft(open_kb, documents):
    base = open_kb(answer_limit_bytes=10**7, answer_threshold=0.5, prompt_lookup_tokens=0)
    base.add(documents)
    first = base.ask(GLORRIC)
    other = "Which password was noted for Glorric?"
    alone = base.ask(other, cache="off")
    assert alone.timing.accepted_draft_tokens == 0
    answer = base.ask(other)
    assert not is_cached(answer)
    assert answer.text == alone.text == first.text
    assert answer.timing.accepted_draft_tokens == answer.timing.answer_tokens - 1 > 0


def test_drafts_are_looked_up_in_the_prompt(open_kb, documents):
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
def test_another_question_gets_no_cached_answer(base, other):
    base.ask(GLORRIC)
    assert not is_cached(base.ask(other))


def test_other_settings_and_sampling_get_no_cached_answer(base, open_kb):
    base.ask(GLORRIC)
    assert not is_cached(base.ask(GLORRIC, recipe="full"))
    assert not is_cached(base.ask(GLORRIC, ratio=1.0))
    assert not is_cached(base.ask(GLORRIC, top_k=1))
    assert is_cached(base.ask(GLORRIC, top_k=1))
    sampled = open_kb(answer_limit_bytes=10**7, temperature=0.5)
    assert not is_cached(sampled.ask(GLORRIC))
    assert not is_cached(sampled.ask(GLORRIC))


def test_with_the_cache_off_answers_are_neither_reused_nor_stored(base):
    base.ask(GLORRIC, cache="off")
    assert not is_cached(base.ask(GLORRIC))
    assert not is_cached(base.ask(GLORRIC, cache="off"))


def test_time_sensitive_answers_are_never_stored(base):
    asked = "What is the password of Glorric today?"
    base.ask(asked)
    assert not is_cached(base.ask(asked))
    assert base.answers.totals().questions == 0


def test_a_limit_of_zero_turns_the_cache_off(open_kb, documents):
    kb = open_kb(answer_limit_bytes=0)
    kb.add(documents)
    kb.ask(GLORRIC)
    assert not is_cached(kb.ask(GLORRIC))


def test_a_cached_answer_to_the_same_words_loads_no_model_and_no_index(base, open_kb, monkeypatch):
    base.ask(GLORRIC)
    base.close()
    again = open_kb(answer_limit_bytes=10**7)

    def refuse(*args, **kwargs):
        raise AssertionError("was loaded")

    monkeypatch.setattr("kvweave.models.loading.load_any_model", refuse)
    monkeypatch.setattr("kvweave.embedding.TextEncoder.load", refuse)
    monkeypatch.setattr("kvweave.embedding.TextEncoder.encode", refuse)
    monkeypatch.setattr("kvweave.index.vector_index.VectorIndex.search", refuse)
    assert again.ask(GLORRIC).text == "walnut"


def test_changing_a_document_deletes_its_answers_in_the_same_commit(base, documents):
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
    assert not is_cached(answer)
    assert answer.text == "needle"
    assert base.answers.pending() == []


def test_removing_a_document_deletes_its_answers(base, documents):
    base.ask(GLORRIC)
    base.remove(documents / "passwords.md")
    answer = base.ask(GLORRIC)
    assert not is_cached(answer)
    assert answer.text != "walnut"


def test_an_answer_stays_when_another_document_is_removed(base, documents):
    source = {s.document for s in base.ask(GLORRIC, top_k=1).sources}
    assert source == {str(documents / "passwords.md")}
    base.remove(documents / "supper.md")
    assert is_cached(base.ask(GLORRIC, top_k=1))


def test_a_new_chunk_among_the_top_ones_invalidates_the_answer(base, documents):
    base.ask(GLORRIC, top_k=1)
    (documents / "news.txt").write_text("What is the password of Glorric? The password of Glorric is needle.")
    base.add(documents)
    answer = base.ask(GLORRIC, top_k=1)
    assert not is_cached(answer)
    assert answer.text == "needle"


def test_other_new_chunks_leave_the_answer_and_are_checked_once(base, documents, monkeypatch):
    base.ask(GLORRIC, top_k=1)
    (documents / "news.txt").write_text("The guest was Bertnis. She ordered the fig.")
    base.add(documents)
    assert is_cached(base.ask(GLORRIC, top_k=1))
    monkeypatch.setattr("kvweave.index.vector_index.VectorIndex.search", None)
    assert is_cached(base.ask(GLORRIC, top_k=1))


def test_refreshing_finds_invalid_answers_ahead_of_time(base, documents):
    base.ask(GLORRIC, top_k=1)
    base.ask("What did the guest order?", top_k=1)
    (documents / "news.txt").write_text("What is the password of Glorric? The password of Glorric is needle.")
    base.add(documents)
    assert base.refresh_answers() == 1
    assert [(one.question, one.reason) for one in base.answers.pending()] == [(GLORRIC, "stale")]
    assert base.refresh_answers() == 0
    waiting = base.answers.pending()[0]
    assert base.ask(waiting.question, top_k=waiting.options.top_k).text == "needle"
    assert base.answers.pending() == []


def test_an_answer_from_a_document_that_is_removed_meanwhile_is_not_stored(base, documents):
    stream = base.stream(GLORRIC)
    pieces = iter(stream)
    next(pieces)
    base.remove(documents / "passwords.md")
    assert "".join(pieces) is not None
    assert base.answers.totals().questions == 0


def test_an_answer_is_checked_against_documents_added_while_it_was_decoded(base, documents):
    stream = base.stream(GLORRIC, top_k=1)
    pieces = iter(stream)
    next(pieces)
    (documents / "news.txt").write_text("What is the password of Glorric? The password of Glorric is needle.")
    base.add(documents)
    "".join(pieces)
    assert stream.answer.text == "walnut"
    answer = base.ask(GLORRIC, top_k=1)
    assert not is_cached(answer)
    assert answer.text == "needle"


def test_an_answer_that_was_not_read_to_its_end_is_not_stored(base):
    pieces = iter(base.stream(GLORRIC))
    next(pieces)
    pieces.close()
    assert base.answers.totals().questions == 0


def test_emptying_the_knowledge_base_empties_the_answer_cache(base, documents):
    base.ask(GLORRIC)
    base.remove_all()
    assert base.answers.totals().questions == 0
    (documents / "passwords.md").write_text("The password of Glorric is needle.")
    base.add(documents)
    assert base.ask(GLORRIC).text == "needle"


def test_an_unwritable_cache_does_not_fail_the_answer(base, monkeypatch, caplog):
    def fail(*args, **kwargs):
        raise kvweave.errors.StoreBusy("locked")

    monkeypatch.setattr(base.answers, "put", fail)
    assert base.ask(GLORRIC).text == "walnut"
    assert "answer cache could not be written to: locked" in caplog.text


def test_two_open_knowledge_bases_share_the_answer_cache(base, open_kb, documents):
    other = open_kb(answer_limit_bytes=10**7)
    base.ask(GLORRIC)
    assert is_cached(other.ask(GLORRIC))
    other.remove(documents / "passwords.md")
    assert not is_cached(base.ask(GLORRIC))


def test_the_plan_of_a_cached_answer_counts_nothing(base):
    base.ask(GLORRIC)
    plan: Plan = base.ask(GLORRIC).plan
    assert (plan.prompt_tokens, plan.fresh_tokens, plan.reused_share) == (0, 0, 0.0)


def cache_hit(base):
    """Return the hit in the answer cache, without a check against the index."""
    chunks = sum(document.chunks for document in base.documents())
    top_k = min(base.config.retrieval.top_k, chunks)
    longest = base.config.generation.max_new_tokens
    asked = AskOptions(base.config.recipe, top_k, generation=GenerationConfig(max_new_tokens=longest))
    return base.answers.find(GLORRIC, None, asked, 0.85)
