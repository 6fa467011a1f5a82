"""What kvweave adds to LangChain: chunks that are reused, sources, and a cache that knows a question again."""

import pytest
from langchain_core.caches import BaseCache
from langchain_core.documents import Document
from langchain_core.language_models import FakeListChatModel
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.outputs import Generation

from kvweave.errors import Cancelled, InvalidRequest
from langchain_kvweave import ChatKvweave, KvweaveCache, KvweaveRetriever

QUESTION = "What is the password of Glorric?"
SOURCE = "The password of Glorric is walnut. The password of Brilton is pepper."


@pytest.fixture
def model(home):
    return ChatKvweave(home=home, max_tokens=8)


def test_a_knowledge_base_answers_and_tells_its_sources(model):
    reply = model.invoke(QUESTION, kb="notes", cache_use="off")
    assert "walnut" in reply.content
    ours = reply.response_metadata["kvweave"]
    assert {each["document"].rpartition("/")[2] for each in ours["sources"]} == {"passwords.md", "badges.txt"}
    assert reply.usage_metadata["input_token_details"]["cache_read"] > 0


def test_its_cached_answers_are_used(model):
    bound = model.bind(kb="notes", max_tokens=None)
    assert bound.invoke(QUESTION).response_metadata["kvweave"]["cache"] == "kv"
    again = bound.invoke(QUESTION)
    assert again.response_metadata["kvweave"]["cache"] == "answer"
    assert "walnut" in again.content


def test_documents_are_reused_wherever_they_come_again(model):
    documents = [Document(SOURCE, metadata={"source": "a.md"}), "The ferry leaves at nine. " * 10]
    first = model.invoke(QUESTION, documents=documents)
    assert "walnut" in first.content
    again = model.invoke("When does the ferry leave?", documents=documents)
    read = [each.usage_metadata["input_token_details"]["cache_read"] for each in (first, again)]
    assert read[0] < read[1]
    assert [each["document"] for each in again.response_metadata["kvweave"]["sources"]] == [
        "a.md",
        "document 2",
    ]


def test_the_model_answers_from_what_the_retriever_found(home, model):
    found = KvweaveRetriever(home=home, kb="notes", k=2).invoke(QUESTION)
    assert found[0].metadata["source"].endswith("passwords.md")
    assert "walnut" in "".join(piece.content for piece in model.stream(QUESTION, documents=found))


@pytest.mark.parametrize(
    ("messages", "options", "named"),
    [
        ([ToolMessage("x", tool_call_id="1")], {}, "type 'tool'"),
        (
            [AIMessage("", tool_calls=[{"name": "f", "args": {}, "id": "1"}]), HumanMessage("x")],
            {},
            "calls tools",
        ),
        ([HumanMessage([{"type": "image_url", "image_url": "x"}])], {}, "type 'image_url'"),
        ([HumanMessage("x")], {"temprature": 1}, "no option 'temprature'"),
        ([HumanMessage("x")], {"documents": ["x"], "kb": "notes"}, "both documents and kb"),
    ],
)
def test_what_is_not_supported_is_refused_in_one_line(model, messages, options, named):
    with pytest.raises(InvalidRequest, match=named):
        model.invoke(messages, **options)


def test_a_request_is_given_up_after_its_timeout(home):
    slow = ChatKvweave(home=home, timeout=1e-3, settings={"max_new_tokens": 200})
    with pytest.raises(Cancelled):
        slow.invoke("word " * 500)


class TestCache:
    @pytest.fixture
    def cache(self, tmp_path):
        cache = KvweaveCache(home=tmp_path)
        yield cache
        cache.close()

    def test_a_question_with_a_typing_error_gets_the_answer(self, cache):
        model = FakeListChatModel(responses=["At nine.", "At ten."], cache=cache)
        chat = [SystemMessage("Be short."), HumanMessage("When does the ferry leave?")]
        assert model.invoke(chat).content == "At nine."
        assert model.invoke([chat[0], HumanMessage("when does teh ferry leave")]).content == "At nine."
        # Another question, and the same one after another instruction, are answered by the model.
        assert model.invoke([chat[0], HumanMessage("When does the ferry arrive?")]).content == "At ten."
        assert (
            model.invoke([SystemMessage("Rhyme."), chat[1]]).content == "At nine."
        )  # the model's next answer
        assert cache.lookup("When does the ferry leave?", "another model") is None

    def test_texts_of_several_lines_are_found_by_every_character(self, cache):
        prompt = "The ferry leaves at nine.\n\nWhen does the ferry leave?"
        cache.update(prompt, "a model", [Generation(text="At nine.")])
        assert cache.lookup(prompt, "a model") == [Generation(text="At nine.")]
        assert cache.lookup(prompt.replace("nine", "ten"), "a model") is None
        assert cache.lookup(prompt.replace("\n\n", "\n"), "a model") is None

    def test_a_question_about_today_is_not_kept(self, cache):
        cache.update("What day is it today?", "a model", [Generation(text="Monday")])
        assert cache.lookup("What day is it today?", "a model") is None

    def test_exact_caches_know_no_typing_errors(self, tmp_path):
        cache = KvweaveCache("exact", match="exact", home=tmp_path)
        cache.update("When does the ferry leave?", "a model", [Generation(text="At nine.")])
        assert cache.lookup("when does teh ferry leave", "a model") is None
        assert cache.lookup("When does the ferry leave?", "a model") == [Generation(text="At nine.")]
        cache.close()

    def test_answers_outlast_the_process(self, tmp_path):
        for expected in (None, [Generation(text="At nine.")]):
            cache = KvweaveCache(home=tmp_path)
            assert isinstance(cache, BaseCache)
            assert cache.lookup("When does the ferry leave?", "a model") == expected
            cache.update("When does the ferry leave?", "a model", [Generation(text="At nine.")])
            cache.close()
