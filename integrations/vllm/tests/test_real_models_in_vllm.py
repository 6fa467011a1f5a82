"""Recipes inside vLLM on pretrained weights, in float32, against kvweave's transformers engine over the same store."""

import pytest

pytest.importorskip(
    "vllm", reason="vLLM is not installed here; integrations/vllm/README.md says how to run these tests"
)

import torch
from engines import Case, budget_of, print_differences, record

from kvweave.samples import DOCUMENTS
from kvweave_lab.real_models import MODELS, command, prepared_folder

pytestmark = pytest.mark.filterwarnings("ignore")

TOLERANCE = 2e-3  # on float32 logits of magnitude 30, summed in another order
CHUNKS = tuple(
    "\n\n".join(path.read_text() for path in sorted(DOCUMENTS.glob("*.[mt]*")))[at : at + 620]
    for at in range(0, 3100, 620)
)
"""Longer than the window of 512 tokens that five of six layers of Gemma 3 have."""
QUESTION = "What is the password of Glorric?"


@pytest.fixture(scope="module", params=MODELS)
def case(request, tmp_path_factory):
    model = MODELS[request.param]
    folder = prepared_folder(model)
    if folder is None:
        pytest.skip(f"{model.name} is not prepared; run `{command(model)}`")
    home = tmp_path_factory.mktemp("real")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVWEAVE_HOME", str(home))
        found = Case(folder, home, max_model_len=1024, max_num_batched_tokens=1024, block_size=128)
        found.name = request.param
        yield found
        found.close()


@pytest.fixture(scope="module", autouse=True)
def differences():
    yield
    print_differences()


@pytest.mark.parametrize(
    "recipe", ["full", "prefix", "reuse", "following+reuse", "epic", "cacheblend", "prophetkv", "weave"]
)
def test_a_recipe_gives_the_logits_of_the_transformers_engine(case, recipe):
    case.store.clear()
    if recipe not in ("full", "prefix"):
        case.prepare(recipe, CHUNKS)
    case.vllm.forget()
    budget = budget_of(recipe)
    expected = case.expected(recipe, CHUNKS, QUESTION, **budget)
    assert expected.plan.prompt_tokens > 512
    (logits,) = case.vllm.generate(case.body(recipe, CHUNKS, QUESTION, **budget))
    assert case.vllm.weaver.counts.failed == 0
    logits = logits[: expected.logits.shape[1]]
    record(case.name, recipe, logits, expected.logits[0])
    assert expected.logits.abs().max() > 5
    torch.testing.assert_close(logits, expected.logits[0], atol=TOLERANCE, rtol=0)
    assert logits.argmax() == expected.logits[0].argmax()
