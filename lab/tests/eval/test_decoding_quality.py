"""The evaluation of long decoding on a tiny model: measures agree with their definitions."""

from dataclasses import replace

import pytest
import torch

from kvweave.decode.settings import ClusterSettings, DiskSettings, OffloadSettings
from kvweave.errors import InvalidRequest
from kvweave.plugins import plugins
from kvweave.testing import tiny_adapter
from kvweave_lab.eval.decoding import measure
from kvweave_lab.eval.decoding.measure import (
    ABLATIONS,
    Request,
    all_variants,
    evaluate_decoding,
    variant_named,
)
from kvweave_lab.eval.decoding.recorder import ReuseTracker
from kvweave_lab.eval.decoding.report import content, write
from kvweave_lab.eval.decoding.results import comparison_rows
from kvweave_lab.eval.decoding.run import Prefilled, decode
from kvweave_lab.eval.decoding.shift import kmeans_variance
from kvweave_lab.eval.long_texts import LongText, Reply, long_text
from kvweave_lab.eval.world import Haystack
from kvweave_lab.strategies import STRATEGIES
from kvweave_lab.strategies.clustered import LocalClusters

LENGTHS = (32, 64)
KV = OffloadSettings(
    0.3,
    window=8,
    clusters=ClusterSettings(mean_entries=8, max_entries=16),
    disk=DiskSettings(page_bytes=512),
)
BOUND = 200_000


@pytest.fixture(scope="module")
def adapter():
    return tiny_adapter()


@pytest.fixture(scope="module")
def prefilled(adapter) -> Prefilled:
    given = {"seed": 0, "number": 0, "prompt_tokens": 120, "decode_tokens": LENGTHS[-1]}
    text = long_text("dialogue", adapter.template, Haystack.of_split("dev"), "dev", **given)
    assert text.prompt_tokens + LENGTHS[-1] <= 512, "the text is too long for the tiny model"
    return Prefilled.of(adapter, text)


@pytest.fixture(scope="module")
def runs(adapter, prefilled):
    """The text under every strategy."""
    bounds = {name: None if name == "dense" else BOUND for name in STRATEGIES}
    kv = {name: replace(KV, strategy=name, resident_bytes=bounds[name]) for name in STRATEGIES}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalClusters, "window_entries", 16)
        return {name: decode(adapter, prefilled, name, own, LENGTHS) for name, own in kv.items()}


class TestSegments:
    def test_of_dense_decoding_agree_with_a_plain_forward_pass(self, adapter, prefilled, runs):
        ids = torch.tensor([prefilled.text.token_ids])
        with torch.no_grad():
            logits = adapter.model(ids).logits[0, prefilled.text.prompt_tokens - 1 : -1]
        assert runs["dense"].greedy == tuple(logits.argmax(-1).tolist())
        true = ids[0, prefilled.text.prompt_tokens :]
        losses = torch.nn.functional.cross_entropy(logits.float(), true, reduction="none")
        expected = [float(losses[:32].mean()), float(losses[32:].mean())]
        assert [part.nll for part in runs["dense"].segments] == pytest.approx(expected, abs=1e-3)
        for part in runs["dense"].segments:
            assert part.quality.recall == 1
            assert part.quality.attended_mass == pytest.approx(1)
            assert part.quality.output_error < 1e-6

    def test_single_entries_miss_nothing_and_a_window_misses_everything(self, runs):
        for entries, window in zip(runs["entries"].segments, runs["window"].segments, strict=True):
            assert entries.quality.recall == 1
            assert entries.quality.attended_mass > window.quality.attended_mass
            assert window.quality.recall == 0
            assert window.quality.output_error > 0.01

    @pytest.mark.parametrize("name", ["dynakv", "static", "local"])
    def test_clusters_miss_some_entries(self, runs, name):
        for part in runs[name].segments:
            assert 0 < part.quality.recall < 1
            assert part.quality.output_error > 0
            assert part.clusters > 3
            assert part.variance > 0
            assert part.counts["rows"] == part.steps == 32
            assert part.counts["peak_resident_bytes"] <= BOUND
        assert runs[name].updated.seen > 0
        assert list(runs[name].updated.retrieved) == sorted(runs[name].updated.retrieved)

    def test_a_budget_of_everything_misses_nothing(self, adapter, prefilled):
        for part in decode(adapter, prefilled, "all", replace(KV, kv_budget=1.0), LENGTHS).segments:
            assert part.quality.recall == 1
            assert part.quality.attended_mass == pytest.approx(1, abs=1e-5)
            assert part.quality.output_error < 1e-4


def test_recording_changes_no_results(adapter, prefilled, runs, monkeypatch):
    recorded = runs["dynakv"]
    monkeypatch.setattr("kvweave_lab.eval.decoding.run.RECORD_EVERY", 10**9)
    kv = replace(KV, strategy="dynakv", resident_bytes=BOUND)
    unrecorded = decode(adapter, prefilled, "dynakv", kv, LENGTHS)
    assert unrecorded.greedy == recorded.greedy
    for one, other in zip(unrecorded.segments, recorded.segments, strict=True):
        for name in ("attended", "retrieved", "splits", "bytes_written"):
            assert one.counts[name] == other.counts[name]
    assert unrecorded.segments[1].quality is None


def test_only_answers_with_distant_evidence_are_judged_by_all_their_tokens(adapter, prefilled, runs):
    text, greedy = prefilled.text, runs["dense"].greedy
    ids = list(text.token_ids)
    first = text.prompt_tokens
    ids[first : first + 2] = greedy[:2]  # the first answer becomes correct; the text before it is the same
    replies = (
        Reply(first, first, first + 1, 500),
        Reply(first, first, first + 24, 500),
        Reply(first, first, first + 1, 5),
    )
    given = replace(text, token_ids=tuple(ids), replies=tuple(sorted(replies, key=lambda reply: reply.end)))
    (part,) = decode(
        adapter, Prefilled.of(adapter, given), "dense", replace(KV, strategy="dense"), (32,)
    ).segments
    assert (part.judged, part.correct) == (2, 1)


def test_free_decoding_continues_with_the_greedy_tokens(adapter):
    ids = tuple(range(10, 40))
    text = LongText("free", "free", 0, (*ids, 50), 30, (Reply(30, 30, 31, 500),), free_tokens=20)
    run = decode(adapter, Prefilled.of(adapter, text), "dense", replace(KV, strategy="dense"), (21,))
    decoded = list(ids)
    with torch.no_grad():
        for token in run.greedy[:20]:
            logits = adapter.model(torch.tensor([decoded])).logits[0, -1]
            logits[2] = float("-inf")  # the token that ends a text
            assert token == int(logits.argmax())
            decoded.append(token)
    assert not run.forced
    assert run.segments[0].judged == 1


def test_cluster_reuse_is_counted_from_the_update():
    import numpy as np

    tracker = ReuseTracker("0")
    tracker.step(np.array([[3, 3]]), [[0]])
    tracker.step(np.array([[3, 4]]), [[0]])  # cluster 1 grew and is not retrieved
    for _ in range(2):
        tracker.step(np.array([[3, 4]]), [[1]])
    assert tracker.updated.reuse().seen == 1
    assert tracker.updated.reuse().retrieved == (0, 1, 1, 1, 1)


def test_kmeans_variance_is_the_mean_squared_distance_to_the_centroids():
    keys = torch.tensor([[[0.0, 0.0], [0.0, 2.0], [9.0, 0.0], [9.0, 4.0]]])
    assert kmeans_variance(keys, 2) == pytest.approx((1 + 1 + 4 + 4) / 4)


@pytest.fixture(scope="module")
def small_clusters():
    """Evaluations whose clusters fit a short text."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalClusters, "window_entries", 16)
        patch.setattr(measure, "OffloadSettings", lambda *given, **named: replace(KV, **_named(given, named)))
        yield


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    return tmp_path_factory.mktemp("evaluation")


@pytest.fixture(scope="module")
def result(adapter, output, small_clusters):
    return evaluate_decoding(adapter, replace(TestEvaluation.REQUEST, output=output, resident_bytes=BOUND))


@pytest.mark.usefixtures("small_clusters")
class TestEvaluation:
    REQUEST = Request(
        ("dialogue", "story"),
        (16, 32),
        ("dynakv", "static"),
        (0.3,),
        seeds=(0, 1),
        samples=1,
        prompt_tokens=100,
    )

    def test_has_a_row_for_every_variant_length_and_task(self, result):
        found = [(row.strategy, row.decode_tokens, row.task) for row in result.rows]
        tasks = ("dialogue", "story", "overall")
        assert found == [
            (name, n, task) for name in ("dense", "dynakv", "static") for n in (16, 32) for task in tasks
        ]
        for row in result.rows:
            assert (row.texts, row.seeds) == (4 if row.task == "overall" else 2, 2)
            if row.strategy == "dense":
                assert row.agreement.value == 1
                assert row.bytes_per_token == 0

    def test_compares_dynakv_with_other_strategies_text_by_text(self, result):
        by_name = {(run.variant, run.text): run for run in result.runs}
        found = list(comparison_rows(result.runs))
        assert [(row.strategy, row.decode_tokens, row.task) for row in found] == [
            ("static", n, task) for n in (16, 32) for task in ("dialogue", "story", "overall")
        ]
        stories = [name for variant, name in by_name if variant == "static" and "story" in name]
        dynakv, static = (
            [by_name[variant, name].segments[1] for name in stories] for variant in ("dynakv", "static")
        )
        missed, pages = (
            sum(map(of, dynakv)) / sum(map(of, static))
            for of in (lambda part: 1 - part.quality.recall, lambda part: part.counts["pages_read"])
        )
        assert (found[4].missed.value, found[4].pages.value) == pytest.approx((missed, pages))
        assert found[4].missed.low <= missed <= found[4].missed.high

    def test_writes_json_figures_and_a_page(self, result, tmp_path):
        about = {"command": "kvweave eval decode", "version": "1", "date": "today"}
        names = {path.name for path in write(tmp_path, result, about)}
        assert {"decoding.json", "decoding.html", "decoding-missed.png"} <= names
        assert result.shift is None  # `local` does not run
        assert "decoding-shift.png" not in names
        assert "kvweave eval decode" in (tmp_path / "decoding.html").read_text()
        (row, *_) = [row for row in content(result, about)["rows"] if row["strategy"] == "dynakv"]
        names = (
            "strategy decode_tokens budget recall output_error score pages_read_per_token bytes_per_token"
            " reads_per_token mean_run_entries hit_rate resident_bytes latency_s_per_token recall_interval"
            " prefetched_per_token prefetch_unused"
        )
        assert set(names.split()) <= set(row)
        assert 0 <= row["prefetch_unused"] <= 1

    def test_resumes_from_the_results_log(self, result, adapter, monkeypatch):
        monkeypatch.setattr(measure, "decode", None)  # every run is in the log
        monkeypatch.setattr(measure, "Prefilled", None)
        again = evaluate_decoding(adapter, result.request)
        assert again.rows == result.rows

    def test_measures_the_shift_of_keys_if_all_compared_strategies_run(self, result, adapter, tmp_path):
        variants = ("static", "local", "dynakv")
        request = replace(result.request, tasks=("story",), seeds=(0,), variants=variants)
        compared = evaluate_decoding(adapter, request)
        assert {(part.update, part.decode_tokens) for part in compared.shift.groupings} == {
            (name, n) for name in variants for n in request.lengths
        }
        assert {
            path.name for path in write(tmp_path, compared, {"command": "", "version": "", "date": ""})
        } >= {
            "decoding-shift.png",
            "decoding-variance.png",
        }
        assert evaluate_decoding(adapter, request).shift == compared.shift

    def test_refuses_the_folder_of_another_model(self, result):
        with pytest.raises(InvalidRequest, match="differ in model"):
            evaluate_decoding(tiny_adapter(seed=1), result.request)

    def test_refuses_lengths_beyond_the_models_positions(self, adapter):
        with pytest.raises(
            InvalidRequest, match="more than the 512 positions of tiny-llama; take a shorter --length"
        ):
            evaluate_decoding(adapter, replace(self.REQUEST, lengths=(500,)))

    def test_refuses_unknown_names_and_lists_the_known(self, adapter):
        with pytest.raises(InvalidRequest, match=r"'poem'.*story"):
            evaluate_decoding(adapter, replace(self.REQUEST, tasks=("poem",)))
        with pytest.raises(InvalidRequest, match=r"'dynakv/fast'.*immediate-split"):
            evaluate_decoding(adapter, replace(self.REQUEST, variants=("dynakv/fast",)))


def _named(given, named):
    names = ("kv_budget", "resident_bytes")
    return dict(zip(names, given, strict=False)) | named


def test_every_ablation_changes_one_thing():
    base = variant_named("dynakv", OffloadSettings(0.2, 10**6))
    for name in ABLATIONS:
        changed = variant_named(f"dynakv/{name}", base)
        parts = [getattr(changed, part) != getattr(base, part) for part in ("strategy", "clusters", "disk")]
        assert sum(parts) == 1
        assert replace(changed, strategy=base.strategy, clusters=base.clusters, disk=base.disk) == base
    assert {variant_named(name, base).strategy for name in all_variants()} == {
        "outline",
        "dynakv",
        *plugins("kvweave.strategies"),
    }


def test_techniques_are_switched_off_in_our_own_strategy_alone():
    assert variant_named("static/buffer-2", OffloadSettings()).clusters.buffer_entries == 2
    with pytest.raises(InvalidRequest, match="no decoding strategy 'static-packed'"):
        variant_named("static/packed", OffloadSettings())
