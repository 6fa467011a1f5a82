"""Two ranks of tensor parallelism against the transformers engine: the same logits, over stored KV of all heads."""

import pytest
import torch

pytest.importorskip(
    "vllm", reason="vLLM is not installed here; integrations/vllm/README.md says how to run these tests"
)

from engines import CHUNKS, SYSTEM, Case, budget_of, close, withhold

from kvweave.recipes.methods import recipe_named
from kvweave.testing import tiny_model, tiny_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore")

RECIPES = ("prefix", "reuse", "epic", "cacheblend", "prophetkv", "weave", "int8+weave", "weave-shifted")


@pytest.fixture(scope="module", params=[4, 1], ids=["own key heads", "one key head for both"])
def case(request, tmp_path_factory):
    home = tmp_path_factory.mktemp("ranks")
    model = tiny_model(
        "llama",
        hidden_size=128,
        head_dim=32,
        intermediate_size=96,
        num_attention_heads=8,
        num_key_value_heads=request.param,
    )
    model.save_pretrained(home / "model")
    tiny_tokenizer().save_pretrained(home / "model")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVWEAVE_HOME", str(home))
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # else it wants a memory node for each rank
        found = Case(home / "model", home, tensor_parallel_size=2)
        yield found
        found.close()


@pytest.fixture(autouse=True)
def nothing_stored(case):
    case.store.clear()
    case.vllm.forget()


@pytest.mark.parametrize("recipe", RECIPES)
def test_two_ranks_give_the_logits_of_the_transformers_engine(case, recipe):
    case.prepare(recipe)
    case.vllm.forget()
    budget = budget_of(recipe)
    expected = case.expected(recipe, **budget).logits[0]
    (logits,) = case.vllm.generate(case.body(recipe, **budget))
    close(logits, expected)
    full = case.expected("full").logits[0]
    assert recipe == "prefix" or (expected - full).abs().max() > 0.05  # so that computing all would be seen


def test_full_and_plain_prompts_are_prefilled_by_vllm(case):
    expected = case.expected("full").logits[0]
    for logits in case.vllm.generate({"prompt": case.body("full")["prompt"]}, case.body("full")):
        close(logits, expected)


def test_two_ranks_store_kv_of_all_heads(case):
    case.prepare("reuse")
    template, adapter = case.adapter.template, case.adapter
    chunk, prefix = template.chunk_ids(CHUNKS[1]), template.prefix_ids(SYSTEM)
    provenances = recipe_named("reuse").prepare.provenances(adapter, prefix, len(chunk))
    (stored,) = case.store.find(adapter.fingerprint, [(chunk, provenances)])
    torch.testing.assert_close(
        stored[0].kv, adapter.encode(chunk, adapter.encode(prefix)).kv, atol=2e-4, rtol=1e-4
    )


def test_a_chunk_that_one_rank_cannot_read_is_computed_by_both(case):
    case.prepare("reuse", CHUNKS[:1] + CHUNKS[2:])
    expected = case.expected("reuse").logits[0]
    case.prepare("reuse")
    case.vllm.forget()
    chunk = tuple(case.adapter.template.chunk_ids(CHUNKS[1]))
    case.vllm.llm.collective_rpc(withhold, args=(1, chunk))
    (logits,) = case.vllm.generate(case.body("reuse"))
    close(logits, expected)
