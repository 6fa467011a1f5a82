"""What clients send and the middleware refuses; runs without vLLM."""

import asyncio
import json
from types import SimpleNamespace

import pytest

import kvweave_vllm
from kvweave.errors import InvalidRequest
from kvweave.kvstore.keys import digest_tokens
from kvweave.kvstore.memory_store import MemoryStore
from kvweave.models.prompt import PromptTemplate
from kvweave.remote.fields import DESCRIBE, SALT, Description, InvalidField, answering, read_task
from kvweave.testing import tiny_tokenizer
from kvweave.types import ModelFingerprint, Prompt
from kvweave.version import __version__
from kvweave_vllm import middleware
from kvweave_vllm.cli import flags, main
from kvweave_vllm.middleware import RequestCheck

IDS = list(range(100, 160))
CHUNKS = ("the river in the north", "the inn on the road", "the rain began again")
QUESTION = "Where is the inn?"


def read(**fields):
    return read_task({"kvweave": {"spans": [[5, 20], [20, 40]], "recipe": "weave", **fields}}, IDS)


def body(recipe="weave", chunks=CHUNKS, question=QUESTION, **options):
    return kvweave_vllm.request(tiny_tokenizer(), chunks, question, recipe=recipe, **options)


def salt(**options):
    return body(**options)["extra_body"].get("cache_salt", "")


def test_a_body_has_the_tokens_and_spans_of_kvweaves_own_prompt():
    prompt = PromptTemplate(tiny_tokenizer()).render(Prompt(QUESTION, CHUNKS))
    found = body(ratio=0.3, model="m", max_tokens=7)
    task = read_task(found["extra_body"]["kv_transfer_params"], found["prompt"])
    assert task.prompt(found["prompt"]).spans == prompt.spans[:1] + prompt.spans[1:]
    assert task.prompt(found["prompt"]).user_rows == prompt.user_rows
    assert (found["prompt"], found["model"], found["max_tokens"]) == (list(prompt.token_ids), "m", 7)
    assert (task.recipe.select, task.budget.ratio) == (read().recipe.select, 0.3)


def test_text_between_chunks_is_a_chunk_without_a_name():
    task = read(spans=[[5, 20], [25, 40]])
    spans = [(span.kind, span.start, span.end) for span in task.prompt(IDS).spans]
    assert spans == [
        ("system", 0, 5), ("chunk", 5, 20), ("chunk", 20, 25), ("chunk", 25, 40), ("question", 40, 60),
    ]  # fmt: skip


def test_other_requests_have_no_task():
    assert read_task(None, IDS) is None
    assert read_task({"other": {}}, IDS) is None


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"spans": [[5, 20], [19, 40]]}, "spans[1]"),
        ({"spans": [[5, 20], [20, 61]]}, "spans[1]"),
        ({"spans": [[20, 5]]}, "spans[0]"),
        ({"spans": [[20, 60]]}, "spans[0]"),
        ({"spans": [[5, 20, "0" * 32]]}, "spans[0]"),
        ({"spans": [[5, "x"]]}, "spans[0]"),
        ({"spans": 3}, "spans"),
        ({"spans": [], "prepare": True}, "spans"),
        ({"recipe": "nothing-like-it"}, "recipe"),
        ({"recipe": 3}, "recipe"),
        ({"recipe": "ape"}, "recipe"),
        ({"recipe": "cachecraft", "prepare": True}, "recipe"),
        ({"ratio": 1.5}, "ratio"),
        ({"ratio": "much"}, "ratio"),
        ({"ratio": 0.1, "coverage": 0.5}, "coverage"),
        ({"recipe": "epic", "coverage": 0.5}, "coverage"),
        ({"recipe": "reuse", "ratio": 0.5}, "ratio"),
        ({"user": [10, 30]}, "user"),
        ({"user": [50, 70]}, "user"),
        ({"prepare": True, "previous": 2}, "previous"),
        ({"color": "red"}, "color"),
    ],
)
def test_a_wrong_field_is_named(fields, field):
    with pytest.raises(InvalidField) as raised:
        read(**fields)
    assert raised.value.field == f"kv_transfer_params.kvweave.{field}"


def test_the_id_of_a_chunk_is_compared_with_its_tokens():
    assert read(spans=[[5, 20, digest_tokens(IDS[5:20])]]).spans == ((5, 20),)


def test_exact_requests_carry_the_tenant_alone_and_others_a_salt_of_their_own():
    for exact in ({"recipe": "prefix"}, {"recipe": "full"}, {"ratio": 1.0}):
        assert (salt(**exact), salt(**exact, tenant="t")) == ("", "t")
    approximate = [
        salt(), salt(ratio=0.2), salt(recipe="prophetkv"), salt(tenant="t"), salt(chunks=CHUNKS[::-1]), salt(question="When?"),
        salt(recipe="reuse"), salt(recipe="reuse", tenant="t"), salt(recipe="int8+reuse"),
    ]  # fmt: skip
    assert len(set(approximate)) == len(approximate)
    assert all(each.startswith(SALT) for each in approximate)
    assert salt(recipe="reuse", question="When?") == salt(
        recipe="reuse"
    )  # blocks that begin alike are shared


def test_preparations_bring_the_chunks_before_each_one():
    bodies = list(kvweave_vllm.preparations(tiny_tokenizer(), CHUNKS, recipe="following+reuse", model="m"))
    fields = [each["extra_body"]["kv_transfer_params"]["kvweave"] for each in bodies]
    assert [(len(each["spans"]), each["previous"]) for each in fields] == [(1, 0), (2, 1), (2, 1)]
    template = PromptTemplate(tiny_tokenizer())
    for number, (each, own) in enumerate(zip(bodies, fields, strict=True)):
        parts = [tuple(each["prompt"][start:end]) for start, end in own["spans"]]
        assert parts == [template.chunk_ids(text) for text in CHUNKS[max(0, number - 1) : number + 1]]
        assert each["max_tokens"] == 1


def test_impossible_requests_are_refused_where_they_are_made():
    with pytest.raises(InvalidRequest, match="ratio"):
        body(ratio=2)


def call(sent, content=None, **state):
    """Return the status and the reply of the middleware, or what it passed on."""
    passed, said = [], []

    async def app(scope, receive, send):
        passed.append((await receive())["body"])

    data = json.dumps(sent).encode() if content is None else content
    parts = [
        {"type": "http.request", "body": data[:10], "more_body": True},
        {"type": "http.request", "body": data[10:]},
    ]

    async def receive():
        return parts.pop(0)

    async def send(message):
        said.append(message)

    scope = {"type": "http", "method": "POST", "app": SimpleNamespace(state=SimpleNamespace(**state))}
    asyncio.run(RequestCheck(app)(scope, receive, send))
    return passed, said


def test_the_middleware_passes_on_what_it_read():
    found = body()
    sent = {"prompt": found["prompt"], **found["extra_body"]}
    for data in (sent, {"prompt": "text"}, [1, 2]):
        passed, said = call(data)
        assert (len(passed), said) == (1, [])
    assert call(None, b'{"kvweave" no json')[0]


def test_the_middleware_answers_as_openai_does():
    found = body()
    found["extra_body"]["kv_transfer_params"]["kvweave"]["recipe"] = "nothing"
    passed, said = call({"prompt": found["prompt"], **found["extra_body"]})
    assert (passed, said[0]["status"]) == ([], 400)
    error = json.loads(said[1]["body"])["error"]
    assert (error["param"], error["code"]) == ("kv_transfer_params.kvweave.recipe", 400)
    assert error["message"]


def test_the_middleware_says_what_is_served_and_refuses_requests_for_another_model(monkeypatch):
    model = ModelFingerprint("m", "w", "c", "t", "float32", "d" * 32)
    served = SimpleNamespace(fingerprint=model, name="m", dtype="float32")
    monkeypatch.setattr(middleware, "Served", lambda config: served)
    monkeypatch.setattr(middleware, "open_store", lambda config: MemoryStore())
    config = SimpleNamespace(model_config=SimpleNamespace(max_model_len=512))
    asked = {"prompt": [0], "kv_transfer_params": {"kvweave": DESCRIBE}}
    passed, said = call(asked, vllm_config=config)
    assert (passed, said[0]["status"]) == ([], 200)
    found = Description.read(json.loads(said[1]["body"])["kvweave"])
    assert found == Description(__version__, model, 512)
    sent = answering(PromptTemplate(tiny_tokenizer()).render(Prompt("Why?", CHUNKS)), "full", model="e" * 32)
    passed, said = call(sent, vllm_config=config)
    assert json.loads(said[1]["body"])["error"]["param"] == "kv_transfer_params.kvweave.model"
    sent["kv_transfer_params"]["kvweave"]["model"] = "d" * 32
    assert call(sent, vllm_config=config)[0]


def test_the_command_prints_flags(capsys):
    main(["flags", "--store", "/some/folder", "--max-rows", "100"])
    printed = capsys.readouterr().out
    assert '"store": "/some/folder"' in printed
    assert json.loads(flags(store="x")[1])["kv_connector_extra_config"] == {"store": "x"}
