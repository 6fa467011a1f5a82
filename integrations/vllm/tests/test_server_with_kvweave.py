"""`vllm serve` with the printed flags: OpenAI's client is answered, and bad input gets an error that names the field."""

import json

import pytest

pytest.importorskip(
    "vllm", reason="vLLM is not installed here; integrations/vllm/README.md says how to run these tests"
)

from engines import CHUNKS, QUESTION, SYSTEM, by_length
from openai import BadRequestError, OpenAI
from running_vllm import vllm_server

import kvweave
import kvweave_vllm
from kvweave.kvstore.keys import digest_tokens
from kvweave.testing import tiny_model, tiny_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A client, the tokenizer and the store of a server."""
    home = tmp_path_factory.mktemp("server")
    with vllm_server(home) as url:
        yield OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0), tiny_tokenizer(), home


def body(tokenizer, recipe="reuse", **options):
    options = {"model": "tiny", "max_tokens": 4, "temperature": 0, **options}
    return kvweave_vllm.request(tokenizer, CHUNKS, QUESTION, system=SYSTEM, recipe=recipe, **options)


def test_chunks_are_prepared_and_reused(served):
    client, tokenizer, home = served
    prepared = kvweave_vllm.preparations(
        tokenizer, CHUNKS, system=SYSTEM, context_tokens=512, embed=by_length, model="tiny"
    )
    for each in prepared:
        client.completions.create(**each)
    with kvweave.ChunkStore(home / "store") as store:
        kinds = store.stats().by_kind
    assert kinds["woven-5-1"].entries == len(CHUNKS)
    full = client.completions.create(**body(tokenizer, "full"))
    whole = client.completions.create(**body(tokenizer, "weave", ratio=1))
    some = client.completions.create(**body(tokenizer, "weave"))
    assert whole.choices[0].text == full.choices[0].text
    assert some.usage.completion_tokens == 4


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"spans": [[0, 50], [40, 60]]}, "kv_transfer_params.kvweave.spans[1]"),
        ({"spans": [[0, 50], [60, 9999]]}, "kv_transfer_params.kvweave.spans[1]"),
        ({"spans": [[0, 50, digest_tokens([1, 2, 3])]]}, "kv_transfer_params.kvweave.spans[0]"),
        ({"recipe": "no-such"}, "kv_transfer_params.kvweave.recipe"),
        ({"recipe": "ape"}, "kv_transfer_params.kvweave.recipe"),
        ({"ratio": 3}, "kv_transfer_params.kvweave.ratio"),
        ({"user": [0, 3]}, "kv_transfer_params.kvweave.user"),
        ({"chunks": []}, "kv_transfer_params.kvweave.chunks"),
    ],
)
def test_bad_input_gets_an_error_that_names_the_field(served, change, field):
    client, tokenizer, _ = served
    wrong = body(tokenizer, "weave")
    wrong["extra_body"]["kv_transfer_params"]["kvweave"] |= change
    with pytest.raises(BadRequestError) as raised:
        client.completions.create(**wrong)
    assert raised.value.param == field
    assert raised.value.body["type"] == "BadRequestError"
    assert client.completions.create(**body(tokenizer, "full")).usage.completion_tokens == 4


def test_a_request_without_its_salt_or_with_a_text_is_refused(served):
    client, tokenizer, _ = served
    unsalted = body(tokenizer)
    del unsalted["extra_body"]["cache_salt"]
    with pytest.raises(BadRequestError) as raised:
        client.completions.create(**unsalted)
    assert raised.value.param == "cache_salt"
    with pytest.raises(BadRequestError) as raised:
        client.completions.create(**{**body(tokenizer), "prompt": "some text"})
    assert raised.value.param == "prompt"


def test_a_store_of_another_model_is_refused(served):
    client, tokenizer, home = served
    tiny_model("llama", hidden_size=128, head_dim=32, intermediate_size=96, seed=5).save_pretrained(
        home / "other"
    )
    tokenizer.save_pretrained(home / "other")
    other = kvweave.load_model(str(home / "other"), dtype="float32", device="cpu")
    chunks = ("one chunk that only another model has seen", "and a second one")
    with kvweave.ChunkStore(home / "store") as store:
        kvweave.prepare(other, store, chunks, recipe="reuse", system=SYSTEM)
    asked = kvweave_vllm.request(tokenizer, chunks, QUESTION, system=SYSTEM, recipe="reuse", model="tiny")
    with pytest.raises(BadRequestError, match="other") as raised:
        client.completions.create(**asked)
    assert raised.value.param == "kv_transfer_params.kvweave.spans"


def test_requests_of_others_pass_through(served):
    client, _, _ = served
    reply = client.completions.create(model="tiny", prompt="the river", max_tokens=3)
    assert reply.usage.completion_tokens <= 3
    assert json.loads(reply.model_dump_json())["choices"]
