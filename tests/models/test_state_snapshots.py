"""Models continued from stored states against plain transformers: the same split bit for bit, one pass but for rounding."""

import inspect
from collections.abc import Iterator

import pytest
import torch
from transformers.cache_utils import DynamicCache

from kvweave.errors import PromptTooLong, UnsupportedModel
from kvweave.kvstore.chunk_store import ChunkStore
from kvweave.models.families import PREFIX_ONLY
from kvweave.models.snapshot_adapter import adapt, differences, fused
from kvweave.recipes.methods import METHODS, recipe_named
from kvweave.recipes.recipe import store_entries
from kvweave.recipes.request import Budget
from kvweave.recipes.snapshots import STATE, run_from_snapshot, uses_exact_prefixes_alone
from kvweave.testing import tiny_model, tiny_tokenizer
from kvweave.types import Span, TokenizedPrompt
from support.refused_models import refused_model

N, ENDS = 100, (40, 70, 100)
IDS = tuple(torch.randint(3, 260, (N,), generator=torch.Generator().manual_seed(1)).tolist())
PROMPT = TokenizedPrompt(
    IDS, (Span("system", 0, 40), Span("chunk", 40, 70, 0), Span("question", 70, N)), (70, N)
)
TOLERANCE = 2e-4  # of the largest logit; recurrent kernels sum in another order for other lengths
PREFIX = recipe_named("prefix")
KINDS = [kind for limitation in PREFIX_ONLY for kind in limitation.families.values()]


@pytest.fixture(scope="module", params=KINDS)
def pair(request):
    """Our adapter, and an equal model that kvweave has not touched."""
    return adapt(refused_model(request.param), tiny_tokenizer(), request.param), refused_model(request.param)


def split_pass(plain) -> Iterator[torch.Tensor]:
    """Yield the last logits (1, vocab) of each pass of plain transformers over the prompt in parts, on one cache."""
    accepted = inspect.signature(plain.forward).parameters
    keyword = "past_key_values" if "past_key_values" in accepted else "cache_params"
    cache, start = DynamicCache(config=plain.config), 0
    for end in ENDS:
        keywords = {keyword: cache}
        if "position_ids" in accepted:
            keywords["position_ids"] = torch.arange(start, end)[None]
        with torch.no_grad():
            yield plain(torch.tensor([IDS[start:end]]), use_cache=True, logits_to_keep=1, **keywords).logits[
                :, -1
            ]
        start = end


def one_pass(plain) -> torch.Tensor:
    with torch.no_grad():
        return plain(torch.tensor([IDS]), use_cache=False).logits[:, -1]


def assert_near(logits, expected, tolerance=TOLERANCE):
    assert (logits - expected).abs().max() <= tolerance * expected.abs().max()


def test_a_cold_run_and_one_from_the_reopened_store_equal_plain_transformers(pair, tmp_path):
    adapter, plain = pair
    *_, expected = split_pass(plain)
    with ChunkStore(tmp_path) as store:
        cold = run_from_snapshot(PREFIX, adapter, store, PROMPT, Budget())
        assert torch.equal(cold.logits, expected)
        assert cold.plan.exact_tokens == 0
        assert store_entries(cold.new_entries, store, adapter.fingerprint) == 2
        assert store.stats().by_kind[STATE].entries == 2
    with ChunkStore(tmp_path) as store:
        warm = run_from_snapshot(PREFIX, adapter, store, PROMPT, Budget())
        assert warm.plan.exact_tokens == 70
        assert not warm.new_entries
        assert torch.equal(warm.logits, expected)
        assert differences(warm.state, cold.state) == []
        ignored = run_from_snapshot(PREFIX, adapter, store, PROMPT, Budget(1.0))
        assert ignored.plan.exact_tokens == 0
        assert torch.equal(ignored.logits, expected)
    whole = one_pass(plain)
    assert_near(warm.logits, whole)
    assert warm.logits.argmax() == whole.argmax()


def test_another_end_continues_from_the_longest_prefix_it_shares(pair, tmp_path):
    adapter, plain = pair
    with ChunkStore(tmp_path) as store:
        first = run_from_snapshot(PREFIX, adapter, store, PROMPT, Budget())
        store_entries(first.new_entries, store, adapter.fingerprint)
        other = TokenizedPrompt(
            (*IDS[:40], *IDS[10:50]),
            (PROMPT.spans[0], Span("chunk", 40, 60, 0), Span("question", 60, 80)),
            (60, 80),
        )
        found = run_from_snapshot(PREFIX, adapter, store, other, Budget())
    assert [span.origin for span in found.plan.spans] == ["exact", "fresh", "fresh"]
    with torch.no_grad():
        expected = plain(torch.tensor([other.token_ids]), use_cache=False).logits[:, -1]
    assert_near(found.logits, expected)


def test_decoding_continues_as_generate_does(pair, tmp_path):
    adapter, plain = pair
    with ChunkStore(tmp_path) as store:
        for _ in range(2):
            result = run_from_snapshot(PREFIX, adapter, store, PROMPT, Budget())
            store_entries(result.new_entries, store, adapter.fingerprint)
    got, logits = [], result.logits
    for _ in range(8):
        got.append(int(logits.argmax()))
        logits = adapter.extend(result.state, got[-1:])
    ids = torch.tensor([IDS])
    settings = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = plain.generate(ids, attention_mask=torch.ones_like(ids), **settings)
    assert got == expected[0, N:].tolist()


def test_the_sizes_that_are_stated_are_those_that_are_stored(pair):
    adapter, _ = pair
    state = adapter.new_state()
    adapter.extend(state, IDS[:10])
    size = sum(tensor.nbytes for tensor in adapter.snapshot(state).values())
    assert size == adapter.fixed_bytes + 10 * adapter.token_bytes


def test_what_is_continued_from_a_snapshot_leaves_the_snapshot_alone(pair):
    adapter, _ = pair
    state = adapter.new_state()
    adapter.extend(state, IDS[:40])
    held = adapter.snapshot(state)
    before = {name: tensor.clone() for name, tensor in held.items()}
    one = adapter.extend(adapter.restore(held, 40), IDS[40:])
    assert torch.equal(adapter.extend(adapter.restore(held, 40), IDS[40:]), one)
    assert all(torch.equal(tensor, before[name]) for name, tensor in held.items())


@pytest.mark.parametrize("kind", ["qwen3_next", "granitemoehybrid", "lfm2", "gpt_oss"])
def test_bfloat16_is_continued_bit_for_bit_too(kind, tmp_path):
    adapter = adapt(refused_model(kind, torch.bfloat16), tiny_tokenizer(), kind)
    *_, expected = split_pass(refused_model(kind, torch.bfloat16))
    with ChunkStore(tmp_path) as store:
        for _ in range(2):
            result = run_from_snapshot(PREFIX, adapter, store, PROMPT, Budget())
            store_entries(result.new_entries, store, adapter.fingerprint)
            assert torch.equal(result.logits, expected)
    assert result.plan.exact_tokens == 70


def test_a_model_whose_frequencies_depend_on_the_length_is_refused():
    model = refused_model("stablelm")
    model.config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    with pytest.raises(UnsupportedModel, match="depend on the length"):
        adapt(model, tiny_tokenizer(), "tiny")


def test_only_the_prefix_recipe_needs_nothing_but_exact_prefixes():
    assert [name for name in METHODS if uses_exact_prefixes_alone(recipe_named(name))] == ["prefix"]


def test_a_model_that_kvs_can_be_placed_in_is_used_so():
    adapter = adapt(tiny_model("llama"), tiny_tokenizer(), "tiny")
    assert fused(adapter) is adapter


def test_too_long_a_prompt_is_refused(tmp_path):
    adapter = adapt(refused_model("qwen3_next"), tiny_tokenizer(), "tiny")
    ids = IDS * 6
    prompt = TokenizedPrompt(ids, (Span("system", 0, 0), Span("question", 0, len(ids))), (0, len(ids)))
    with ChunkStore(tmp_path) as store, pytest.raises(PromptTooLong, match="tiny"):
        run_from_snapshot(PREFIX, adapter, store, prompt, Budget())
