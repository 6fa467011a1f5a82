"""Several answers to one request (`n`): generated together, and the same as one after the other."""

import json
import threading

import pytest

from kvweave.server.running import together


def test_so_many_calls_run_at_once_and_no_more():
    met, running, most, guard = threading.Barrier(3), 0, 0, threading.Lock()

    def call(number):
        nonlocal running, most
        with guard:
            running += 1
            most = max(most, running)
        met.wait(10)  # breaks unless three run at once
        with guard:
            running -= 1
            done.append(number)

    done = []
    together(call, range(9), 3, threading.Event())
    assert sorted(done) == list(range(9))
    assert most == 3


def test_the_first_error_ends_the_others_and_is_raised():
    cancelled, ended = threading.Event(), []

    def call(number):
        if number == 1:
            raise ValueError("broken")
        assert cancelled.wait(10)
        ended.append(number)

    with pytest.raises(ValueError, match="broken"):
        together(call, range(9), 2, cancelled)
    assert set(ended) in (
        {0},
        {0, 2},
    )  # the thread that failed may have begun another before the error is seen


def test_the_first_answer_to_each_prompt_comes_before_the_others(fake):
    body = {"prompt": ["one", "two"], "n": 3, "stream": True, "temperature": 1}
    with fake() as running, running.http.stream("POST", "/v1/completions", json=body) as reply:
        lines = [line.removeprefix("data: ") for line in reply.iter_lines() if line.startswith("data: {")]
    choices = [choice for line in lines for choice in json.loads(line)["choices"]]
    ends = [choice["index"] for choice in choices if choice["finish_reason"]]
    assert sorted(ends[:2]) == [0, 3]
    assert sorted(ends[2:]) == [1, 2, 4, 5]
    last = max(number for number, choice in enumerate(choices) if choice["index"] in (0, 3))
    assert all(choice["index"] in (0, 3) for choice in choices[: last + 1])
    texts = ["".join(each["text"] for each in choices if each["index"] == index) for index in range(6)]
    assert texts == ["word word word "] * 6


@pytest.mark.parametrize("stream", [False, True])
def test_each_answer_is_that_of_its_seed_alone(served, stream):
    body = {
        "messages": [{"role": "user", "content": "What is the password of Glorric?"}],
        "max_tokens": 6,
        "temperature": 1.5,
        "documents": [{"id": "a", "text": "The password of Glorric is walnut. " * 5}],
    }

    def texts(**more):
        content = {**body, **more, "stream": stream}
        reply = served.http.post("/v1/chat/completions", json=content)
        if not stream:
            return [choice["message"]["content"] for choice in reply.json()["choices"]]
        lines = [line[6:] for line in reply.text.splitlines() if line.startswith("data: {")]
        pieces = {}
        for choice in (choice for line in lines for choice in json.loads(line)["choices"]):
            pieces.setdefault(choice["index"], []).append(choice["delta"].get("content") or "")
        return ["".join(pieces[index]) for index in sorted(pieces)]

    assert len(texts(n=5, seed=20)) == 5
    # The documents are stored now, so that all have the same KV from here on.
    found = texts(n=5, seed=7)
    assert found == [texts(seed=7 + index)[0] for index in range(5)]
    assert len(set(found)) > 1
