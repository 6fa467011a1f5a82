"""The language model in LlamaIndex, with the shipped model in this process."""

import asyncio
from itertools import pairwise

import pytest
from llama_index.core.llms import ChatMessage, ImageBlock
from llama_index.core.schema import NodeWithScore, TextNode

from kvweave.errors import InvalidRequest
from llama_index.llms.kvweave import Kvweave

QUESTION = "What is the password of Glorric?"
MESSAGES = [ChatMessage(QUESTION)]
SOURCE = "The password of Brilton is pepper. The password of Glorric is walnut."


@pytest.fixture
def llm(home):
    return Kvweave(home=home, max_tokens=8)


def test_a_knowledge_base_answers_and_tells_its_sources(llm):
    reply = llm.chat(MESSAGES, kb="notes", cache="off")
    assert "walnut" in reply.message.content
    assert {each["document"].rpartition("/")[2] for each in reply.raw["sources"]} == {
        "passwords.md",
        "badges.txt",
    }
    assert reply.additional_kwargs["cached_tokens"] > 0


def test_nodes_are_reused_wherever_they_come_again(llm):
    nodes = [
        TextNode(text=SOURCE),
        NodeWithScore(node=TextNode(text="The ferry leaves at nine. " * 10), score=1.0),
    ]
    first = llm.chat(MESSAGES, documents=nodes)
    assert "walnut" in first.message.content
    again = llm.chat([ChatMessage("When does the ferry leave?")], documents=nodes)
    assert first.raw["plan"]["exact_tokens"] < again.raw["plan"]["exact_tokens"]
    assert again.raw["plan"]["prompt_tokens"] == again.additional_kwargs["prompt_tokens"]


def test_a_stream_grows_to_the_whole_answer(llm):
    whole = llm.complete(QUESTION)
    pieces = list(llm.stream_complete(QUESTION))
    assert pieces[-1].text == whole.text == "".join(piece.delta for piece in pieces)
    assert all(one.text.startswith(other.text) for other, one in pairwise(pieces))
    assert pieces[-1].raw["plan"]["prompt_tokens"] > 0


def test_coroutines_get_the_same_answer(llm):
    async def both():
        return (await llm.achat(MESSAGES)).message.content, (await llm.acomplete(QUESTION)).text

    assert set(asyncio.run(both())) == {llm.complete(QUESTION).text}


def test_its_metadata_are_the_model_s(llm):
    found = llm.metadata
    assert (found.model_name, found.num_output, found.is_chat_model) == ("reference", 8, True)
    assert found.context_window > 1000
    assert 8 < Kvweave(home=llm.home).metadata.num_output <= found.context_window


@pytest.mark.parametrize(
    ("message", "options", "named"),
    [
        (ChatMessage(role="tool", content="x"), {}, "role 'tool'"),
        (ChatMessage(role="user", content=[ImageBlock(url="http://x/y.png")]), {}, "ImageBlock"),
        (ChatMessage("x"), {"temprature": 1}, "no option 'temprature'"),
    ],
)
def test_what_is_not_supported_is_refused_in_one_line(llm, message, options, named):
    with pytest.raises(InvalidRequest, match=named):
        llm.chat([message], **options)
