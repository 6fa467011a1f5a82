"""The retriever in LlamaIndex, over a knowledge base of sample documents."""

import pytest
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.schema import MetadataMode

from kvweave.errors import KnowledgeBaseNotFound
from kvweave.samples import DOCUMENTS
from llama_index.llms.kvweave import Kvweave
from llama_index.retrievers.kvweave import KvweaveRetriever

QUESTION = "What is the password of Glorric?"


def test_passages_come_best_first_with_their_place(home):
    found = KvweaveRetriever("notes", home=home, top_k=2).retrieve(QUESTION)
    assert len(found) == 2
    assert found[0].score >= found[1].score
    assert "walnut" in found[0].get_content()
    assert found[0].metadata["file_path"].endswith("passwords.md")
    lines = (DOCUMENTS / "passwords.md").read_text().splitlines()
    assert found[0].get_content().strip().startswith(lines[found[0].metadata["line"] - 1])


def test_the_model_answers_from_what_the_retriever_found(home):
    retriever = KvweaveRetriever("notes", home=home, top_k=2)
    llm = Kvweave(home=home, max_tokens=8)
    found = retriever.retrieve(QUESTION)
    reply = llm.complete(QUESTION, documents=found)
    assert "walnut" in reply.text
    assert [each["text"] for each in reply.raw["sources"]] == [
        node.node.get_content(MetadataMode.NONE) for node in found
    ]


def test_a_query_engine_takes_both(home):
    engine = RetrieverQueryEngine.from_args(
        KvweaveRetriever("notes", home=home, top_k=1), llm=Kvweave(home=home, max_tokens=8)
    )
    reply = engine.query(QUESTION)
    assert str(reply)
    assert len(reply.source_nodes) == 1


def test_a_missing_knowledge_base_is_named(home):
    with pytest.raises(KnowledgeBaseNotFound, match="letters"):
        KvweaveRetriever("letters", home=home).retrieve(QUESTION)
