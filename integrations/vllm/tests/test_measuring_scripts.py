"""What the measuring scripts ask; runs without vLLM."""

import importlib
from argparse import Namespace
from pathlib import Path

import pytest

from kvweave.remote.fields import SALT
from kvweave.testing import tiny_tokenizer


@pytest.fixture(scope="module")
def throughput():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parents[1])
        yield importlib.import_module("throughput")


@pytest.fixture(scope="module")
def corpus(throughput):
    return throughput.NaturalCorpus.first(tiny_tokenizer(), 4)


def test_the_search_finds_the_document_that_a_question_is_about(throughput, corpus):
    questions = throughput.NaturalCorpus.first(tiny_tokenizer(), 1).questions
    own = set(range(len(corpus.documents[0])))
    first = [corpus.found(question, 3)[0] in own for question in questions]
    assert sum(first) > 0.6 * len(first) > 0  # a quarter by chance


def test_orders_bring_the_same_chunks_and_a_longer_draw_begins_alike(throughput, corpus):
    stream = throughput.Stream(corpus, 4, 1.0, 0)
    ranked, shuffled = (stream.draw(2, 12, order) for order in throughput.ORDERS)
    assert stream.draw(0, 12, "retrieved")[2:] == ranked
    assert [set(each.documents) for each in ranked] == [set(each.documents) for each in shuffled]
    assert [each.documents for each in ranked] != [each.documents for each in shuffled]
    assert ranked[0].documents == corpus.found(ranked[0].question, 4)


def test_all_systems_get_the_same_prompt_and_only_kvweave_its_fields(throughput, corpus, tmp_path):
    args = Namespace(
        model="m",
        tokens=1024,
        new_tokens=4,
        recipe="reuse",
        ratio=None,
        dtype="float32",
        kv_gb=1,
        vllm_flags="",
    )
    request = throughput.Stream(corpus, 4, 1.0, 0).draw(0, 1, "retrieved")[0]
    systems = {name: throughput.System(name, args, tiny_tokenizer(), tmp_path) for name in throughput.SYSTEMS}
    bodies = {name: system.call(request, corpus).body for name, system in systems.items()}
    assert bodies["vllm"] == bodies["prefix"]
    own = {name: value for name, value in bodies["kvweave"].items() if name not in bodies["vllm"]}
    assert {**bodies["vllm"], **own} == bodies["kvweave"]
    assert len(own.pop("kv_transfer_params")["kvweave"]["spans"]) == 4
    assert own.pop("cache_salt").startswith(SALT)
    assert own == {}
    commands = {name: system.server.command for name, system in systems.items()}
    assert [name for name in commands if "--no-enable-prefix-caching" in commands[name]] == ["vllm"]
    assert [name for name in commands if "--kv-transfer-config" in commands[name]] == ["kvweave"]
