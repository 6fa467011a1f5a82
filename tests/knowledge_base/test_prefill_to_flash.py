"""Stored chunk KV is loaded layer by layer into clusters: the answer is the same, with one layer in memory."""

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import kvweave
from kvweave.decode.disk.entry_format import EntryFormat
from kvweave.decode.handoff import PromptOffloader, offloaded_cache_of
from kvweave.decode.settings import ClusterSettings, DiskSettings
from kvweave.errors import InvalidRequest
from kvweave.kvstore.layers import VerifiedLayers
from kvweave.models.adapter import Adapter
from kvweave.models.fused_cache import SharedLayerState
from kvweave.recipes.methods import METHODS, recipe_named
from kvweave.recipes.offline import prepare
from kvweave.recipes.prepare import Similar
from kvweave.recipes.recipe import run
from kvweave.recipes.request import PrefillResult
from kvweave.testing import end_only_at, tiny_adapter, tiny_model, tiny_tokenizer

TEXTS = ("The lamp is in the hall. ", "The key is under the stone. ", "Rain fell on the tin roof. ")
SYSTEM, QUESTION = "Answer.", "Where is the key?"
SMALL = {"window": 4, "clusters": ClusterSettings(8, 16), "disk": DiskSettings(page_bytes=512)}
WHOLE = kvweave.OffloadSettings(1.0, **SMALL)
TOLERANCE = 5e-4  # on logits of magnitude 5, in float32, summed in parts
CAUSAL = sorted(set(METHODS) - {"ape", "cacheclip", "cacheclip-windows"})  # those two load a second model


def quiet_adapter(family: str) -> Adapter:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # configurations of tiny shapes draw notices from some families
        return tiny_adapter(family)


def asked(parts: int = 3) -> kvweave.Prompt:
    return kvweave.Prompt(QUESTION, tuple(text * 3 for text in TEXTS[:parts]), SYSTEM)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[kvweave.ChunkStore]:
    with kvweave.ChunkStore(tmp_path / "store") as store:
        yield store


def prepared(adapter: Adapter, store: kvweave.ChunkStore, recipe: str = "reuse") -> None:
    """Prepare the first two chunks; the third is computed with the question."""
    chunks = asked(2).chunks
    preparing = {
        name for name in METHODS if recipe_named(name).prepare == Similar()
    }  # takes an embedding model
    prepare(adapter, store, chunks, recipe="reuse" if recipe in preparing else recipe, system=SYSTEM)


def decoded(adapter: Adapter, result: PrefillResult, steps: int = 6) -> torch.Tensor:
    """Return the logits of the prompt's last position and of some steps, (steps + 1, vocab)."""
    retrieved = offloaded_cache_of(result.kv_cache)
    held = (
        result.kv_cache if retrieved is None else retrieved
    )  # not `or`: a cache may be false, see `AppendableCache`
    found = [result.logits]
    for token in range(10, 10 + steps):
        found.append(adapter.step(held, token))
    return torch.cat(found)


@pytest.mark.parametrize("recipe", CAUSAL)
def test_every_recipe_gives_the_logits_of_a_fused_cache(recipe: str, store: kvweave.ChunkStore) -> None:
    adapter = tiny_adapter()
    prepared(adapter, store, recipe)
    ratio = 0.3 if METHODS[recipe]().select.selective else None
    tokens, sink = adapter.template.render(asked()), PromptOffloader(adapter.geometry, WHOLE)
    result = run(recipe_named(recipe), adapter, store, tokens, ratio=ratio, sink=sink)
    expected = run(recipe_named(recipe), adapter, store, tokens, ratio=ratio)
    assert torch.equal(result.selected, expected.selected)
    assert result.plan == expected.plan
    torch.testing.assert_close(
        decoded(adapter, result), decoded(adapter, expected), atol=TOLERANCE, rtol=TOLERANCE
    )


@pytest.mark.parametrize("family", ["gemma2", "phi3-sliding", "qwen3", "phi3-partial", "gpt-neox"])
def test_recomputing_everything_is_plain_full_attention(family: str, store: kvweave.ChunkStore) -> None:
    adapter = quiet_adapter(family)
    prepared(adapter, store)
    result = kvweave.prefill(adapter, store, asked(), recipe="reuse", ratio=1.0, kv=WHOLE)
    steps = 12
    text = [*result.request.prompt.token_ids, *range(10, 10 + steps)]
    with torch.no_grad():
        plain = adapter.model(torch.tensor([text]), use_cache=False).logits[0, -steps - 1 :]
    torch.testing.assert_close(decoded(adapter, result, steps), plain, atol=TOLERANCE, rtol=TOLERANCE)


def test_damage_found_while_streaming_starts_the_prefill_over(
    store: kvweave.ChunkStore, tmp_path: Path
) -> None:
    """The damage is in the last layer, found when the other layers are in their clusters."""
    adapter = tiny_adapter()
    prepared(adapter, store)
    store.forget_recent()
    ids = torch.tensor(adapter.template.chunk_ids(asked().chunks[1])).numpy().tobytes()
    (file,) = [each for each in (tmp_path / "store").glob("??/*.safetensors") if ids in each.read_bytes()]
    content = bytearray(file.read_bytes())
    content[-3] ^= 4
    file.write_bytes(content)
    result = kvweave.prefill(adapter, store, asked(), kv=WHOLE)
    expected = kvweave.prefill(adapter, store, asked())
    assert store.stats().damaged == 1
    assert [span.origin for span in result.plan.spans] == ["exact", "exact", "fresh", "fresh", "fresh"]
    torch.testing.assert_close(
        decoded(adapter, result), decoded(adapter, expected), atol=TOLERANCE, rtol=TOLERANCE
    )


def test_a_result_with_streamed_kv_takes_no_other_settings(store: kvweave.ChunkStore) -> None:
    adapter = tiny_adapter()
    result = kvweave.prefill(adapter, store, asked(), kv=WHOLE)
    with pytest.raises(InvalidRequest, match="streamed its KV to a sink"):
        adapter.model.generate(**result.generate_kwargs, max_new_tokens=2)
    result = kvweave.prefill(adapter, store, asked(), kv=WHOLE)
    with pytest.raises(InvalidRequest, match="pass the same to both"):
        kvweave.generate(result, kv=kvweave.OffloadSettings(0.5, **SMALL))
    prepare(adapter, store, asked().chunks, recipe="ape", system=SYSTEM)
    with pytest.raises(InvalidRequest, match="leave kv_budget out"):
        kvweave.prefill(adapter, store, asked(), recipe="ape", kv=WHOLE)


def test_the_answer_equals_that_of_a_fused_cache(store: kvweave.ChunkStore) -> None:
    adapter = tiny_adapter()
    end_only_at(adapter)
    dense = kvweave.generate(kvweave.prefill(adapter, store, asked()), max_new_tokens=30)
    flowed = kvweave.generate(kvweave.prefill(adapter, store, asked(), kv=WHOLE), max_new_tokens=30)
    assert flowed.text == dense.text
    assert flowed.decoding is not None
    assert flowed.decoding.attended_per_token > 0


def test_computed_kv_is_stored_only_without_a_memory_bound(tmp_path: Path) -> None:
    adapter = tiny_adapter()
    kept = {}
    for name, kv in {
        "fused": None,
        "unbounded": WHOLE,
        "bounded": kvweave.OffloadSettings(1.0, 200_000, **SMALL),
    }.items():
        with kvweave.ChunkStore(tmp_path / name) as store:
            kvweave.prefill(adapter, store, asked(), recipe="prefix", kv=kv)
            kept[name] = store.stats().entries
    assert kept["unbounded"] == kept["fused"] > 0 == kept["bounded"]


LAYERS, RESIDENT_BYTES = 16, 200_000
WIDTHS = {8, 64, 512}


def test_the_whole_prompt_is_never_in_memory(
    store: kvweave.ChunkStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Count all live KV bytes, except mapped files, while layers are placed, recomputed and clustered."""
    adapter = deep_adapter()
    prompt = kvweave.Prompt(QUESTION, tuple(text * 12 for text in TEXTS), SYSTEM)
    prepare(adapter, store, prompt.chunks, recipe="prophetkv", system=SYSTEM)
    store.forget_recent()  # otherwise the entries just written would be found in memory
    chosen = {"recipe": "prophetkv", "ratio": 0.1}
    tokens = adapter.template.render(prompt).tokens
    layer_bytes = tokens * adapter.geometry.token_bytes // LAYERS
    bound = RESIDENT_BYTES + 4 * layer_bytes  # placed, rotated, being encoded
    assert bound < LAYERS * layer_bytes / 2, "a whole prompt is far above the bound"
    with peak_bytes(monkeypatch) as kv_cache_peak:
        kvweave.prefill(adapter, store, prompt, **chosen)
    assert kv_cache_peak() > LAYERS * layer_bytes
    with peak_bytes(monkeypatch) as peak:
        kv = kvweave.OffloadSettings(1.0, RESIDENT_BYTES, **SMALL)
        result = kvweave.prefill(adapter, store, prompt, kv=kv, **chosen)
    assert result.plan.reused_tokens > tokens / 2
    held = offloaded_cache_of(result.kv_cache)
    assert held is not None
    assert held.counts.peak_resident_bytes <= RESIDENT_BYTES
    assert peak() < bound


def deep_adapter() -> Adapter:
    config = tiny_model().config
    config.num_hidden_layers, config.max_position_embeddings = LAYERS, 4096
    torch.manual_seed(0)
    return Adapter(AutoModelForCausalLM.from_config(config).eval(), tiny_tokenizer(), name="deep")


@contextmanager
def peak_bytes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], int]]:
    """Yield a function that returns the peak of live KV bytes, beyond those at the start and without mapped files."""
    before, found = storages(), [0]  # held, so that nothing new comes to lie at their addresses

    def look() -> None:
        found.append(sum(memory.nbytes() for at, memory in storages().items() if at not in before))

    materialize, encode = SharedLayerState.materialize, EntryFormat.encode

    def laid_out(self: SharedLayerState, layer: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        made = materialize(self, layer, like)
        look()
        return made

    def encoded(self: EntryFormat, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        made = encode(self, keys, values)
        look()
        return made

    with monkeypatch.context() as patch:
        patch.setattr(SharedLayerState, "materialize", laid_out)
        patch.setattr(EntryFormat, "encode", encoded)
        gc.collect()
        gc.freeze()  # looks pass over older objects, also those that came after `support/workers.py` did so
        yield lambda: max(found)


def storages() -> dict[int, torch.UntypedStorage]:
    """Return the memory of every tensor as wide as a head, an entry or a page, by address; without mapped files."""
    found: dict[int, torch.UntypedStorage] = {}
    mapped: set[int] = set()
    for thing in gc.get_objects():
        if type(thing) is VerifiedLayers:
            assert isinstance(thing.held, torch.Tensor)
            mapped.add(thing.held.untyped_storage().data_ptr())
        elif type(thing) in (torch.Tensor, torch.nn.Parameter):
            if not thing.dim() or thing.shape[-1] not in WIDTHS:
                continue
            memory = thing.untyped_storage()
            found[memory.data_ptr()] = memory
    return {at: memory for at, memory in found.items() if at not in mapped}
