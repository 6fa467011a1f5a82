"""The TTFT bench on a tiny model: its rows, the counted work, and refused settings."""

from contextlib import nullcontext
from dataclasses import fields

import pytest
import torch

from kvweave.errors import InvalidRequest, PromptTooLong, UnknownRecipe
from kvweave.kvstore.chunk_store import ChunkStore
from kvweave.models.hooks import StopAtLayer
from kvweave.testing import tiny_adapter
from kvweave_lab.bench import ttft
from kvweave_lab.bench.baselines import (
    Rates,
    Work,
    WorkCounter,
    blockwise_prefill,
    stock_attention,
    transformers_prefill,
)
from kvweave_lab.bench.measurement import mean_of_neighbours, peak_memory_bytes
from kvweave_lab.bench.plots import ttft_plot
from kvweave_lab.bench.ttft import TtftRow, TtftSettings, bench_ttft, group_cases
from kvweave_lab.bench.workload import prompt_of_chunks

FEW = TtftSettings((128,), ("reuse", "prophetkv"), (0.0, 0.25, 1.0), chunk_tokens=64, rounds=2)


@pytest.fixture(scope="module")
def adapter():
    return tiny_adapter()


@pytest.fixture(scope="module")
def done(adapter, tmp_path_factory):
    return bench_ttft(adapter, "tiny", tmp_path_factory.mktemp("bench"), FEW)


def test_rows_have_exactly_the_fields_that_reports_read():
    assert [field.name for field in fields(TtftRow)] == (
        "shape dtype device threads context_tokens recipe ratio kv_from rows full_s ttft_s speedup limit_speedup "
        "efficiency load_s place_s select_s recompute_s peak_bytes"
    ).split()


def test_every_recipe_has_a_row_at_every_ratio_that_applies_to_it(done):
    assert [(row.recipe, row.ratio) for row in done.rows] == [
        ("reuse", 0.0),
        ("reuse", 1.0),
        ("prophetkv", 0.0),
        ("prophetkv", 0.25),
        ("prophetkv", 1.0),
    ]
    (full,) = done.full
    for row, spread in zip(done.rows, done.spreads, strict=True):
        assert (row.shape, row.dtype, row.context_tokens) == ("tiny", "float32", 128)
        assert (
            row.full_s == full.ways_s[full.fastest].median == min(way.median for way in full.ways_s.values())
        )
        assert spread.ttft_s.low <= row.ttft_s <= spread.ttft_s.high
        assert row.efficiency == pytest.approx(row.speedup / row.limit_speedup)
        parts_s = row.load_s + row.place_s + row.select_s + row.recompute_s
        assert parts_s <= 1.5 * row.ttft_s  # each is a separate median


def test_a_request_is_compared_with_the_full_prefills_right_before_and_after_it():
    order = ["a", "b", 0, 1, "a", 1, 0, "a", 0]
    assert mean_of_neighbours(order, 0, "a", [1.0, 2.0, 4.0]) == [1.5, 3.0, 4.0]
    assert mean_of_neighbours(order, 1, "a", [1.0, 2.0, 4.0]) == [1.5, 3.0]
    assert mean_of_neighbours(order, 0, "b", [7.0]) == [7.0, 7.0, 7.0]
    assert mean_of_neighbours([0, "a", 0], 0, "a", [5.0]) == [5.0, 5.0]


def test_cases_between_two_full_prefills_compute_at_most_about_one():
    assert group_cases([0.0, 0.1, 0.15, 0.2, 0.3, 1.0, 0.0, 0.5, 0.5]) == [[0, 1, 2, 3, 4], [5, 6], [7, 8]]
    assert group_cases([1.0, 1.0]) == [[0], [1]]
    assert group_cases([0.0, 0.0]) == [[0, 1]]


def test_rows_count_computed_tokens(done, adapter):
    rows = {(row.recipe, row.ratio): row.rows for row in done.rows}
    (full,) = done.full
    system = len(adapter.template.prefix_ids(None))
    assert rows["reuse", 1.0] == rows["prophetkv", 1.0] == full.prompt_tokens - system
    # The first chunk after the system prompt is exact; a quarter of the second is recomputed.
    stale = rows["reuse", 1.0] - rows["reuse", 0.0] - 64
    assert rows["prophetkv", 0.25] - rows["prophetkv", 0.0] == -(-stale // 4)


def test_the_speedup_limit_falls_with_the_ratio(done):
    limits = [row.limit_speedup for row in done.rows if row.recipe == "prophetkv"]
    assert limits == sorted(limits, reverse=True)


def test_requests_find_stored_kv_in_memory_and_on_the_disk(adapter, tmp_path, monkeypatch):
    """Memory is cleared right before every request from the disk, untimed ones too."""
    events, timed_run = [], ttft.run
    forget_recent = ChunkStore.forget_recent
    monkeypatch.setattr(
        ChunkStore, "forget_recent", lambda store: events.append("drop") or forget_recent(store)
    )
    monkeypatch.setattr(
        ttft, "run", lambda *given, **kw: events.append(given[0].name) or timed_run(*given, **kw)
    )
    settings = TtftSettings((64,), ("reuse",), (0.0,), chunk_tokens=64, rounds=1, kv_from=("memory", "disk"))
    found = bench_ttft(adapter, "tiny", tmp_path, settings)
    assert (
        [row.kv_from for row in found.rows]
        == [spread.kv_from for spread in found.spreads]
        == ["memory", "disk"]
    )
    requests = "".join({"reuse": "r", "drop": "d"}.get(name, "") for name in events)
    assert requests == "rdrrdrd"  # warm-up, the round, and before the disk's bandwidth is measured
    assert min(found.full[0].read_bytes_per_s, found.full[0].disk_bytes_per_s) > 0
    assert ttft_plot(found).startswith(b"\x89PNG")


def test_the_limit_counts_bytes_as_they_are_stored(adapter, tmp_path):
    """Eight bits a number and scales, instead of float32's 32 bits, are less than half the bytes."""
    settings = TtftSettings((128,), ("reuse", "int8+reuse"), (0.0,), chunk_tokens=64, rounds=1)
    exact, int8 = _stored_bytes(adapter, tmp_path, settings)
    prompt = adapter.template.render(prompt_of_chunks(adapter, 128, 64))
    system, question = (prompt.spans[place].tokens * adapter.geometry.token_bytes for place in (0, -1))
    assert exact == prompt.tokens * adapter.geometry.token_bytes - question
    assert 0.25 * (exact - system) < int8 - system < 0.5 * (exact - system)  # the system prompt stays exact


def _stored_bytes(adapter, folder, settings):
    """Return the stored bytes that each case's limit is computed with."""
    counted = []
    original = Rates.limit_s
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            Rates,
            "limit_s",
            lambda self, works, stored: counted.append(stored) or original(self, works, stored),
        )
        bench_ttft(adapter, "tiny", folder, settings)
    return counted


def test_the_plot_is_a_png(done):
    assert ttft_plot(done).startswith(b"\x89PNG")


def test_work_counts_the_computed_rows(adapter):
    config, rows = adapter.model.config, torch.tensor([3, 7, 9])
    ids = list(range(3, 13))
    with WorkCounter(adapter).record() as works:
        adapter.compute(adapter.new_cache(10), ids, adapter.rows(rows))
        adapter.compute(adapter.new_cache(10), ids, adapter.rows(torch.arange(10)))
    hidden, inner, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    width, kv_width = hidden, hidden // config.num_attention_heads * config.num_key_value_heads
    linear = layers * (2 * hidden * width + 2 * hidden * kv_width + 3 * hidden * inner)
    head = hidden * config.vocab_size

    prefixes = [4, 8, 10], range(1, 11)
    attention = [4 * layers * width * sum(each) for each in prefixes]
    others = [2 * linear * len(each) + 2 * head for each in prefixes]
    assert [work.attention_flops for work in works] == attention
    assert [work.flops - work.attention_flops for work in works] == others
    assert {work.weight_bytes for work in works} == {4 * (linear + head)}


def test_a_partial_pass_counts_its_own_layers(adapter):
    config = adapter.model.config
    plan = adapter.rows(torch.arange(10))
    plan.hooks.append(StopAtLayer(config.num_hidden_layers - 1))
    with WorkCounter(adapter).record() as works:
        adapter.compute(adapter.new_cache(10), range(3, 13), adapter.rows(torch.arange(10)))
        adapter.run_partial(adapter.new_cache(10), range(3, 13), plan)
    whole, partial = works
    head = config.hidden_size * config.vocab_size
    layers = config.num_hidden_layers
    assert partial.flops == (whole.flops - 2 * head) / layers * (layers - 1)
    assert partial.weight_bytes == (whole.weight_bytes - 4 * head) / layers * (layers - 1)


def test_windows_and_experts_limit_the_work():
    wide, narrow = (_flops(family) for family in ("mistral", "mistral-sliding"))
    prefixes, inside = range(1, 33), [min(n, 16) for n in range(1, 33)]
    assert wide - narrow == 4 * 3 * 32 * (sum(prefixes) - sum(inside))
    mixtral = tiny_adapter("mixtral")
    (layer, *_) = mixtral.model.model.layers
    experts = sum(weight.numel() for weight in layer.parameters() if weight.dim() == 3)
    others = sum(weight.numel() for weight in layer.parameters() if weight.dim() == 2)
    head = 2 * 32 * mixtral.model.config.vocab_size
    linear = 2 * 32 * 3 * (others + experts / 2)  # two of four experts a token
    assert _flops("mixtral") == linear + 4 * 3 * 32 * sum(prefixes) + head


def _flops(family):
    adapter = tiny_adapter(family)
    with WorkCounter(adapter).record() as works:
        adapter.compute(adapter.new_cache(32), range(3, 35), adapter.rows(torch.arange(32)))
    return works[0].flops


def test_the_limit_is_the_slower_of_computing_and_reading_weights():
    rates = Rates(flops=100.0, memory_bytes=10.0, read_bytes=5.0)
    assert rates.limit_s([Work(200, 0, 5), Work(100, 0, 30)], stored_bytes=20) == 2 + 3 + 4


def test_both_ways_of_full_prefill_give_full_attentions_logits(adapter):
    ids = torch.randint(3, 300, (1, 40), generator=torch.Generator().manual_seed(0))
    before = adapter.model.config._attn_implementation
    expected = adapter.compute(adapter.new_cache(40), ids[0].tolist(), adapter.rows(torch.arange(40)))
    for context in (nullcontext(), stock_attention(adapter)):
        with context:
            for logits in (transformers_prefill(adapter, ids), blockwise_prefill(adapter, ids, 16)):
                torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    assert adapter.model.config._attn_implementation == before


def test_the_peak_is_the_memory_that_a_step_adds():
    sums = []

    def step():
        temporary = torch.ones(2**26)  # 256 MiB, freed when the step ends
        sums.append(float(temporary.sum()))

    peak = peak_memory_bytes(step, torch.device("cpu"))
    if peak is None:
        pytest.skip("this system does not report a process's peak memory")
    assert 0.9 * 2**28 < peak < 2**29  # some of it may be memory that was free before
    assert len(sums) == 1


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"context_tokens": (100,)}, InvalidRequest, "not made of chunks of 64"),
        ({"recipes": ("reuse",), "ratios": (0.2,)}, InvalidRequest, "selects no tokens"),
        ({"recipes": ("nothing",)}, UnknownRecipe, "full, reuse"),
        ({"context_tokens": (64, 640)}, PromptTooLong, "more than the 512"),
    ],
)
def test_impossible_measurements_are_refused_before_the_first(adapter, tmp_path, changes, kind, message):
    arguments = {name: getattr(FEW, name) for name in ("context_tokens", "recipes", "ratios", "chunk_tokens")}
    with pytest.raises(kind, match=message):
        bench_ttft(adapter, "tiny", tmp_path, TtftSettings(**{**arguments, **changes}))
    assert list(tmp_path.iterdir()) == []
