"""Where answers end, through a conversation and a knowledge base: at a base model's line, with thoughts kept apart."""

import pytest
import torch

import kvweave
from kvweave.answering import generation
from kvweave.answering.generation import Decoded
from kvweave.background.prediction import QuestionPredictor
from kvweave.background.prompts import Request
from kvweave.models.prompt import PromptTemplate
from kvweave.testing import end_only_at, tiny_adapter, tiny_tokenizer
from support import tiny_conversations, tiny_kb
from support.spelled import ENDINGS, Spelled, new_place
from support.tiny_conversations import WHOLE, follows

COUNT = 12


@pytest.mark.parametrize(("texts", "kept"), ENDINGS)
def test_a_conversation_continues_behind_the_answers_end(tmp_path, texts, kept):
    """Its KV holds no token of a question that the model began: the next turn's tokens are plain transformers'."""
    adapter = tiny_adapter("qwen2")
    end_only_at(adapter)
    template = adapter.template  # renders with the real tokenizer
    asked = template.render(kvweave.Prompt("Who?", (), "Read.")).token_ids
    plain = adapter.model.generate(
        torch.tensor([asked]), max_new_tokens=COUNT, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    true = plain[0, len(asked) :].tolist()
    place = new_place(true)
    spelled = {true[place + at]: text for at, text in texts.items()}
    adapter.tokenizer = Spelled(spelled)
    with tiny_conversations.opened(adapter, tmp_path / "talk", WHOLE, COUNT) as talk:
        list(talk.send("Who?", (), Decoded()))
        assert talk.token_ids == [*asked, *true[: place + kept]]
        assert talk.held.get_seq_length() == len(talk.token_ids)
        list(talk.send("And?", (), Decoded()))
        assert talk.last_reply.tokens > 0
        follows(adapter, talk.token_ids, talk.last_reply.tokens)


# Knowledge bases, with a model whose replies are given


THINKS = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}<eos>{% endfor %}{% if add_generation_prompt %}assistant: "
    "{% if not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
ALWAYS_THINKS = THINKS.replace("<think>\n\n</think>\n\n", "<think>\n").replace("not enable_thinking", "true")
ASKED = "Where is the river?"


@pytest.fixture
def given_replies(monkeypatch):
    """Let the tiny model with a chat template reply with given texts, one after the other."""
    undo = tiny_kb.load()

    def given(template, *replies):
        from kvweave.models.loading import load_model  # the mock of tiny_kb

        adapter = load_model()
        adapter.tokenizer = tiny_tokenizer(template)
        adapter.template = PromptTemplate(adapter.tokenizer)
        left = iter(replies)

        class Given:
            def __init__(self, settings, device):
                text = next(left)
                self._ids = iter(adapter.tokenizer(text, add_special_tokens=False)["input_ids"])

            def choose(self, logits):
                return next(self._ids, adapter.tokenizer.eos_token_id)

        monkeypatch.setattr(generation, "Sampler", Given)
        return adapter

    yield given
    undo()


@pytest.fixture
def note(tmp_path):
    path = tmp_path / "note.txt"
    path.write_text(tiny_kb.text(1, parts=1))
    return path


def test_thoughts_are_in_the_result_and_not_in_the_answer(given_replies, note, tmp_path):
    given_replies(THINKS, "<think>\nThe note says north.\n</think>\n\nIn the north.", "In the north.")
    with tiny_kb.open_tiny(tmp_path / "home", max_new_tokens=80, think=True) as base:
        base.add(note)
        stream = base.stream(ASKED)
        assert "".join(stream) == "In the north."
        assert (stream.answer.text, stream.answer.reasoning) == ("In the north.", "The note says north.")
        assert stream.answer.finish_reason == "stop"
        again = base.ask(ASKED)
        assert (again.text, again.reasoning) == ("In the north.", "")
        assert again.plan.cache_hit is not None
    with tiny_kb.open_tiny(
        tmp_path / "home", max_new_tokens=80
    ) as base:  # without thinking, it is another answer
        assert base.ask(ASKED).plan.cache_hit is None


@pytest.mark.parametrize("template", [THINKS, ALWAYS_THINKS])
def test_an_answer_whose_thoughts_were_cut_is_not_cached_and_says_so(
    given_replies, note, tmp_path, template, caplog
):
    given_replies(template, *["<think>Let me see, the note has"] * 2)
    with tiny_kb.open_tiny(tmp_path / "home", max_new_tokens=12, think=True) as base:
        base.add(note)
        for _ in range(2):
            stream = base.stream(ASKED)
            assert "".join(stream) == ""
            answer = stream.answer
            assert (answer.text, answer.finish_reason) == ("", "length")
            assert answer.plan.cache_hit is None
            assert "<think>Let me see, the note has".startswith("<think>" + answer.reasoning)
            assert answer.reasoning
            assert "after 12 tokens, still inside the model's thoughts" in caplog.text
            caplog.clear()


def test_a_conversation_keeps_thoughts_apart_and_says_where_they_were_cut(
    given_replies, note, tmp_path, caplog
):
    given_replies(ALWAYS_THINKS, "Hm.</think>North.", "Let me think about this for a long time")
    with tiny_kb.open_tiny(tmp_path / "home", max_new_tokens=20, kv_budget=1.0) as base:
        base.add(note)
        with base.conversation() as talk:
            assert "".join(base.send(talk, ASKED)) == "North."
            assert (talk.last_reply.text, talk.last_reply.reasoning) == ("North.", "Hm.")
            assert caplog.text == ""
            assert "".join(base.send(talk, "And the other?")) == ""
            assert talk.last_reply.thinking
            assert "still inside the model's thoughts" in caplog.text


def test_a_base_models_answer_is_its_line_and_its_predictions_have_several(given_replies, note, tmp_path):
    several = "1. Who is it?\n2. Where is it?\nQuestion: And when?"
    given_replies(None, f" North.\n\nQuestion: {ASKED}", several)
    with tiny_kb.open_tiny(tmp_path / "home", max_new_tokens=80) as base:
        base.add(note)
        stream = base.stream(ASKED)
        assert "".join(stream) == " North."
        assert (stream.answer.text, stream.answer.finish_reason) == ("North.", "stop")
        context = base.components.request_context()
        options = base._settings.options("Answer.")
        predictor = QuestionPredictor(
            lambda: context, base.state.documents, base.answers, base.predictions,
            base._settings.recipe_of(options), options, "Answer.", 0.9, 2,
        )  # fmt: skip
        assert predictor.reply(["A note."], Request("Which questions?"), 0) == several


def test_the_command_line_has_the_switch(given_replies, note, command):
    thought = "<think>North, it says.</think>North."
    adapter = given_replies(THINKS, thought, thought, thought, "Direct.", thought)
    seen, render = [], adapter.template.render
    adapter.template.render = lambda prompt: seen.append(prompt.think) or render(prompt)
    own = ("--kb", "notes", "--recipe", "reuse")
    command("add", *own, "--chunk-tokens", 40, note)
    got = command.json("ask", *own, "--max-new-tokens", 60, "--think", "--fresh", ASKED)
    assert (got["text"], got["reasoning"], got["finish_reason"]) == ("North.", "North, it says.", "stop")
    shown = command("ask", *own, "--max-new-tokens", 60, "--think", "--fresh", ASKED).stdout
    assert shown.startswith("North.\n")
    assert "it says" not in shown
    explained = command("ask", *own, "--max-new-tokens", 60, "--think", "--fresh", "--explain", ASKED).stdout
    assert "North, it says." in explained
    direct = command.json("ask", *own, "--no-think", ASKED, "--fresh")
    assert (direct["text"], direct["reasoning"]) == ("Direct.", "")
    chat = command("chat", *own, "--max-new-tokens", 60, input_text=f"{ASKED}\n", KVWEAVE_THINK="true")
    assert chat.stdout == "North.\n"
    assert seen == [True, True, True, False, True]


def test_answers_stored_before_there_was_a_choice_stay_valid():
    from kvweave.config import GenerationConfig
    from kvweave.options import AskOptions

    direct = AskOptions("reuse", 5)
    assert direct.cache_key() == (
        '{"auxiliary": null, "coverage": null, "drop_chunks": false, "kv_budget": null, "max_new_tokens": null, '
        '"ratio": null, "recipe": "reuse", "top_k": 5}'
    )
    for each in (direct, AskOptions("reuse", 5, generation=GenerationConfig(think=True))):
        assert AskOptions.from_key(each.cache_key()) == each
