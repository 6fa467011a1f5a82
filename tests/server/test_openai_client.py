"""The routes of OpenAI's API, through the official client and two frameworks that have one of their own."""

import importlib
import math

import pytest

QUESTION = "What is the password of Glorric?"
CHAT = [{"role": "user", "content": QUESTION}]
SOURCE = "The password of Glorric is walnut."


@pytest.fixture(scope="module")
def openai():
    """The client's package, which takes seconds: processes that only collect these tests do without it."""
    return importlib.import_module("openai")


@pytest.fixture(scope="module")
def client(served, openai):
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="unused", max_retries=0) as found:
        yield found


def ask(client, **more):
    return client.chat.completions.create(model="kvweave", messages=CHAT, max_tokens=8, **more)


def test_chat_answers_from_a_knowledge_base_and_says_how(client):
    raw = client.chat.completions.with_raw_response.create(
        model="kvweave", messages=CHAT, extra_body={"kb": "notes", "kvweave": {"cache": "off"}}
    )
    reply = raw.parse()
    assert "walnut" in reply.choices[0].message.content
    assert reply.choices[0].finish_reason == "stop"
    assert raw.headers["X-Kvweave-Cache"] == "kv"
    ours = reply.model_extra
    assert {each["document"] for each in ours["kvweave"]["sources"]} == {"passwords.md", "badges.txt"}
    plan = ours["kvweave"]["plan"]
    cached = reply.usage.prompt_tokens_details.cached_tokens
    assert 0 < cached == plan["exact_tokens"] + plan["reused_tokens"]
    assert reply.usage.prompt_tokens == plan["prompt_tokens"]
    assert ours["timings"]["cache_n"] + ours["timings"]["prompt_n"] == reply.usage.prompt_tokens
    assert ours["timings"]["predicted_n"] == reply.usage.completion_tokens


def test_the_answer_cache_is_told_by_the_header_and_obeys_cache_control(served):
    body = {"messages": CHAT, "kb": "notes"}

    def used(**headers):
        found = served.http.post("/v1/chat/completions", json=body, headers=headers)
        return found.headers["X-Kvweave-Cache"]

    assert used(**{"Cache-Control": "no-store"}) == "kv"
    assert used(**{"Cache-Control": "no-store"}) == "kv"
    used()
    assert used() == "answer"
    assert used(**{"Cache-Control": "no-cache"}) == "kv"
    assert used() == "answer"


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("### Task:\nSuggest a title for the chat of {n}.\n<chat_history>\nUSER: Hi\n</chat_history>", False),
        ("Task: name this chat of {n} in five words.\n\nUSER: Hi", False),
        ("What is the Task: of {n}?", True),
    ],
)
@pytest.mark.parametrize("parts", [False, True])
def test_a_chat_page_s_own_task_is_no_question_of_its_user(served, text, kept, parts):
    text = text.format(n=f"Glorric {parts}")
    content = [{"type": "text", "text": text}] if parts else text
    body = {"messages": [{"role": "user", "content": content}]}
    replies = [served.http.post("/kb/notes/v1/chat/completions", json=body) for _ in range(2)]
    assert all(reply.json()["choices"][0]["message"]["content"] for reply in replies)
    assert (replies[1].headers["X-Kvweave-Cache"] == "answer") is kept
    with served.parts.serving.tenant(None).bases.using("notes") as base:
        assert (text in base.predictions.history.recent(1000)) is kept


def test_documents_of_the_caller_are_reused_the_second_time(client):
    documents = [{"id": "a", "text": SOURCE}, {"id": "b", "text": "The ferry leaves at nine. " * 10}]

    def reply(text):
        return client.chat.completions.create(
            model="kvweave",
            messages=[{"role": "user", "content": text}],
            max_tokens=8,
            extra_body={"documents": documents},
        )

    first, second = reply(QUESTION), reply("When does the ferry leave?")
    assert "walnut" in first.choices[0].message.content
    assert second.usage.prompt_tokens_details.cached_tokens > first.usage.prompt_tokens_details.cached_tokens
    assert [each["document"] for each in second.model_extra["kvweave"]["sources"]] == ["a", "b"]


@pytest.mark.parametrize(
    "asked",
    [{"kb": "notes"}, {"documents": [{"id": "a", "text": SOURCE}]}, {}],
    ids=["kb", "documents", "plain"],
)
def test_a_request_may_decode_under_a_kv_budget(client, asked):
    def reply(**options):
        return client.chat.completions.create(
            model="kvweave",
            messages=[{"role": "user", "content": QUESTION}],
            max_tokens=8,
            temperature=0,
            extra_body={**asked, "kvweave": {"cache": "off", **options}},
        )

    whole, budget = reply(), reply(kv_budget=1.0)
    assert budget.choices[0].message.content == whole.choices[0].message.content
    assert "decoding" not in whole.model_extra["kvweave"]
    everything = budget.model_extra["kvweave"]["decoding"]["attended_per_token"]
    assert reply(kv_budget=20).model_extra["kvweave"]["decoding"]["attended_per_token"] < everything


def test_a_stream_joins_to_the_whole_answer(client):
    options = {"extra_body": {"kb": "notes", "return_progress": True, "kvweave": {"cache": "off"}}}
    whole = ask(client, **options).choices[0].message.content
    chunks = list(ask(client, stream=True, stream_options={"include_usage": True}, **options))
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert "".join(delta.content or "" for delta in deltas) == whole
    assert [delta.role for delta in deltas].count("assistant") == 1
    assert chunks[-1].choices == []
    assert chunks[-1].usage.prompt_tokens > 0
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    progress = [
        chunk.model_extra["prompt_progress"] for chunk in chunks if "prompt_progress" in chunk.model_extra
    ]
    assert progress[-1]["processed"] == progress[-1]["total"] == chunks[-1].usage.prompt_tokens
    assert 0 < progress[-1]["cache"] < progress[-1]["total"]


def test_log_probabilities_are_those_of_the_tokens(client):
    reply = ask(client, logprobs=True, top_logprobs=3, extra_body={"kb": "notes"}).choices[0]
    tokens = reply.logprobs.content
    assert "".join(token.token for token in tokens).strip().startswith(reply.message.content.strip())
    for token in tokens:
        assert len(token.top_logprobs) == 3
        assert token.logprob == max(each.logprob for each in token.top_logprobs)  # greedy
        assert sum(math.exp(each.logprob) for each in token.top_logprobs) <= 1.0001
        assert bytes(token.bytes).decode() == token.token
    streamed = ask(client, logprobs=True, top_logprobs=3, stream=True, extra_body={"kb": "notes"})
    found = [
        t.token
        for chunk in streamed
        if chunk.choices and chunk.choices[0].logprobs
        for t in chunk.choices[0].logprobs.content
    ]
    assert found == [token.token for token in tokens]


def test_a_stop_text_ends_the_answer_before_it(client):
    options = {"extra_body": {"kb": "notes", "kvweave": {"cache": "off"}}}
    whole = ask(client, **options).choices[0].message.content.strip()
    reply = ask(client, stop=[whole[2:4]], **options).choices[0]
    assert reply.message.content.strip() == whole[:2]
    assert reply.finish_reason == "stop"


def test_several_answers_are_sampled_apart_and_a_seed_repeats_them(client):
    def texts(seed):
        reply = ask(client, n=3, temperature=1.5, seed=seed)
        assert [choice.index for choice in reply.choices] == [0, 1, 2]
        return [choice.message.content for choice in reply.choices]

    first = texts(1)
    assert len(set(first)) > 1
    assert texts(1) == first
    assert texts(2) != first


def test_tokens_of_the_answer_are_bounded(client):
    for name in ("max_tokens", "max_completion_tokens"):
        reply = client.chat.completions.create(model="kvweave", messages=CHAT, **{name: 2})
        assert reply.usage.completion_tokens <= 2
        assert reply.choices[0].finish_reason == "length"


def test_a_repeated_chat_reuses_its_prefix(client):
    long = [{"role": "user", "content": "Tell me about the weather in spring. " * 40}]
    replies = [client.chat.completions.create(model="kvweave", messages=long, max_tokens=2) for _ in range(2)]
    first, second = (reply.usage for reply in replies)
    assert first.prompt_tokens_details.cached_tokens == 0
    assert second.prompt_tokens_details.cached_tokens >= 128
    assert replies[0].choices[0].message.content == replies[1].choices[0].message.content


def test_completions_continue_a_text(client):
    reply = client.completions.create(
        model="kvweave", prompt=["one two", "three"], n=2, max_tokens=3, logprobs=2
    )
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
    assert reply.choices[0].text == reply.choices[1].text
    logprobs = reply.choices[0].logprobs
    assert "".join(logprobs.tokens) == reply.choices[0].text
    assert logprobs.text_offset[0] == 0
    assert len(logprobs.top_logprobs[0]) in (2, 3)
    pieces = client.completions.create(model="kvweave", prompt="one two", max_tokens=3, stream=True)
    assert "".join(chunk.choices[0].text for chunk in pieces) == reply.choices[0].text


def test_responses_answer_and_stream_the_api_s_events(client):
    options = {"extra_body": {"kb": "notes", "kvweave": {"cache": "off"}}}
    whole = client.responses.create(model="kvweave", input=QUESTION, **options)
    assert "walnut" in whole.output_text
    assert whole.status == "completed"
    assert whole.usage.input_tokens_details.cached_tokens > 0
    with client.responses.stream(model="kvweave", input=CHAT, instructions="Be short.", **options) as stream:
        events = list(stream)
        final = stream.get_final_response()
    names = [event.type for event in events]
    assert names[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert names[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert deltas == final.output_text


def test_a_response_that_was_cut_is_incomplete(client):
    cut = client.responses.create(model="kvweave", input=QUESTION, max_output_tokens=1)
    assert cut.status == "incomplete"
    assert cut.incomplete_details.reason == "max_output_tokens"


def test_embeddings_are_those_of_the_embedding_model(client, served):
    texts = ["a password", "a ferry that leaves"]
    found = client.embeddings.create(model="all-MiniLM-L6-v2", input=texts)
    plain = client.embeddings.create(model="all-MiniLM-L6-v2", input=texts, encoding_format="float")
    expected = served.parts.serving.resident.encoder.encode(texts)
    for each in (found, plain):
        for row, vector in zip(each.data, expected, strict=True):
            assert row.embedding == pytest.approx(vector.tolist(), abs=1e-6)
    assert found.usage.total_tokens > 4


def test_token_ids_of_another_tokenizer_are_not_embedded(client, openai):
    for ids in ([1, 2, 3], [[1, 2, 3]]):
        with pytest.raises(openai.BadRequestError, match="check_embedding_ctx_length=False"):
            client.embeddings.create(model="all-MiniLM-L6-v2", input=ids)


def test_models_are_listed(client, openai):
    names = [model.id for model in client.models.list()]
    assert names == ["reference", "all-MiniLM-L6-v2"]
    assert client.models.retrieve("reference").id == "reference"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nothing")


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"temperature": 3}, "temperature"),
        ({"n": 0}, "n"),
        ({"extra_body": {"unheard_of": 1}}, "unheard_of"),
        ({"extra_body": {"kvweave": {"ratio": 7}}}, "kvweave.ratio"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages",
        ),
        ({"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]}, "messages"),
        ({"extra_body": {"kvweave": {"kv_budget": 0}}}, "kvweave.kv_budget"),
        ({"extra_body": {"kvweave": {"kv_budget": 9}}}, ""),
    ],
)
def test_what_is_not_supported_is_refused_in_the_api_s_shape(client, more, param, openai):
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**{"model": "kvweave", "messages": CHAT, **more})
    assert (refused.value.param or "").startswith(param)
    assert refused.value.type == "invalid_request_error"


@pytest.mark.parametrize(
    ("path", "body", "param", "said"),
    [
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages.0.content.0.type",
            "content parts must be text",
        ),
        (
            "chat/completions",
            {"messages": CHAT, "stop": list("abcde")},
            "stop",
            "at most 4 are possible, not 5",
        ),
        ("chat/completions", {"messages": CHAT, "stop": 5}, "stop", "it must be text or a list"),
        (
            "completions",
            {"prompt": [1, 2, 3]},
            "prompt",
            "it must be text, or a list of texts, not token ids",
        ),
        ("completions", {"prompt": ["a", 5]}, "prompt", "it must be text, or a list of texts, not token ids"),
        (
            "responses",
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input.0.content.0.type",
            "content parts must be text",
        ),
    ],
)
def test_an_error_is_about_the_form_that_was_given(served, path, body, param, said):
    error = served.http.post(f"/v1/{path}", json=body).json()["error"]
    assert (error["param"], error["message"]) == (param, f"{param}: {said}")


def test_fields_that_ask_for_nothing_are_accepted(client):
    reply = ask(
        client,
        tools=[],
        presence_penalty=0,
        frequency_penalty=0.0,
        user="me",
        response_format={"type": "text"},
    )
    assert reply.usage.completion_tokens == 8


@pytest.mark.parametrize(
    ("more", "status", "code"),
    [
        ({"model": "gpt-9"}, 404, "model_not_found"),
        ({"kb": "nothing"}, 404, "knowledge_base_not_found"),
        ({"kb": "../notes"}, 400, "invalid_value"),
        ({"kvweave": {"recipe": "magic"}, "kb": "notes"}, 400, "unknown_recipe"),
        ({"messages": [{"role": "user", "content": "word " * 20000}]}, 400, "context_length_exceeded"),
        ({"kb": "notes", "documents": [{"id": "a", "text": "b"}]}, 400, "invalid_value"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, 400, "invalid_value"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_have_their_status_and_code(served, more, status, code, stream):
    import json

    body = json.dumps({"messages": CHAT, "stream": stream, **more})
    found = served.http.post(
        "/v1/chat/completions", content=body, headers={"Content-Type": "application/json"}
    )
    assert found.status_code == status
    error = found.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code
    if code == "context_length_exceeded":
        assert "more than the 4096" in error["message"]
        assert "max_tokens" in error["message"]
        assert "--" not in error["message"]


def test_a_url_names_the_knowledge_base(served, openai):
    """For programs such as Open WebUI, which take a URL and send no fields of ours."""
    with openai.OpenAI(base_url=f"{served.url}/kb/notes/v1", api_key="unused", max_retries=0) as client:
        model = client.models.list().data[0].id
        asked = {"model": model, "messages": CHAT, "stream": True, "stream_options": {"include_usage": True}}
        chunks = list(client.chat.completions.create(**asked))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert "walnut" in text
        offered = [{"type": "function", "function": {"name": "search_notes", "parameters": {}}}]
        assert "walnut" in ask(client, tools=offered).choices[0].message.content
        with pytest.raises(openai.BadRequestError, match="tool_choice"):
            ask(client, tools=offered, tool_choice="required")
        assert "walnut" in client.responses.create(model=model, input=QUESTION).output_text
        documents = [{"id": "a", "text": "The password of Glorric is salt."}]
        assert "salt" in ask(client, extra_body={"documents": documents}).choices[0].message.content
        assert client.completions.create(model=model, prompt="one two", max_tokens=2).usage.prompt_tokens
    with (
        openai.OpenAI(base_url=f"{served.url}/kb/letters/v1", api_key="unused", max_retries=0) as client,
        pytest.raises(openai.NotFoundError, match="letters"),
    ):
        ask(client)
    for path in ("/kb/notes/v1/settings", "/kb/notes/metrics", "/kb/notes/v1/kb", "/kb/a/b/v1/models"):
        assert served.http.get(path).status_code == 404


def test_langchain_uses_it(served):
    langchain = pytest.importorskip("langchain_openai")
    model = langchain.ChatOpenAI(
        base_url=f"{served.url}/v1",
        api_key="unused",
        model="reference",
        extra_body={"kb": "notes"},
        max_retries=0,
    )
    assert "walnut" in model.invoke(QUESTION).content
    assert "walnut" in "".join(piece.content for piece in model.stream(QUESTION))


def test_llama_index_uses_it(served):
    llama_index = pytest.importorskip("llama_index.llms.openai_like")
    model = llama_index.OpenAILike(
        api_base=f"{served.url}/v1",
        api_key="unused",
        model="reference",
        is_chat_model=True,
        max_retries=0,
        additional_kwargs={"extra_body": {"kb": "notes"}},
    )
    from llama_index.core.llms import ChatMessage

    message = ChatMessage(role="user", content=QUESTION)
    assert "walnut" in model.chat([message]).message.content
    assert "walnut" in "".join(piece.delta or "" for piece in model.stream_chat([message]))


def test_chunks_prepared_ahead_are_reused_by_the_first_request(served, client):
    documents = [{"id": str(n), "text": f"Boat {n} leaves at {n} o'clock. " * 6} for n in range(1, 4)]
    done = served.http.post("/v1/chunks", json={"documents": documents}).json()
    assert (done["object"], done["chunks"], done["computed"]) == ("chunks.prepared", 3, 3)
    reply = ask(client, extra_body={"documents": documents[::-1]})
    origins = [
        span["origin"] for span in reply.model_extra["kvweave"]["plan"]["spans"] if span["kind"] == "chunk"
    ]
    assert set(origins) <= {"reused", "exact"}

    streamed = served.http.post("/v1/chunks", json={"documents": documents, "stream": True}).text
    assert streamed.count("event: progress") == len(documents) + 1
    assert '"computed":0' in streamed.rpartition("event: done")[2]

    for body in ({}, {"documents": []}, {"documents": documents, "recipe": "full"}):
        assert served.http.post("/v1/chunks", json=body).status_code == 400
