"""The experiments on TTFT, on a tiny model, and the documentation's tables of their results."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from kvweave.kvstore.chunk_store import ChunkStore
from kvweave.recipes.methods import recipe_named
from kvweave.recipes.offline import prepare
from kvweave.recipes.recipe import run
from kvweave.results import facts
from kvweave.testing import tiny_adapter
from kvweave.types import Prompt
from kvweave_lab.bench.baselines import MaskAttend
from kvweave_lab.bench.measurement import current_environment
from kvweave_lab.bench.steady import SteadySettings, bench_steady
from kvweave_lab.bench.ttft import TtftSettings, bench_ttft
from kvweave_lab.bench.workload import Traffic

ROOT = Path(__file__).parents[3]
ENVIRONMENT = facts(current_environment("a command"))


@pytest.fixture(scope="module")
def adapter():
    return tiny_adapter()


def test_every_variant_is_timed_from_memory_and_from_the_disk(script, adapter):
    result = script("components").measure(adapter, "tiny", 128, 32, 0.25, rounds=1)
    names = [variant.name for variant in script("components").variants(0.25)]
    assert [(one["variant"], one["from"]) for one in result["rows"]] == [
        (name, place) for place in ("memory", "disk") for name in names
    ]
    for one in result["rows"]:
        parts_s = one["match_s"] + one["place_s"] + one["select_s"] + one["recompute_s"]
        assert 0 < parts_s <= one["ttft_s"][0]
        assert one["speedup"][0] == pytest.approx(result["full_s"][0] / one["ttft_s"][0])
    table = script("ttft_page").components({**result, **ENVIRONMENT})
    assert table.count("\n| ") == 1 + len(result["rows"])


def test_each_preparation_has_seconds_or_a_reason(script, adapter):
    offline = script("offline")
    result = offline.measure(adapter, "tiny", 3, 24, rounds=1)
    assert {one["preparation"] for one in result["rows"]} | set(result["left_out"]) == set(offline.RECIPES)
    assert not set(result["left_out"]) & {"bare", "isolated", "isolated, 8 bits", "following"}
    rows = {one["preparation"]: one for one in result["rows"]}
    assert all(one["s_per_chunk"][0] > 0 for one in rows.values())
    assert rows["isolated, 8 bits"]["bytes_per_token"] < rows["isolated"]["bytes_per_token"]
    assert "| bare | " in script("ttft_page").offline({**result, **ENVIRONMENT})


@pytest.mark.parametrize("family", ["llama", "mistral-sliding", "gemma2"])
def test_a_mask_and_the_operator_give_equal_logits(family, tmp_path):
    """The families have grouped heads, a window, and a soft cap."""
    adapter, recipe = tiny_adapter(family), recipe_named("random")
    chunks = ["the sky was sunny that morning", "Aaron lives in Berlin and reads", "Paris has a room number"]
    question = Prompt("Where does Aaron live?", tuple(chunks))
    with ChunkStore(tmp_path) as store:
        prepare(adapter, store, chunks, recipe=recipe)
        prompt = adapter.template.render(question)
        own = run(recipe, adapter, store, prompt, ratio=0.5)
        masked = run(dataclasses.replace(recipe, attend=MaskAttend()), adapter, store, prompt, ratio=0.5)
    assert torch.equal(own.selected, masked.selected)
    torch.testing.assert_close(masked.logits, own.logits, atol=1e-4, rtol=1e-4)


def test_operations_add_up_to_a_request(script, adapter):
    profile = script("where_time_goes")
    result = profile.measure(adapter, "tiny", "prophetkv", 0.25, 128, 32, rounds=2, top=5)
    assert len(result["operations"]) == 6
    assert sum(one["share"] for one in result["operations"]) == pytest.approx(1)
    seconds = [one["seconds"] for one in result["operations"][:5]]
    assert seconds == sorted(seconds, reverse=True)
    parts = result["parts"]
    assert 0 < parts["select_s"] < parts["ttft_s"]
    attention, matrices = result["kinds"]
    for kind in (attention, matrices):
        assert 0 < kind["flops"] < kind["full_flops"]
        assert min(kind["seconds"], kind["full_seconds"]) > 0
    assert script("ttft_page").where_time_goes([{**result, **ENVIRONMENT}, None]).count("\n| `") == 6


@pytest.mark.parametrize("ratio", [0, 0.2])
def test_every_way_of_computing_some_rows_gives_equal_results(script, ratio):
    result = script("row_attention").measure("qwen2.5-0.5b", 256, ratio, "float32", "cpu", rounds=2)
    assert result["computed_rows"] == round(ratio * 224) + 32
    ways = {one["way"]: one for one in result["rows"]}
    assert {"all rows", "a mask", result["chosen"]} < set(ways)
    for one in ways.values():
        assert one["largest_difference"] < 1e-5
        assert one["seconds"][1] <= one["seconds"][0] <= one["seconds"][2]
    assert ways["a mask"]["of_mask"] == [1, 1, 1]
    assert script("ttft_page").one_layer({**result, **ENVIRONMENT}).count("\n| ") == 1 + len(ways)


def test_peers_find_only_prefixes(script):
    """Hits of written-out questions, in their own order and in the best one."""
    peers = script("peers")
    queries = [(0, 1, 2), (0, 1, 3), (1, 0, 2), (3, 1, 0)]
    assert peers.prefix_hits(queries, ordered=False) == [0, 2, 0, 0]
    assert peers.prefix_hits(queries, ordered=True) == [0, 2, 3, 3]
    assert peers.points(4) == [0, 1, 2, 3, 4]
    assert peers.points(32) == [0, 4, 8, 12, 16, 20, 24, 28, 32]
    assert peers.mean_over({0: 10.0, 4: 2.0}, [0, 4, 1]) == pytest.approx((10 + 2 + 8) / 3)


def test_every_peer_is_timed_or_left_out_with_a_reason(script, adapter):
    result = script("peers").measure(adapter, "tiny", 96, 32, 0.25, rounds=1, queries=20)
    ways = [one["way"] for one in result["rows"]]
    whole = ("full prefill", "prefix cache", "prefix cache, chunks reordered")
    assert {f"{of}, {way}" for of in ("transformers", "kvweave") for way in whole} < set(ways)
    assert ("llama.cpp" in result["left_out"]) != any(way.startswith("llama.cpp") for way in ways)
    assert result["chunks_found"]["prefix"] <= result["chunks_found"]["ordered"] <= 3
    assert script("ttft_page").peers({**result, **ENVIRONMENT}).count("×") == len(ways)


def test_llama_cpps_steps_alternate_with_the_others(script, adapter, tmp_path):
    """A fake binding checks that every step finds the complete prompt of the last one."""
    peers = script("peers")
    question = peers.prompt_of_chunks(adapter, 96, 32)
    prompt, order = adapter.template.render(question), []

    class Llama:
        computed = 0

        def prefill(self, token_ids, kept_tokens=0):
            assert kept_tokens <= self.computed
            self.computed = len(token_ids)
            order.append("llama.cpp")

    compute = type(adapter).compute

    def recorded(*args, **kwargs):
        order.append("kvweave")
        return compute(*args, **kwargs)

    with ChunkStore(tmp_path) as store, pytest.MonkeyPatch.context() as patched:
        prepare(adapter, store, question.chunks)
        cache = peers.KvweavePrefixCache(adapter, store, question, 32)
        patched.setattr(type(adapter), "compute", recorded)
        times = peers.timings(adapter, store, prompt, 0.25, 2, cache, {"F16": Llama()})
    assert {f"llama.cpp F16{suffix}" for suffix in ("", *(f" behind {n}" for n in peers.points(3)))} < set(
        times
    )
    assert all(len(own) == 2 for own in times.values())
    turns = [one for place, one in enumerate(order) if not place or order[place - 1] != one]
    assert turns == ["llama.cpp", "kvweave"] * 2  # every other round runs in reverse order


def test_a_prefix_cache_gives_full_attentions_logits(script, adapter):
    """Two passes continue after the first 16 tokens."""
    peers, ids = script("peers"), torch.randint(3, 300, (1, 40), generator=torch.Generator().manual_seed(0))
    cache, logits_of_passes = peers.PrefixCache(adapter, ids), []
    hook = adapter.model.register_forward_hook(
        lambda model, args, out: logits_of_passes.append(out.logits[:, -1])
    )
    with torch.no_grad():
        expected = adapter.model(ids).logits[:, -1]
    for _ in range(2):
        cache.after(16)()
    hook.remove()
    for logits in logits_of_passes[-2:]:
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def test_kvweaves_prefix_cache_finds_the_requested_number_of_chunks(script, adapter, tmp_path):
    """Steps store nothing, so numbers may fall and rise; the logits are full attention's."""
    peers = script("peers")
    question = peers.prompt_of_chunks(adapter, 96, 32)
    with ChunkStore(tmp_path) as store:
        cache = peers.KvweavePrefixCache(adapter, store, question, 32)
        for found in (0, 2, 3, 2, 0):
            result = cache.after(found)()
            origins = [span.origin for span in result.plan.spans if span.kind == "chunk"]
            assert origins == ["exact"] * found + ["fresh"] * (3 - found)
            expected = adapter.model(torch.tensor([result.request.prompt.token_ids])).logits[:, -1]
            torch.testing.assert_close(result.logits.view_as(expected), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_llama_cpp_runs_the_same_model(script, family, tmp_path):
    """Logits agree for a complete prompt and after a kept prefix; llama.cpp stores KV in 16 bits."""
    pytest.importorskip("llama_cpp")
    pytest.importorskip("gguf")
    peer, adapter = script("llama_cpp_peer"), tiny_adapter(family)
    assert peer.unsupported_reason(adapter) is None
    ids = torch.randint(3, 300, (40,), generator=torch.Generator().manual_seed(0)).tolist()
    expected = adapter.compute(adapter.new_cache(40), ids, adapter.rows(torch.arange(40)))[0].log_softmax(-1)
    with peer.open_llama_cpp(adapter, tmp_path, "F32", 64) as llama:
        for kept in (0, 24):
            llama.prefill(ids, kept)
            torch.testing.assert_close(llama.logits.log_softmax(-1), expected, atol=0.06, rtol=0)


def test_every_weight_has_a_name_in_llama_cpp(script, adapter):
    names = [script("llama_cpp_peer").tensor_name(name) for name, _ in adapter.model.named_parameters()]
    assert len(set(names)) == len(names)
    assert {"token_embd.weight", "output_norm.weight", "blk.0.attn_q.weight", "blk.2.ffn_down.weight"} < set(
        names
    )


def test_the_documentation_has_a_row_for_every_case(script, adapter, tmp_path):
    page = script("ttft_page")
    settings = TtftSettings((64,), ("reuse", "prophetkv"), (0.0, 0.25), chunk_tokens=32, rounds=1)
    measured = as_json(bench_ttft(adapter, "tiny", tmp_path / "ttft", settings))
    assert page.limits([measured, None, measured]).count("\n| 64 |") == 6
    both = dataclasses.replace(settings, ratios=(0.0,), kv_from=("disk", "memory"))
    placed = as_json(bench_ttft(adapter, "tiny", tmp_path / "both", both))
    lines = [line.split(" | ") for line in page.lengths([placed, None]).splitlines() if "| 64 |" in line]
    by_place = {(one["recipe"], one["kv_from"]): f"{one['ttft_s']:.3f} s" for one in placed["rows"]}
    for recipe, line in zip(("reuse", "prophetkv"), lines, strict=True):
        assert line[1] == f"`{recipe}`"
        assert line[4:6] == [by_place[recipe, "memory"], by_place[recipe, "disk"]]
    traffic = Traffic(queries=4, chunks_per_query=2, known_chunks=4, shared_chunks=2)
    few = SteadySettings(traffic, chunk_tokens=32, host_bytes=10_000)
    steady = page.steady(as_json(bench_steady(adapter, "tiny", tmp_path / "steady", few)))
    assert steady.count("×") == 4
    assert "past the page cache" in steady


def test_results_of_several_runs_become_one_figure(script, adapter, tmp_path, monkeypatch):
    """Shorter contexts come first, regardless of the order of files."""
    figure, files = script("ttft_figure"), []
    for context_tokens in (96, 64):
        settings = TtftSettings((context_tokens,), ("reuse",), (0.0, 1.0), chunk_tokens=32, rounds=1)
        files.append(tmp_path / f"{context_tokens}.json")
        done = bench_ttft(adapter, "tiny", tmp_path / str(context_tokens), settings)
        files[-1].write_text(json.dumps(as_json(done)))
    merged = figure.merge([json.loads(file.read_text()) for file in files])
    assert [row.context_tokens for row in merged.rows] == [64, 64, 96, 96]
    image = tmp_path / "ttft.png"
    monkeypatch.setattr("sys.argv", ["ttft_figure.py", *map(str, files), "--image", str(image)])
    figure.main()
    assert image.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "name", ["components", "layerwise", "offline", "peers", "row_attention", "where_time_goes"]
)
def test_a_scripts_errors_are_one_line(script, name, monkeypatch):
    monkeypatch.setattr("sys.argv", [f"lab/experiments/{name}.py", "--shape", "nothing"])
    with pytest.raises(SystemExit) as ended:
        script("experiment").run_script(script(name).main)
    assert str(ended.value).startswith(f"{name}.py: ")
    assert "qwen2.5-0.5b" in str(ended.value)


def test_missing_measurements_are_reported(script):
    page = script("ttft_page")
    assert set(page.parts(dict.fromkeys(page.FILES)).values()) == {"Not measured yet."}


def as_json(done):
    """Return a measurement as read from its file."""
    return json.loads(json.dumps({**facts(done), **ENVIRONMENT}))
