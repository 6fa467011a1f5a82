"""A conversation resumes where it was left, also in another process."""

import errno
import os
from dataclasses import replace
from functools import partial

import pytest
import torch

from kvweave.answering.generation import Decoded
from kvweave.chat import Conversation, start_over
from kvweave.decode.handoff import TurnAppender
from kvweave.decode.settings import OffloadSettings
from kvweave.errors import InvalidRequest, PromptTooLong, StoreError
from kvweave.state.conversation_log import read_state, write_state
from kvweave.testing import end_only_at, tiny_adapter
from kvweave.types import Prompt
from support.tiny_conversations import CHUNKS, KV, WHOLE, follows, opened, say

QUESTIONS = ("Where is it?", "And the other?", "Is that all?", "Are you sure?")


@pytest.fixture(scope="module")
def adapter():
    return tiny_adapter("qwen2")


@pytest.fixture(scope="module")
def whole(adapter, tmp_path_factory):
    """The replies to all questions with everything in reach; the first ones are those to the first questions."""
    with opened(adapter, tmp_path_factory.mktemp("whole") / "talk", WHOLE) as talk:
        return say(talk, QUESTIONS)


def test_resuming_between_turns_gives_the_same_replies(adapter, tmp_path):
    with opened(adapter, tmp_path / "whole") as talk:
        expected = say(talk, QUESTIONS)
        tokens = talk.token_ids
    got = []
    for question in QUESTIONS:
        with opened(adapter, tmp_path / "parts") as talk:
            got += say(talk, [question])
    assert got == expected
    assert talk.token_ids == tokens


def test_the_whole_budget_gives_the_replies_of_plain_transformers(adapter, tmp_path):
    with opened(adapter, tmp_path, WHOLE) as talk:
        say(talk, QUESTIONS[:2])
    text, turn = talk.token_ids, adapter.template.render_turn(Prompt(QUESTIONS[1], (), "Read.")).token_ids
    places = [at for at in range(len(text)) if tuple(text[at : at + len(turn)]) == turn]
    assert len(places) == 1, "the second turn is in the text once, without chunks"
    start = places[0] + len(turn)
    with torch.no_grad():
        logits = adapter.model(torch.tensor([text])).logits[0]
    assert logits[start - 1 : len(text) - 1].argmax(-1).tolist() == text[start:]


def test_a_turn_whose_answer_is_known_is_continued_as_by_plain_transformers(adapter, tmp_path):
    with opened(adapter, tmp_path, WHOLE, visible=lambda: {"v1"}) as talk:
        assert list(talk.send_known(QUESTIONS[0], "In the hall.", ["v1"])) == ["In the hall."]
        assert "In the hall." in talk.text
    with opened(adapter, tmp_path, WHOLE, visible=lambda: {"v1"}) as talk:
        say(talk, QUESTIONS[1:2])
        given_up = talk.send_known(QUESTIONS[2], "Yes.")
        next(given_up)
        given_up.close()
        text = list(talk.token_ids)
        assert list(talk.send_known(QUESTIONS[2], "Yes.")) == ["Yes."]
        assert talk.token_ids[: len(text)] == text
        say(talk, QUESTIONS[3:])
    turn = list(adapter.template.render_turn(Prompt(QUESTIONS[1], CHUNKS, "Read.")).token_ids)
    head = next(at + len(turn) for at in range(len(text)) if text[at : at + len(turn)] == turn)
    with torch.no_grad():
        logits = adapter.model(torch.tensor([text])).logits[0]
    assert logits[head - 1 : -1].argmax(-1).tolist() == text[head:]
    assert read_state(tmp_path).versions == {"v1"}
    with opened(adapter, tmp_path, WHOLE, visible=lambda: {"v2"}) as talk:
        assert talk.text == ""


def test_a_conversation_that_was_not_closed_is_recomputed(adapter, whole, tmp_path):
    talk = opened(adapter, tmp_path / "killed", WHOLE)
    got = say(talk, QUESTIONS[:2])
    talk.held.close()  # as after a kill: no index, and the lock is gone
    talk.open_files.close()
    with opened(adapter, tmp_path / "killed", WHOLE) as talk:
        assert got + say(talk, QUESTIONS[2:3]) == whole[:3]


def test_files_of_another_text_are_recomputed(adapter, tmp_path, monkeypatch):
    """The files hold a text of the same length with other tokens, so they are not used."""
    with opened(adapter, tmp_path, WHOLE) as talk:
        say(talk, QUESTIONS[:2])
    said = read_state(tmp_path)
    write_state(tmp_path, replace(said, token_ids=said.token_ids[::-1]))
    computed, original = [], Conversation.recompute
    monkeypatch.setattr(
        Conversation, "recompute", lambda own, ids: (computed.append(list(ids)), original(own, ids))[1]
    )
    with opened(adapter, tmp_path, WHOLE) as talk:
        assert computed == [talk.token_ids] == [list(said.token_ids[::-1])]


def test_recomputing_attends_to_everything(adapter, tmp_path):
    """A budget applies to decoding only; recomputing prefills the text as it prefills a prompt."""
    talk = opened(adapter, tmp_path)
    say(talk, QUESTIONS[:2])
    talk.held.close()
    talk.open_files.close()
    with opened(adapter, tmp_path) as talk, torch.no_grad():
        _, logits = talk.recompute(talk.token_ids)
        expected = adapter.model(torch.tensor([talk.token_ids])).logits[0, -1:]
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
        assert talk.held.counts.peak_resident_bytes <= KV.resident_bytes


def test_a_resumed_conversation_keeps_to_the_new_memory_bound(adapter, whole, tmp_path):
    with opened(adapter, tmp_path / "kept", WHOLE) as talk:
        got = say(talk, QUESTIONS[:3])
    with opened(adapter, tmp_path / "kept", replace(WHOLE, resident_bytes=80_000)) as talk:
        assert got + say(talk, QUESTIONS[3:]) == whole
        assert talk.held.counts.peak_resident_bytes <= 80_000


def test_another_process_budget_or_model_is_refused(adapter, tmp_path):
    with opened(adapter, tmp_path) as talk:
        say(talk, QUESTIONS[:1])
        with pytest.raises(InvalidRequest, match="another process has the conversation"):
            opened(adapter, tmp_path)
    with pytest.raises(InvalidRequest, match=r"began with kv_budget 0\.5, not 0\.25"):
        opened(adapter, tmp_path, OffloadSettings(0.25))
    with pytest.raises(InvalidRequest, match="another model"):
        opened(tiny_adapter("qwen2", seed=1), tmp_path)


def test_starting_over_forgets_everything(adapter, tmp_path):
    with opened(adapter, tmp_path) as talk:
        (first,) = say(talk, QUESTIONS[:1])
        with pytest.raises(InvalidRequest, match="another process has the conversation"):
            start_over(tmp_path)
    start_over(tmp_path)
    with opened(adapter, tmp_path) as talk:
        assert talk.token_ids == []
        assert say(talk, QUESTIONS[:1]) == [first]


def test_a_turn_that_does_not_fit_is_refused_and_changes_nothing(adapter, tmp_path):
    with opened(adapter, tmp_path) as talk:
        (first,) = say(talk, QUESTIONS[:1])
        with pytest.raises(PromptTooLong):
            say(talk, ["word " * 500])
        tokens = list(talk.token_ids)
    with opened(adapter, tmp_path) as talk:
        assert talk.token_ids == tokens
        assert first


@pytest.mark.parametrize("between", ["turns", "processes"])
def test_after_a_read_error_it_resumes_from_the_previous_turn(adapter, whole, tmp_path, monkeypatch, between):
    def refuse(*args):
        raise OSError(errno.EIO, "Input/output error")

    tight = replace(WHOLE, resident_bytes=30_000)  # so that a turn has to read
    with opened(adapter, tmp_path / "failing", tight) as talk:
        got = say(talk, QUESTIONS[:1])
        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", refuse)
            with pytest.raises(StoreError, match="Input/output error"):
                say(talk, QUESTIONS[1:2])
        if between == "turns":
            assert got + say(talk, QUESTIONS[1:2]) == whole[:2]
    with opened(adapter, tmp_path / "failing", tight) as talk:
        if between == "processes":
            assert got + say(talk, QUESTIONS[1:2]) == whole[:2]


@pytest.mark.parametrize("replied", [64, 65, 80])
def test_it_continues_when_the_frequencies_change(tmp_path, monkeypatch, replied):
    """LongRoPE: the text exceeds the short range with the second turn, with a reply's last token, or within a reply."""
    adapter = tiny_adapter("phi3-longrope")  # trained on 64 positions
    adapter.tokenizer.chat_template = (
        "{% for m in messages %}{{ m['content'] }} {% endfor %}"  # no lines end a reply
    )
    end_only_at(adapter)
    monkeypatch.setattr(adapter, "append", partial(adapter.append, block_tokens=16))
    lengths, new_tokens = [], replied - adapter.template.render(Prompt("Who?", (), "Read.")).tokens
    talk = opened(adapter, tmp_path, WHOLE, new_tokens)
    for turn in range(3):
        decoded = Decoded()
        list(talk.send("Who?", (), decoded))
        assert decoded.tokens == new_tokens
        follows(adapter, talk.token_ids, new_tokens)
        lengths.append(len(talk.token_ids))
        if turn == 1:
            talk.held.close()  # as after a kill
            talk.open_files.close()
            talk = opened(adapter, tmp_path, WHOLE, new_tokens)
    talk.close()
    assert lengths[0] == replied
    with opened(adapter, tmp_path, WHOLE, new_tokens) as talk:
        assert len(talk.token_ids) == lengths[2]


@pytest.mark.parametrize("whole_turns", [0, 1])
@pytest.mark.parametrize("new_tokens", [1, 12])
def test_a_turn_that_is_not_read_to_its_end_is_discarded(adapter, tmp_path, whole_turns, new_tokens):
    questions = QUESTIONS[:whole_turns]
    with opened(adapter, tmp_path / "whole", WHOLE, new_tokens) as talk:
        say(talk, questions)
        expected = say(talk, QUESTIONS[3:])
        tokens = talk.token_ids
    with opened(adapter, tmp_path / "left", WHOLE, new_tokens) as talk:
        say(talk, questions)
        left = talk.send(QUESTIONS[2], CHUNKS, Decoded())
        next(left)
        assert say(talk, QUESTIONS[3:]) == expected
        assert talk.token_ids == tokens
        with pytest.raises(StoreError, match="it was closed"):
            list(left)
        next(talk.send(QUESTIONS[2], CHUNKS, Decoded()))
    with opened(adapter, tmp_path / "left", WHOLE, new_tokens) as talk:
        assert talk.token_ids == tokens


def test_a_turn_that_is_interrupted_in_its_prefill_is_discarded(adapter, whole, tmp_path, monkeypatch):
    with opened(adapter, tmp_path / "broken", WHOLE) as talk:
        got = say(talk, QUESTIONS[:1])
        with monkeypatch.context() as patch:
            patch.setattr(TurnAppender, "write", broken)
            with pytest.raises(KeyboardInterrupt):
                say(talk, QUESTIONS[2:3])
        assert got + say(talk, QUESTIONS[1:2]) == whole[:2]


def broken(appending, layer, keys, values, write=TurnAppender.write) -> None:
    """Interrupt a turn after its first layer."""
    if layer:
        raise KeyboardInterrupt
    write(appending, layer, keys, values)


@pytest.mark.parametrize("between", ["turns", "processes"])
def test_it_starts_over_after_its_document_is_removed(adapter, tmp_path, caplog, between):
    listed = {"lamp:1", "key:1"}
    with opened(adapter, tmp_path / "only") as talk:
        expected = say(talk, QUESTIONS[1:2])
    talk = opened(adapter, tmp_path / "gone", visible=lambda: listed)
    say(talk, QUESTIONS[:1], ["lamp:1", "key:1"])
    if between == "processes":
        talk.close()
    listed = {"lamp:2", "key:1"}
    if between == "processes":
        talk = opened(adapter, tmp_path / "gone", visible=lambda: listed)
        assert talk.token_ids == []
    with talk:
        assert say(talk, QUESTIONS[1:2], ["lamp:2", "key:1"]) == expected
    assert [record.message.split(" starts ")[1] for record in caplog.records] == [
        "over: documents that it had read were removed or changed"
    ]
    with opened(adapter, tmp_path / "gone", visible=lambda: listed) as talk:
        assert talk.token_ids  # it has what it has read since
    assert len(caplog.records) == 1


def test_closing_after_its_document_is_removed_leaves_no_files(adapter, tmp_path):
    listed = {"lamp:1"}
    with opened(adapter, tmp_path, visible=lambda: listed) as talk:
        say(talk, QUESTIONS[:1], ["lamp:1"])
        listed = set()
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


def test_a_full_disk_keeps_the_earlier_turns(adapter, tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    with opened(adapter, tmp_path) as talk:
        say(talk, QUESTIONS[:1])
        tokens = list(talk.token_ids)
        with monkeypatch.context() as patch:
            patch.setattr("kvweave.files.os.fsync", full)
            with pytest.raises(StoreError, match="the conversation cannot be written"):
                say(talk, QUESTIONS[1:2])
        talk.held.close()  # as after a kill
        talk.held = None
    with opened(adapter, tmp_path) as talk:
        assert talk.token_ids == tokens
