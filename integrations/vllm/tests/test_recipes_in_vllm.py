"""Recipes inside vLLM against plain prefill and against kvweave's transformers engine, over the same store."""

import gc
import warnings

import pytest
import torch

pytest.importorskip(
    "vllm", reason="vLLM is not installed here; integrations/vllm/README.md says how to run these tests"
)

from engines import CHUNKS, QUESTION, SYSTEM, TOLERANCE, Case, budget_of, close, print_differences, record

from kvweave.recipes.methods import recipe_named
from kvweave.testing import tiny_model, tiny_tokenizer
from kvweave_vllm.passes import RequestRows

pytestmark = pytest.mark.filterwarnings("ignore")

FAMILIES = (
    "llama",
    "qwen2",
    "qwen3",
    "mistral-sliding",
    "phi3",
    "gemma2",
    "gemma3",
    "glm4",
    "exaone4",
    "granite",
)
RECIPES = (
    "prefix",
    "reuse",
    "following+reuse",
    "woven+reuse",
    "epic",
    "cacheblend",
    "prophetkv",
    "weave",
    "int8+weave",
    "weave-shifted",
)
"""Grouped queries in all; sliding windows in four; soft caps in gemma2; tied weights in the gemmas; partial rotation in glm4; layers without positions in exaone4."""


@pytest.fixture(scope="module", params=FAMILIES)
def case(request, tmp_path_factory):
    home = tmp_path_factory.mktemp(request.param)
    folder = home / "model"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = tiny_model(request.param, hidden_size=128, head_dim=32, intermediate_size=96)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVWEAVE_HOME", str(home))
        found = Case(folder, home)
        found.name = request.param
        yield found
        found.close()
    gc.collect()


@pytest.fixture(autouse=True)
def nothing_stored(case):
    case.store.clear()
    case.vllm.forget()


@pytest.fixture(scope="module", autouse=True)
def differences():
    yield
    print_differences()


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_gives_the_logits_of_the_transformers_engine(case, recipe):
    windows = case.adapter.geometry.windows
    if recipe == "weave-shifted" and windows and all(windows):
        pytest.skip("vLLM has no KV of the tokens that show the shift")
    case.prepare(recipe)
    case.vllm.forget()
    budget, counts = budget_of(recipe), case.vllm.weaver.counts
    expected = case.expected(recipe, **budget)
    rows = counts.rows
    (logits,) = case.vllm.generate(case.body(recipe, **budget))
    record(case.name, recipe, logits, expected.logits[0])
    close(logits, expected.logits[0])
    assert counts.failed == 0
    fresh = sum(span.tokens for span in expected.plan.spans[:-1] if span.origin == "fresh")
    assert counts.rows - rows == expected.selected.numel() + fresh


def test_vllm_prefills_as_transformers_does_and_full_leaves_it_alone(case):
    counts = case.vllm.weaver.counts
    requests = counts.requests
    expected = case.expected("full").logits[0]
    (plain,) = case.vllm.generate({"prompt": case.body("full")["prompt"]})
    (full,) = case.vllm.generate(case.body("full"))
    close(plain, expected)
    close(full, expected)
    assert counts.requests == requests


def test_chunk_kv_is_what_the_transformers_engine_stores(case):
    case.prepare("reuse")
    chunk = case.adapter.template.chunk_ids(CHUNKS[1])
    (stored,) = case.store.find(
        case.adapter.fingerprint, [(chunk, recipe_named("reuse").prepare.provenances(case.adapter, case.adapter.template.prefix_ids(SYSTEM), len(chunk)))]
    )  # fmt: skip
    prefix = case.adapter.encode(case.adapter.template.prefix_ids(SYSTEM))
    torch.testing.assert_close(stored[0].kv, case.adapter.encode(chunk, prefix).kv, atol=TOLERANCE, rtol=1e-4)


def test_computed_chunks_are_stored_and_found_after_the_same_text(case):
    counts = case.vllm.weaver.counts
    (first,) = case.vllm.generate(case.body("prefix"))
    case.vllm.forget()
    rows = counts.rows
    (again,) = case.vllm.generate(case.body("prefix", question="What began again?"))
    assert counts.rows == rows
    close(first, case.expected("full").logits[0])
    close(again, case.expected("full", question="What began again?").logits[0])


@pytest.mark.parametrize("share", [1.0, 0.3])
def test_any_partition_into_runs_equals_one_run(case, share):
    """Rows that are recomputed over their own exact KV change nothing, however they are cut."""
    passes, ids = case.vllm.weaver.engine.passes, torch.tensor(case.body("full")["prompt"])
    (reference,) = case.vllm.generate({"prompt": ids.tolist()})
    blocks = torch.arange(1, 2 + len(ids) // passes.block_tokens, dtype=torch.int32)
    whole = torch.arange(len(ids))
    generator = torch.Generator().manual_seed(3)
    chosen = torch.randperm(len(ids), generator=generator)[: int(share * len(ids))]
    chosen = torch.cat([chosen, whole[-1:]]).unique()
    hidden = passes.run([RequestRows(whole, ids, blocks)])
    close(passes.model.compute_logits(hidden[-1:])[0].float(), reference)
    for part in (chosen, whole[::2], whole):
        pieces = part.split(7) if part is whole else [part]
        for piece in pieces:
            hidden = passes.run([RequestRows(piece, ids, blocks)])
        if int(part[-1]) == len(ids) - 1:
            close(passes.model.compute_logits(hidden[-1:])[0].float(), reference)


@pytest.mark.parametrize("recipe", ["epic", "prophetkv"])
def test_a_batch_equals_each_request_alone(case, recipe):
    case.prepare(recipe)
    bodies = [
        case.body(recipe, chunks, question, ratio=0.3)
        for chunks, question in ((CHUNKS, QUESTION), (CHUNKS[::-1], QUESTION), (CHUNKS[:2], "What began?"))
    ]
    alone = []
    for body in bodies:
        case.vllm.forget()
        alone += case.vllm.generate(body)
    case.vllm.forget()
    together = case.vllm.generate(*bodies)
    assert case.vllm.weaver.counts.failed == 0
    for found, expected in zip(together, alone, strict=True):
        close(found, expected)
