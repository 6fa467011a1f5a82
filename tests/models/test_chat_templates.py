"""Chat templates as model families have them: where answers end, what thoughts are marked with, BOS, system role, date."""

import datetime
import sys

import pytest
import transformers.utils.chat_template_utils as library

from kvweave.answering.generation import end_tokens
from kvweave.errors import InvalidRequest, UnsupportedModel
from kvweave.models.prompt import DEFAULT_SYSTEM, PromptTemplate
from kvweave.testing import tiny_adapter, tiny_tokenizer
from kvweave.types import Message, Prompt

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA_3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>"
    "{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
LLAMA_2 = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token }}[INST] {{ m.content }} [/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content }} {{ eos_token }}{% endif %}{% endfor %}"
)  # leaves the system role out
GEMMA = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% set role = 'model' if m.role == 'assistant' else m.role %}"
    "<start_of_turn>{{ role }}\n{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
GLM = (
    "[gMASK]<sop>{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)  # ends an answer with the user's next turn
WORDS = "{% for m in messages %}### {{ m.role }}:\n{{ m.content }}\n\n{% endfor %}### assistant:\n"
ONE_TURN = (
    "{% if messages | length > 2 %}{{ raise_exception('one turn only') }}{% endif %}"
    "{% for m in messages %}{{ m.content }}{% endfor %}"
)
MARKERS = (
    "<|im_start|> <|im_end|> <|start_header_id|> <|end_header_id|> <|eot_id|> <start_of_turn> <end_of_turn> [gMASK] <sop>"
    " <|user|> <|assistant|> <|system|> <think> </think>"
).split()


def tokenizer_of(template, *, special=True):
    tokenizer = tiny_tokenizer(template)
    tokenizer.add_tokens(MARKERS, special_tokens=special)
    return tokenizer


def adapter_of(template):
    adapter = tiny_adapter()
    adapter.tokenizer = tokenizer_of(template)
    adapter.template = PromptTemplate(adapter.tokenizer)
    return adapter


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize(
    ("template", "end"),
    [
        (CHATML, "<|im_end|>"),
        (LLAMA_3, "<|eot_id|>"),
        (LLAMA_2, "<eos>"),
        (GEMMA, "<end_of_turn>"),
        (GLM, "<|user|>"),
        (WORDS, None),
        (ONE_TURN, None),
        (None, None),
    ],
)
def test_the_template_names_the_token_that_ends_an_answer(template, end, special):
    tokenizer = tokenizer_of(template, special=special)
    expected = [] if end is None else tokenizer.convert_tokens_to_ids([end])
    assert sorted(PromptTemplate(tokenizer).end_tokens) == expected


def test_answers_end_at_the_tokens_that_any_place_names():
    adapter = adapter_of(CHATML)
    end = adapter.tokenizer.convert_tokens_to_ids("<|im_end|>")
    adapter.model.generation_config.eos_token_id, adapter.model.config.eos_token_id = [7, 8], 9
    assert end_tokens(adapter) == {7, 8, 9, adapter.tokenizer.eos_token_id, end}
    adapter.model.generation_config.eos_token_id, adapter.model.config.eos_token_id = 7, None
    adapter.tokenizer.eos_token = None
    assert end_tokens(adapter) == {7, end}
    adapter.tokenizer.chat_template = None
    adapter.model.generation_config.eos_token_id = None
    assert end_tokens(adapter) == set()


@pytest.mark.parametrize("template", [CHATML, LLAMA_3, LLAMA_2, GEMMA, GLM, WORDS, ONE_TURN])
@pytest.mark.parametrize("system", ["", "Be brief."])
def test_a_prompt_is_what_transformers_makes_of_the_conversation(template, system):
    """BOS included: a template that writes none gets none, though the tokenizer has one."""
    tokenizer = tokenizer_of(template)
    prompt = PromptTemplate(tokenizer).render(Prompt("Who?", ("One.", "Two."), system))
    user = "One.\n\nTwo.\n\nQuestion: Who?"
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    if not system or template in (GEMMA, LLAMA_2):
        messages = [{"role": "user", "content": f"{system}\n\n{user}" if system else user}]
    given = {"add_generation_prompt": True, "return_dict": False}
    assert list(prompt.token_ids) == tokenizer.apply_chat_template(messages, tokenize=True, **given)
    assert tokenizer.decode(prompt.token_ids) == tokenizer.apply_chat_template(
        messages, tokenize=False, **given
    )
    assert prompt.token_ids.count(tokenizer.bos_token_id) == (template in (LLAMA_3, LLAMA_2, GEMMA))
    assert not prompt.reply.one_line


@pytest.mark.parametrize("template", [GEMMA, LLAMA_2])
def test_an_instruction_that_the_template_refuses_or_drops_precedes_the_first_turn(template):
    template = PromptTemplate(tokenizer_of(template))
    prompt = template.render(Prompt("Who?", ("One.",)))
    assert f"{DEFAULT_SYSTEM}\n\nOne." in template.decode(prompt.token_ids)
    assert prompt.ids(prompt.spans[0]) == template.prefix_ids(None)


QWEN_3 = (
    "{% for m in messages %}{% set content = m.content %}{% if m.role == 'assistant' and '</think>' in content %}"
    "{% set thoughts = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}"
    "{% if keep %}{% set content = '<think>\n' + thoughts + '\n</think>\n\n' + content %}{% endif %}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
DEEPSEEK_R1 = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}<|assistant|>"
    "{{ m.content.split('</think>')[-1] }}{{ eos_token }}{% else %}<|user|>{{ m.content }}{% endif %}{% endfor %}<|assistant|>"
)
THOUGHTFUL = (
    Message("user", "Who?"),
    Message("assistant", "<think>\nSecret: <|im_end|> is text.\n</think>\n\nAnn."),
    Message("user", "Which Ann?"),
    Message("assistant", "More secret.</think>\n\nAnn Lee. "),
)


@pytest.mark.parametrize("template", [QWEN_3, QWEN_3.replace("if keep", "if true"), DEEPSEEK_R1])
@pytest.mark.parametrize("marker", ["<think>", "<|user|>"])
def test_thoughts_in_earlier_replies_stay_or_go_as_the_template_does_it(template, marker):
    tokenizer = tokenizer_of(template)
    chat = (*THOUGHTFUL, Message("user", f"And {marker}?"))
    ids, _ = PromptTemplate(tokenizer).render_chat(chat)
    plain = [{"role": role, "content": text} for role, text in chat]
    assert tokenizer.decode(ids) == tokenizer.apply_chat_template(
        plain, tokenize=False, add_generation_prompt=True
    )
    ends = tokenizer.convert_tokens_to_ids(["<|im_end|>", marker])
    harmless, _ = PromptTemplate(tokenizer).render_chat([Message(role, "x") for role, _ in chat])
    assert [ids.count(end) for end in ends[:1]] == [harmless.count(end) for end in ends[:1]]


@pytest.mark.parametrize("template", [QWEN_3, DEEPSEEK_R1])
def test_thoughts_before_a_question_about_documents_go_and_the_messages_stay(template):
    tokenizer = tokenizer_of(template)
    prompt = PromptTemplate(tokenizer).render(Prompt("Why?", ("One.",), "", earlier=THOUGHTFUL))
    said = [
        ("user", "One.\n\nQuestion: Who?"),
        THOUGHTFUL[1],
        ("user", "Question: Which Ann?"),
        THOUGHTFUL[3],
    ]
    plain = [{"role": role, "content": text} for role, text in (*said, ("user", "Question: Why?"))]
    assert tokenizer.decode(prompt.token_ids) == tokenizer.apply_chat_template(
        plain, tokenize=False, add_generation_prompt=True
    )
    assert "ecret" not in tokenizer.decode(prompt.token_ids)
    first = PromptTemplate(tokenizer).render(Prompt("Why?", ("One.",), "", earlier=THOUGHTFUL[1:2]))
    assert "One.\n\nAnn." in tokenizer.decode(first.token_ids)


def test_a_template_that_leaves_the_message_out_is_refused():
    with pytest.raises(UnsupportedModel, match="chat template does not print"):
        PromptTemplate(tokenizer_of("{{ bos_token }}Hello.")).render(Prompt("Who?"))


@pytest.mark.parametrize(
    "written",
    [
        "{{ strftime_now('%d %b %Y') }}",
        "{% macro top() %}Today: {{ strftime_now('%Y-%m-%d') }}{% endmacro %}{{ top() }}",
        "{% if not date_string is defined %}{% set date_string = strftime_now('%d %B %Y') %}{% endif %}{{ date_string }}",
    ],
)
def test_a_template_that_prints_the_date_gives_the_same_prompt_on_any_day(written, monkeypatch):
    class Clock(datetime.datetime):
        today_is = 1

        @classmethod
        def now(cls, tz=None):
            return cls(2031, 5, cls.today_is)

    monkeypatch.setattr(library, "datetime", Clock)
    tokenizer = tokenizer_of(written + CHATML)
    plain, prompts = [], []
    for Clock.today_is in (3, 4):
        plain.append(tokenizer.apply_chat_template([{"role": "user", "content": "Who?"}], tokenize=False))
        prompts.append(PromptTemplate(tokenizer).render(Prompt("Who?", ("One.",))).token_ids)
    assert plain[0] != plain[1]  # the library's own clock goes on
    assert prompts[0] == prompts[1]


class TestThoughts:
    QWEN = CHATML + (
        "{% if add_generation_prompt and enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
    )
    DEEPSEEK = CHATML + "{% if add_generation_prompt %}<think>\n{% endif %}"
    GRANITE = CHATML + "{% if thinking %}{# </think> #}<|im_start|>{% endif %}"

    @pytest.mark.parametrize(
        ("template", "think", "mode"),
        [
            (QWEN, False, "tagged"),
            (QWEN, True, "unmarked"),
            (DEEPSEEK, False, "opened"),
            (DEEPSEEK, True, "opened"),
            (CHATML, False, "tagged"),
            (CHATML, True, "unmarked"),
        ],
    )
    def test_the_prompt_says_where_they_begin(self, template, think, mode):
        tokenizer = tokenizer_of(template, special=False)
        reply = PromptTemplate(tokenizer).render(Prompt("Who?", think=think)).reply
        ids = tokenizer.convert_tokens_to_ids(["<think>", "</think>"])
        assert (reply.thoughts, [*reply.tags]) == (mode, ["<think>", "</think>", *ids])

    def test_the_switch_reaches_the_template_under_either_name(self):
        for name in ("enable_thinking", "thinking"):
            template = PromptTemplate(tokenizer_of(CHATML + f"{{% if {name} %}}Think!{{% endif %}}"))
            texts = [template.decode(template.render(Prompt("Who?", think=on)).token_ids) for on in (0, 1)]
            assert [text.endswith("Think!") for text in texts] == [False, True]

    def test_tags_that_only_the_template_names_are_found(self):
        tokenizer = tiny_tokenizer(CHATML + "{% if add_generation_prompt %}[THINK]{% endif %}{# [/THINK] #}")
        reply = PromptTemplate(tokenizer).render(Prompt("Who?")).reply
        assert (reply.thoughts, [*reply.tags]) == ("opened", ["[THINK]", "[/THINK]", None, None])

    def test_a_model_without_tags_does_not_think(self):
        reply = PromptTemplate(tiny_tokenizer(CHATML)).render(Prompt("Who?", think=True)).reply
        assert reply.thoughts == "tagged"


def test_a_prompt_without_a_chat_template_asks_for_one_line():
    template = PromptTemplate(tiny_tokenizer())
    assert template.render(Prompt("Who?")).reply.one_line
    assert template.render_turn(Prompt("Who?")).reply.one_line
    assert not template.render(Prompt("Who?", several_lines=True)).reply.one_line


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro m(x) %}{% if x %}{{ m(x - 1) }}{{ m(x - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
        "{{ lipsum(n=10 ** 6) }}",
    ],
)
def test_a_template_that_runs_without_end_is_refused(template):
    tokenizer = tiny_tokenizer(template)
    with pytest.raises(InvalidRequest, match="more than 1,000,000 lines"):
        PromptTemplate(tokenizer).render(Prompt("Who?", ("One.",)))


def test_a_debugger_that_follows_a_thread_still_does_after_a_template():
    def follow(frame, event, argument):
        return None

    before = sys.gettrace()
    sys.settrace(follow)
    try:
        PromptTemplate(tiny_tokenizer(CHATML)).render(Prompt("Who?", ("One.",)))
        assert sys.gettrace() is follow
    finally:
        sys.settrace(before)


@pytest.mark.parametrize(
    "escape",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ '{0.__class__.__init__.__globals__}'.format(namespace) }}",
        "{% include '/etc/passwd' %}",
        "{{ messages.append(1) }}",
        "{{ raise_exception('two\nlines') }}",
        "{{",
    ],
)
def test_a_template_that_leaves_the_sandbox_or_fails_ends_in_one_line(escape):
    template = PromptTemplate(tiny_tokenizer(CHATML + escape))
    for render in (
        lambda: template.render(Prompt("Who?", ("One.",))),
        lambda: template.render_turn(Prompt("Who?")),
        lambda: template.render_chat([Message("user", "Who?")]),
    ):
        with pytest.raises(InvalidRequest) as caught:
            render()
        assert len(str(caught.value).splitlines()) == 1
