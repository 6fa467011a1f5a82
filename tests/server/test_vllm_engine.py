"""`kvweave serve --engine vllm=URL`: what vLLM is asked, how its replies come out, and what is refused."""

import json
import shutil

import pytest

from kvweave.answering.pipeline import reply_to
from kvweave.config import GenerationConfig, read_config
from kvweave.errors import EngineError, EngineUnavailable, InvalidRequest, UnsupportedModel
from kvweave.kvstore.keys import digest_tokens
from kvweave.kvstore.memory_store import MemoryStore
from kvweave.models.loading import SHIPPED
from kvweave.recipes.methods import recipe_named
from kvweave.remote.affinity import session_key
from kvweave.remote.model import connect
from kvweave.remote.preparation import prepared_by_vllm
from kvweave.samples import DOCUMENTS
from kvweave.state.resident import ResidentModels
from kvweave.types import Prompt
from support.fake_vllm import described, fake_vllm
from support.running_server import server

QUESTION = "What is the password of Glorric?"
CHAT = [{"role": "user", "content": QUESTION}]
FRESH = {"cache": "off"}


@pytest.fixture(scope="module")
def vllm():
    with fake_vllm() as found:
        yield found


@pytest.fixture(scope="module")
def served(vllm, tmp_path_factory):
    """A server that answers by `vllm`, with a knowledge base `notes` over a sample document."""
    home = tmp_path_factory.mktemp("engine") / "home"
    with server(home, engine=f"vllm={vllm.url}/v1", engine_key="secret", model="reference") as running:
        running.http.post("/v1/kb", json={"name": "notes"}).raise_for_status()
        files = [("files", ("passwords.md", (DOCUMENTS / "passwords.md").read_bytes()))]
        running.http.post("/v1/kb/notes/documents", files=files).raise_for_status()
        yield running


@pytest.fixture(autouse=True)
def answering(vllm):
    vllm.dies_after = vllm.refusal = vllm.cached_tokens = None
    vllm.endless = False
    vllm.gave_up.clear()


def ask(served, **more):
    body = {"messages": CHAT, "kb": "notes", "kvweave": FRESH, **more}
    return served.http.post("/v1/chat/completions", json=body)


def streamed(served, **more):
    """Return the text of a streamed answer, and its last event."""
    lines = ask(served, stream=True, **more).text.splitlines()
    events = [json.loads(each[6:]) for each in lines if each.startswith("data: {")]
    deltas = [choice["delta"].get("content") or "" for each in events for choice in each.get("choices", ())]
    return "".join(deltas), events[-1]


def fields(body):
    return body["kv_transfer_params"]["kvweave"]


def test_vllm_answers_the_prompt_that_kvweave_makes(served, vllm):
    found = ask(served).json()
    assert found["choices"][0]["message"]["content"].strip() == "walnut."
    assert found["choices"][0]["finish_reason"] == "stop"
    body, base = vllm.asked[-1], served.parts.serving.tenant(None).bases.get("notes")
    prompt = base.model.template.render(base.prompt(QUESTION))
    assert body["prompt"] == list(prompt.token_ids)
    assert fields(body)["spans"] == [[each.start, each.end] for each in prompt.spans if each.kind == "chunk"]
    assert fields(body)["user"] == list(prompt.user_rows)
    assert fields(body)["recipe"] == "weave-shifted"
    assert fields(body)["model"] == "d" * 32
    assert body["cache_salt"].startswith("kvweave:")
    assert body["model"] == "served"
    assert vllm.headers["Authorization"] == "Bearer secret"
    chunks = (body["prompt"][start:end] for start, end in fields(body)["spans"])
    assert vllm.headers["x-session-id"] == session_key(chunks)  # a router's


def test_the_usage_is_vllms(served, vllm):
    found = ask(served, kvweave={**FRESH, "recipe": "reuse", "ratio": 0}).json()
    ids = vllm.tokenizer(vllm.text, add_special_tokens=False)["input_ids"]
    assert found["usage"]["completion_tokens"] == len(ids) + 1  # vLLM counts the end
    assert found["usage"]["prompt_tokens"] == len(vllm.asked[-1]["prompt"])


def test_options_of_a_request_are_passed_on(served, vllm):
    ask(served, max_tokens=7, temperature=0.5, top_p=0.9, seed=3, stop=["\n\n"]).raise_for_status()
    assert vllm.asked[-1]["stop"] == ["\n\n"]
    sent = {
        "max_tokens": 7,
        "temperature": 0.5,
        "top_p": 0.9,
        "seed": 3,
        "repetition_penalty": 1.0,
        "top_k": 0,
    }
    assert sent.items() <= vllm.asked[-1].items()
    assert ask(served, max_tokens=1).json()["choices"][0]["finish_reason"] == "length"


def test_a_stop_text_ends_the_answer_wherever_vllm_went_on_to(served):
    assert ask(served, stop=["nut"]).json()["choices"][0]["message"]["content"].strip() == "wal"


def test_pieces_come_as_vllm_sends_them(served):
    text, last = streamed(served)
    assert text.strip() == "walnut."
    assert "error" not in last


def test_log_probabilities_are_vllms(served):
    found = ask(served, logprobs=True, top_logprobs=1).json()["choices"][0]["logprobs"]["content"]
    assert {each["logprob"] for each in found} == {-0.25}
    assert [len(each["top_logprobs"]) for each in found] == [1] * len(found)


def test_the_answer_cache_stands_in_front(served, vllm):
    ask(served, kvweave={"cache": "refresh"}).raise_for_status()
    before = len(vllm.asked)
    found = ask(served, kvweave={"cache": "use"})
    assert found.headers["X-Kvweave-Cache"] == "answer"
    assert len(vllm.asked) == before


def test_chats_without_documents_name_no_chunks(served, vllm):
    served.http.post("/v1/chat/completions", json={"messages": CHAT}).raise_for_status()
    assert fields(vllm.asked[-1])["spans"] == []
    assert "cache_salt" not in vllm.asked[-1]


def test_added_documents_are_prepared_by_vllm_once(served, vllm):
    base = served.parts.serving.tenant(None).bases.get("notes")
    chunks = [row.kv_digest for row in base.state.documents.all_chunks()]
    last = [body["prompt"][slice(*fields(body)["spans"][-1])] for body in vllm.prepared]
    assert sorted(map(digest_tokens, last)) == sorted(chunks)
    assert {fields(body)["recipe"] for body in vllm.prepared} == {"int8+weave-shifted"}
    before = len(vllm.prepared)
    assert base.prepare().computed == 0
    assert base.missing_kv() == 0
    assert len(vllm.prepared) == before


def test_chunks_that_were_prepared_count_as_reused_as_far_as_vllm_says(served, vllm):
    found = ask(served)
    assert found.headers["X-Kvweave-Cache"] == "kv"
    assert found.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert (
        ask(served, kvweave={**FRESH, "recipe": "weave"}).headers["X-Kvweave-Cache"] == "kv"
    )  # prepared alike
    assert ask(served, kvweave={**FRESH, "recipe": "reuse"}).headers["X-Kvweave-Cache"] == "miss"
    vllm.cached_tokens = 0
    assert ask(served).json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_callers_documents_are_prepared_and_named(served, vllm):
    documents = [{"id": "a", "text": "The password of Zorb is teapot."}]
    found = served.http.post("/v1/chunks", json={"documents": documents, "recipe": "reuse"}).json()
    assert found["computed"] == 1
    assert fields(vllm.prepared[-1])["prepare"] is True
    body = {"messages": CHAT, "documents": documents, "kvweave": {"recipe": "reuse"}}
    assert served.http.post("/v1/chat/completions", json=body).headers["X-Kvweave-Cache"] == "kv"
    assert len(fields(vllm.asked[-1])["spans"]) == 1


def test_what_vllm_refuses_is_a_bad_request_that_names_the_field(served, vllm):
    vllm.refusal = "top_k must be -1", 400, "top_k"
    found = ask(served)
    assert found.status_code == 400
    assert found.json()["error"]["param"] == "top_k"
    assert "top_k must be -1" in found.json()["error"]["message"]
    vllm.refusal = "no such key", 401, None
    assert ask(served).status_code == 502
    vllm.refusal = "it is 'd…'", 400, "kv_transfer_params.kvweave.model"
    assert ask(served).json()["error"]["code"] == "engine_error"
    vllm.refusal = "too many", 503, None
    assert (ask(served).status_code, ask(served).headers["Retry-After"]) == (503, "5")
    vllm.refusal = None
    assert ask(served).status_code == 200


def test_a_vllm_that_dies_in_the_middle_ends_the_stream_with_an_error(served, vllm):
    vllm.dies_after = 1
    _, last = streamed(served)
    assert last["error"]["code"] == "engine_unavailable"
    assert ask(served).status_code == 503
    vllm.dies_after = None
    assert streamed(served)[0].strip() == "walnut."


def test_a_client_that_leaves_ends_vllms_work(served, vllm):
    vllm.endless = True
    body = {"messages": CHAT, "kb": "notes", "kvweave": FRESH, "stream": True, "max_tokens": 500}
    with served.http.stream("POST", "/v1/chat/completions", json=body) as reply:
        next(reply.iter_lines())
    assert vllm.gave_up.wait(10)


def test_what_needs_kv_here_is_refused(served, vllm):
    before = len(vllm.asked)
    found = ask(served, kvweave={**FRESH, "recipe": "ape"})
    assert found.status_code == 400
    assert "recipe ape does not work with --engine vllm=" in found.json()["error"]["message"]
    assert len(vllm.asked) == before
    base = served.parts.serving.tenant(None).bases.get("notes")
    with pytest.raises(UnsupportedModel, match="a conversation does not work with --engine vllm="):
        base.conversation("talk")
    with pytest.raises(UnsupportedModel, match="--kv-budget"):
        ResidentModels(config(served.parts.config.home, vllm.url, kv_budget=0.5)).load()


def test_another_server_answers_when_one_is_gone(tmp_path, vllm):
    with fake_vllm() as gone:
        model = connect(config(tmp_path, f"{gone.url},{vllm.url}").model, tmp_path)
    prompt = model.template.render(Prompt(QUESTION, ("The password of Glorric is walnut.",)))
    before = len(vllm.asked)
    recipe = prepared_by_vllm(recipe_named("reuse"))
    for number in range(3):
        decoded = reply_to(model, MemoryStore(), recipe, prompt, GenerationConfig(), 9)
        assert decoded.text.strip() == "walnut."
        assert len(vllm.asked) == before + number + 1


def config(home, urls, **given):
    return read_config(home, {}, engine=f"vllm={urls}", **{"model": "reference", **given})


def test_no_weights_are_needed_here(tmp_path, vllm):
    folder = tmp_path / "model"
    shutil.copytree(SHIPPED["reference"], folder, ignore=shutil.ignore_patterns("*.safetensors"))
    model = connect(config(tmp_path, vllm.url, model=str(folder)).model, tmp_path)
    assert model.fingerprint.name == str(folder)
    assert model.fingerprint.digest == vllm.description.model.digest


REFUSED = [
    ({"weights": "x" * 32, "configuration": "c" * 32}, {}, UnsupportedModel, "other configuration"),
    ({"tokenizer": "t" * 32}, {}, UnsupportedModel, "other tokenizer"),
    ({}, {"dtype": "bfloat16"}, UnsupportedModel, "dtype is bfloat16"),
    ({}, {"weights": "int8"}, UnsupportedModel, "weights is int8"),
]


@pytest.mark.parametrize(("there", "here", "kind", "message"), REFUSED)
def test_another_model_is_refused_at_the_start(tmp_path, there, here, kind, message):
    with fake_vllm(described(**there)) as other, pytest.raises(kind, match=message):
        connect(config(tmp_path, other.url, **here).model, tmp_path)


def test_wrong_servers_are_refused_at_the_start(tmp_path, vllm):
    with fake_vllm(plugin=False) as plain, pytest.raises(EngineError, match="without kvweave's plug-in"):
        connect(config(tmp_path, plain.url).model, tmp_path)
    with (
        fake_vllm(described(digest="e" * 32)) as other,
        pytest.raises(UnsupportedModel, match="the same model"),
    ):
        connect(config(tmp_path, f"{vllm.url},{other.url}").model, tmp_path)
    with pytest.raises(EngineUnavailable, match=r"http://127.0.0.1:9 cannot be reached"):
        connect(config(tmp_path, "http://127.0.0.1:9").model, tmp_path)
    with pytest.raises(InvalidRequest, match="no address of a vLLM server"):
        connect(config(tmp_path, "localhost:8000").model, tmp_path)
    with pytest.raises(InvalidRequest, match="write transformers, or vllm="):
        config(tmp_path, "")
