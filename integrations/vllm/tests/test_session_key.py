"""The key by which a router sends requests with the same heavy chunks to the same replica; runs without vLLM."""

import random

import pytest

import kvweave_vllm
from kvweave.testing import tiny_tokenizer
from kvweave_vllm import session_key

CHUNKS = [[number] * (10 + number) for number in range(8)]


def test_the_order_of_chunks_and_repeated_ones_do_not_matter():
    keys = {session_key(random.Random(seed).sample(CHUNKS, len(CHUNKS))) for seed in range(20)}
    assert keys == {session_key([*CHUNKS, CHUNKS[3]])}
    assert len(keys.pop()) == 32


def test_the_key_is_that_of_one_of_the_chunks():
    assert session_key(CHUNKS) in {session_key([chunk]) for chunk in CHUNKS}


def test_tenants_share_no_key():
    assert not {session_key([each], "a") for each in CHUNKS} & {session_key([each], "b") for each in CHUNKS}


def test_no_chunks_have_no_key():
    assert session_key([]) == session_key([[]]) == ""


def test_a_chunk_is_chosen_as_often_as_it_has_tokens():
    requests = [[[number, *[0] * 299], [number, *[1] * 99]] for number in range(2000)]
    heavy = sum(session_key(chunks) == session_key(chunks[:1]) for chunks in requests)
    assert heavy / len(requests) == pytest.approx(0.75, abs=0.04)  # 300 of 400 tokens; four standard errors


def test_requests_share_a_key_as_often_as_they_share_tokens():
    same = 0
    for number in range(2000):
        shared, one, other = (
            [number, kind, *[0] * (tokens - 2)] for kind, tokens in enumerate((600, 100, 300))
        )
        same += session_key([shared, one]) == session_key([other, shared])
    assert same / 2000 == pytest.approx(0.6, abs=0.045)  # 600 of 1,000 tokens; four standard errors


def test_requests_and_preparations_carry_it():
    tokenizer = tiny_tokenizer()
    chunks = ["the river in the north", "the inn on the road", "the rain began again"]

    def key(texts, **options):
        body = kvweave_vllm.request(tokenizer, texts, "Where?", recipe="reuse", model="m", **options)
        return body["extra_headers"]["x-session-id"]

    prepared = {
        body["extra_headers"]["x-session-id"]
        for body in kvweave_vllm.preparations(tokenizer, chunks, recipe="reuse", model="m")
    }
    assert key(chunks) == key(chunks[::-1]) in prepared
    assert len(prepared) == 3
    assert key(chunks, tenant="other") not in prepared
    headers = kvweave_vllm.request(tokenizer, chunks, "?", recipe="reuse", extra_headers={"x-mine": "1"})
    assert set(headers["extra_headers"]) == {"x-session-id", "x-mine"}
    assert "extra_headers" not in kvweave_vllm.request(tokenizer, [], "Where?", recipe="reuse")
