"""The client of `kvweave bench serve`: times of a streamed answer, and what counts as refused or failed."""

import pytest

from kvweave_lab.bench.serving.client import Call, run_in_turn, run_open_loop
from lab_support.served_fake import STALL_S, TOKEN_S, TOKENS, fake_server


@pytest.fixture(scope="module")
def url():
    with fake_server() as address:
        yield address


def call(question):
    return Call("/v1/chat/completions", {"messages": [{"role": "user", "content": question}]})


def one(url, question):
    (reply,) = run_in_turn(url, [call(question)])
    return reply


def test_an_answer_is_timed_and_counted(url):
    reply = one(url, "hello")
    assert (reply.outcome, reply.detail) == ("answered", "")
    assert (reply.prompt_tokens, reply.cached_tokens, reply.output_tokens) == (40, 30, len(TOKENS))
    assert (
        TOKEN_S * 0.9 < reply.ttft_s < reply.total_s
    )  # neither the ping nor the empty first piece is a token
    assert TOKEN_S * 0.9 < reply.tpot_s < 5 * TOKEN_S
    assert reply.total_s > len(TOKENS) * TOKEN_S * 0.9


def test_the_longest_gap_between_tokens_is_seen_and_neither_the_first_nor_the_end_is_one(url):
    reply = one(url, "stall")
    assert STALL_S * 0.9 < reply.longest_gap_s < STALL_S + 0.25
    assert reply.tpot_s < reply.longest_gap_s  # which the mean hides
    assert one(url, "busy").longest_gap_s is None


@pytest.mark.parametrize(("question", "status", "says_when"), [("busy", "429", True), ("full", "503", False)])
def test_refusals_are_counted_apart(url, question, status, says_when):
    reply = one(url, question)
    assert (reply.outcome, reply.retry_after, reply.ttft_s) == ("refused", says_when, None)
    assert reply.detail.startswith(status)


@pytest.mark.parametrize(
    ("question", "detail"),
    [
        ("crash", "500: Internal Server Error"),
        ("error", "the disk is full"),
        ("break", "RemoteProtocolError"),
        ("unended", "without [DONE]"),
        ("unfinished", "no finish_reason"),
    ],
)
def test_an_answer_that_is_not_whole_has_failed(url, question, detail):
    reply = one(url, question)
    assert (reply.outcome, reply.ttft_s) == ("failed", None)
    assert detail in reply.detail


def test_a_server_that_is_not_there_is_a_failure():
    assert one("http://127.0.0.1:9", "hello").outcome == "failed"


def test_requests_are_sent_when_they_are_due_whatever_became_of_others(url):
    moments = [0.0, 0.1, 0.1, 0.3]
    replies = run_open_loop(url, [call("hello")] * 3 + [call("busy")], moments)
    assert [reply.number for reply in replies] == [0, 1, 2, 3]
    assert [reply.arrived_s for reply in replies] == pytest.approx(moments, abs=1e-6)
    assert [reply.outcome for reply in replies] == ["answered"] * 3 + ["refused"]
