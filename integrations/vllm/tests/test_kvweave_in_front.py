"""`kvweave serve --engine vllm=URL` in front of a real vLLM answers as kvweave's own engine does.

kvweave runs in its own environment, as it would on another machine: the one that KVWEAVE_PYTHON names, else the project's.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest

pytest.importorskip(
    "vllm", reason="vLLM is not installed here; integrations/vllm/README.md says how to run these tests"
)

import httpx
from engines import text
from running_vllm import free_port, running, vllm_server

import kvweave

PYTHON = os.environ.get("KVWEAVE_PYTHON", str(Path(__file__).parents[3] / ".venv" / "bin" / "python"))
pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(
        not Path(PYTHON).exists(), reason="make env has not been run, and KVWEAVE_PYTHON names no Python"
    ),
]
QUESTIONS = ("Where is the inn?", "When did the rain begin?")
RECIPES = ("full", "reuse", "weave", "weave-shifted")
SETTINGS = {"system": "Answer.", "storage": "exact", "chunk_tokens": 64, "top_k": 3, "max_new_tokens": 12}
IN_PROCESS = """
import json, sys, kvweave
home, model, folder, settings, questions, recipes = json.loads(sys.argv[1])
with kvweave.open("notes", home=home, model=model, dtype="float32", **settings) as base:
    base.add(folder)
    print(json.dumps({f"{recipe} {each}": base.ask(each, recipe=recipe, cache="off").text
                      for recipe in recipes for each in questions}))
"""


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    folder = tmp_path_factory.mktemp("documents")
    for number in range(3):
        (folder / f"{number}.txt").write_text("\n\n".join(text(10 * number + part) for part in range(2)))
    return folder


@pytest.fixture(scope="module")
def vllm(tmp_path_factory):
    home = tmp_path_factory.mktemp("vllm")
    with vllm_server(home) as url:
        yield url, home


@pytest.fixture(scope="module")
def front(vllm, documents, tmp_path_factory):
    """A client of `kvweave serve` with the documents in the knowledge base `notes`."""
    url, vllm_home = vllm
    home, port = tmp_path_factory.mktemp("front"), free_port()
    command = [
        PYTHON,
        "-m",
        "kvweave",
        "serve",
        "--engine",
        f"vllm={url}",
        "--port",
        str(port),
        "--no-idle-work",
    ]
    command += ["--model", str(vllm_home / "model")]
    command += [
        part for name, value in SETTINGS.items() for part in (f"--{name.replace('_', '-')}", str(value))
    ]
    with (
        running(command, home / "log", f"http://127.0.0.1:{port}", home) as address,
        httpx.Client(base_url=address, timeout=300, trust_env=False) as client,
    ):
        client.post("/v1/kb", json={"name": "notes"}).raise_for_status()
        files = [("files", (each.name, each.read_bytes())) for each in sorted(documents.iterdir())]
        client.post("/v1/kb/notes/documents", files=files).raise_for_status()
        yield client


def ask(client, question, recipe, **more):
    body = {"messages": [{"role": "user", "content": question}], "kb": "notes", **more}
    found = client.post("/v1/chat/completions", json={**body, "kvweave": {"cache": "off", "recipe": recipe}})
    found.raise_for_status()
    return found


def test_vllm_has_prepared_the_chunks(front, vllm):
    with kvweave.ChunkStore(vllm[1] / "store") as store:
        kinds = {kind: count.entries for kind, count in store.stats().by_kind.items()}
    assert kinds["woven-5-1"] == sum(each["chunks"] for each in front.get("/v1/kb").json()["data"])


def test_answers_are_those_of_kvweaves_own_engine(front, vllm, documents, tmp_path):
    given = [str(tmp_path), str(vllm[1] / "model"), str(documents), SETTINGS, QUESTIONS, RECIPES]
    done = subprocess.run(
        [PYTHON, "-c", IN_PROCESS, json.dumps(given)], capture_output=True, text=True, check=True
    )
    expected = json.loads(done.stdout.splitlines()[-1])
    assert len(set(expected.values())) > 1
    found = {
        f"{recipe} {each}": ask(front, each, recipe).json()["choices"][0]["message"]["content"].strip()
        for recipe in RECIPES
        for each in QUESTIONS
    }
    assert found == expected


def test_a_stream_has_the_same_text_and_vllms_usage(front):
    whole = ask(front, QUESTIONS[0], "weave")
    lines = ask(
        front, QUESTIONS[0], "weave", stream=True, stream_options={"include_usage": True}
    ).text.splitlines()
    events = [json.loads(each[6:]) for each in lines if each.startswith("data: {")]
    deltas = [choice["delta"].get("content") or "" for each in events for choice in each["choices"]]
    assert len([each for each in deltas if each]) > 1
    assert "".join(deltas) == whole.json()["choices"][0]["message"]["content"]
    (usage,) = [each["usage"] for each in events if each.get("usage")]
    assert usage["completion_tokens"] == whole.json()["usage"]["completion_tokens"] > 0
    assert usage["prompt_tokens_details"]["cached_tokens"] > 0
