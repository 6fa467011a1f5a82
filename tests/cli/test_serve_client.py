"""ask and chat use a running server of their home if it answers as they would; otherwise they run by themselves."""

import subprocess
import sys
from pathlib import Path

import pytest

from kvweave.server.process.discovery import find_server
from support.scripted_server import DONE, error, event, reply, serving, settings, stream

ASK, SETTINGS = "POST /v1/kb/default/ask", "GET /v1/settings"
CHAT = "POST /v1/kb/default/conversations/default"
GLORRIC = "What is the password of Glorric?"
ANSWER = stream(
    event("piece", {"text": "from "}),
    event("piece", {"text": "afar"}),
    event("done", {**DONE, "answer": "from afar"}),
)


@pytest.fixture
def home(environment):
    folder = Path(environment["KVWEAVE_HOME"])
    folder.mkdir()
    return folder


@pytest.fixture
def filled(home, indexed_home):
    """A home with a knowledge base that this process can answer from as well, a test's own."""
    return indexed_home


def running(home, ask=ANSWER, **given):
    return serving({SETTINGS: [settings(home, **given)], ASK: [ask]}, home)


def test_the_server_of_the_home_answers(home, command):
    with running(home) as server:
        told = command("ask", GLORRIC, KVWEAVE_API_KEY="k1,k2").stdout
        assert told.startswith("from afar\n")
        assert "/d/a.md [0:9]  A passage" in told
        assert server.url not in told
    (_, (name, headers, body)) = server.requests
    assert name == ASK
    assert headers["Authorization"] == "Bearer k1"
    assert body == {"question": GLORRIC, "stream": True, "cache": "use"}


def test_explain_and_json_say_so(home, command):
    with running(home) as server:
        told = command("ask", GLORRIC, "--explain").stdout
        assert told.rstrip().endswith(f"answered by the server at {server.url}")
        assert "fresh" in told
        found = command.json("ask", GLORRIC)
        assert found["server"] == {"url": server.url, "used": True}
        assert found["text"] == "from afar"
        assert found["plan"]["prompt_tokens"] == 4
        assert "tokens" not in found
        assert command.json("ask", GLORRIC, "--explain")["tokens"] == [{**DONE["tokens"][0], "score": None}]
    assert [body.get("explain") for name, _, body in server.requests if name == ASK] == [True, None, True]


def test_options_of_one_question_go_with_it(home, command):
    words = "--recipe prefix --ratio 0 --top-k 3 --max-new-tokens 9 --temperature 0.5 --think --drop-chunks --fresh --kv-budget 0.5"
    with running(home) as server:
        command("ask", GLORRIC, *words.split())
    assert server.requests[-1][2] == {
        "question": GLORRIC, "stream": True, "recipe": "prefix", "ratio": 0.0, "top_k": 3, "max_new_tokens": 9,
        "temperature": 0.5, "think": True, "drop_chunks": True, "cache": "refresh", "kv_budget": 0.5,
    }  # fmt: skip


def test_settings_that_the_server_does_not_share_go_with_the_question(home, command):
    with running(home, top_k=7, seed=3) as server:
        command("ask", GLORRIC, KVWEAVE_SEED="4")
    assert server.requests[-1][2] == {
        "question": GLORRIC,
        "stream": True,
        "cache": "use",
        "top_k": 5,
        "seed": 4,
    }


def test_what_is_not_given_is_the_servers(home, command):
    with running(home, kv_budget=0.5, max_new_tokens=4, storage="int8", model="/some/model") as server:
        assert command("ask", GLORRIC).stdout.startswith("from afar\n")
    assert server.requests[-1][2] == {"question": GLORRIC, "stream": True, "cache": "use"}


@pytest.mark.parametrize(
    ("words", "given", "why"),
    [
        (["--resident-bytes", "1GB"], {}, "its resident_bytes is not 1000000000"),
        (["--storage", "exact"], {}, "its storage is not 'exact'"),
        (["--dtype", "float32"], {}, "its dtype is not 'float32'"),
        (["--resident-bytes", "1GB"], {"resident_bytes": 2 * 10**9}, "its resident_bytes is not 1000000000"),
    ],
)
def test_what_the_server_cannot_honour_is_done_here(filled, command, words, given, why):
    with running(filled, **given) as server:
        plain = command("ask", GLORRIC, *words)
        assert plain.stdout.startswith("walnut\n")
        assert server.url not in plain.stdout + plain.stderr
        told = command("ask", GLORRIC, *words, "--explain").stdout
        assert told.rstrip().endswith(f"the server at {server.url} was not used: {why}")
    assert {name for name, *_ in server.requests} == {SETTINGS}


def test_another_model_is_loaded_here(filled, command):
    with running(filled) as server:
        failed = command("ask", GLORRIC, "--model", "/nowhere/model", code=1)
    assert "/nowhere/model" in failed.stderr
    assert {name for name, *_ in server.requests} == {SETTINGS}


@pytest.mark.parametrize("how", [["--no-server"], {"KVWEAVE_USE_SERVER": "no"}, "use_server = false\n"])
def test_the_server_can_be_left_alone(filled, command, how):
    words, variables = (how, {}) if isinstance(how, list) else ([], how if isinstance(how, dict) else {})
    if isinstance(how, str):
        (filled / "config.toml").write_text(how)
    with running(filled) as server:
        told = command("ask", GLORRIC, *words, "--explain", **variables).stdout
    assert told.startswith("walnut\n")
    assert server.url not in told
    assert server.requests == []


@pytest.mark.parametrize(
    "refusal", [error("no valid API key", 401), error("it needs a key of --api-key", 403)]
)
def test_without_a_key_for_this_home_the_command_runs_by_itself(filled, command, refusal):
    """A tenant's key is refused the settings: what it asks would be answered from other knowledge bases."""
    with serving({SETTINGS: [refusal], ASK: [ANSWER]}, filled) as server:
        told = command("ask", GLORRIC, "--explain").stdout
    assert told.startswith("walnut\n")
    assert "key" in told.splitlines()[-1]
    assert len(server.requests) == 1


def test_a_server_that_dies_before_the_first_piece_is_replaced(filled, command):
    for ask in (stream(None), stream(event("progress", {"done": 1, "total": 2}), None), stream()):
        with running(filled, ask) as server:
            told = command("ask", GLORRIC, "--explain", "--fresh").stdout
            assert told.startswith("walnut\n")
            assert (
                f"the server at {server.url} was not used: the server at {server.url} does not respond"
                in told
            )


def test_a_server_that_dies_in_the_answer_gives_one_line(home, command):
    with running(home, stream(event("piece", {"text": "from "}), None)):
        failed = command("ask", GLORRIC, code=1)
    assert failed.stdout == "from "
    (line,) = failed.stderr.strip().splitlines()
    assert "the answer above is incomplete: ask again" in line


def test_with_json_nothing_is_printed_before_the_end_so_this_process_answers(filled, command):
    with running(filled, stream(event("piece", {"text": "from "}), None)):
        assert command.json("ask", GLORRIC)["text"] == "walnut"


def test_a_refusal_is_explained_by_the_command_itself(filled, command):
    with running(filled, error("top_k: Input should be greater than 0", 400)):
        here = command("ask", GLORRIC, "--top-k", "0", "--no-server", code=1).stderr
        assert command("ask", GLORRIC, "--top-k", "0", code=1).stderr == here
        assert "top_k is 0" in here


def test_a_busy_server_is_one_line(home, command, monkeypatch):
    monkeypatch.setattr("kvweave.server.client.ServerClient.__init__.__kwdefaults__", {"busy_s": 0.0})
    with running(home, error("64 requests wait", 429, Retry_After="5")):
        failed = command("ask", GLORRIC, code=1)
    assert "is busy (64 requests wait); try again later, or --no-server" in failed.stderr
    assert failed.stdout == ""


def test_a_home_without_a_server_says_nothing_of_one(filled, command):
    assert find_server(filled) is None
    assert set(command.json("ask", GLORRIC)) == {
        "text", "sources", "plan", "timing", "decoding", "reasoning", "finish_reason",
        "supported",
    }  # fmt: skip


def test_a_question_to_a_server_imports_no_model_library(home, environment):
    code = """
import sys
from kvweave.__main__ import main
sys.argv = ["kvweave", *sys.argv[1:]]
try:
    main()
finally:
    heavy = {"torch", "transformers", "lancedb", "numpy", "pyarrow", "httpx", "fastapi"} & set(sys.modules)
    print("imported:", sorted(heavy), file=sys.stderr)
"""
    for words in (["ask", GLORRIC], ["ask", GLORRIC, "--json"], ["chat"]):
        replies = {SETTINGS: [settings(home)], ASK: [ANSWER], CHAT: [ANSWER]}
        with serving(replies, home):
            done = subprocess.run(
                [sys.executable, "-c", code, *words],
                env=environment, input="Hello?\n", capture_output=True, text=True, timeout=60, check=True,
            )  # fmt: skip
        assert "from afar" in done.stdout
        assert done.stderr == "imported: []\n"


def test_chat_sends_its_turns_to_the_server(home, command):
    turns = [stream(event("piece", {"text": text}), event("done", {})) for text in ("one", "two")]
    replies = {SETTINGS: [settings(home)], CHAT: turns, f"DELETE {CHAT.removeprefix('POST ')}": [reply({})]}
    with serving(replies, home) as server:
        assert command("chat", "--new", "--top-k", "2", input_text="a\nb\n\n").stdout == "one\ntwo\n"
    assert [(name.split()[0], body) for name, _, body in server.requests] == [
        ("GET", None),
        ("DELETE", None),
        ("POST", {"question": "a", "top_k": 2, "stream": True}),
        ("POST", {"question": "b", "top_k": 2, "stream": True}),
    ]


def test_chat_goes_on_by_itself_when_the_server_is_gone(filled, command):
    first = stream(event("piece", {"text": "one"}), event("done", {}))
    with serving({SETTINGS: [settings(filled)], CHAT: [first, stream(None)]}, filled):
        told = command("chat", input_text=f"a\n{GLORRIC}\n").stdout
    assert told.startswith("one\nwalnut")


def test_chat_explains_once_who_answers(filled, command):
    told = command("chat", "--explain", input_text=f"{GLORRIC}\n")
    assert told.stderr == "answered by this process\n"
    with serving({SETTINGS: [settings(filled)], CHAT: [ANSWER, ANSWER]}, filled) as server:
        told = command("chat", "--explain", input_text="a\nb\n")
        assert told.stderr == f"answered by the server at {server.url}\n"
    with serving({SETTINGS: [settings(filled)]}, filled) as server:
        told = command("chat", "--explain", "--recipe", "prefix", input_text=f"{GLORRIC}\n")
        assert told.stderr == f"the server at {server.url} was not used: its recipe is not 'prefix'\n"
        assert "was not used" not in told.stdout


def test_chat_whose_server_dies_in_a_turn_gives_one_line(home, command):
    with serving({SETTINGS: [settings(home)], CHAT: [stream(event("piece", {"text": "on"}), None)]}, home):
        failed = command("chat", input_text="a\n", code=1)
    assert failed.stdout == "on"
    assert "the turns before this one are kept: run chat again" in failed.stderr


def test_a_chat_with_other_settings_runs_by_itself(filled, command):
    with serving({SETTINGS: [settings(filled)], CHAT: [ANSWER]}, filled) as server:
        told = command("chat", "--max-new-tokens", "5", input_text=f"{GLORRIC}\n").stdout
    assert told.startswith("walnut")
    assert {name for name, *_ in server.requests} == {SETTINGS}
