"""The evaluation of long decoding on a tiny model: what is measured is what its definition says."""

from dataclasses import replace

import pytest
import torch

from kvweave.decode.settings import ClusterSettings, DiskSettings, OffloadSettings
from kvweave.decode.strategies import STRATEGIES
from kvweave.errors import InvalidRequest
from kvweave.testing import tiny_adapter
from kvweave_lab.eval.decoding import measure
from kvweave_lab.eval.decoding.ablations import ABLATIONS, all_variants, variant_named
from kvweave_lab.eval.decoding.files import write
from kvweave_lab.eval.decoding.measure import Request, evaluate_decoding
from kvweave_lab.eval.decoding.partition import global_variance
from kvweave_lab.eval.decoding.returning import Returns
from kvweave_lab.eval.decoding.rows import beside_of
from kvweave_lab.eval.decoding.run import Prefilled, decode
from kvweave_lab.eval.decoding.tables import content
from kvweave_lab.eval.haystack import Haystack
from kvweave_lab.eval.longtext.telling import LongText, Reply, long_text

LENGTHS = (48, 96)
KV = OffloadSettings(
    0.3,
    window=8,
    clusters=ClusterSettings(mean_entries=8, max_entries=16, local_entries=16),
    flash=DiskSettings(page_bytes=512),
)
BOUND = 200_000


@pytest.fixture(scope="module")
def adapter():
    return tiny_adapter()


@pytest.fixture(scope="module")
def prefilled(adapter) -> Prefilled:
    given = {"seed": 0, "number": 0, "prompt_tokens": 120, "decode_tokens": LENGTHS[-1]}
    text = long_text("dialogue", adapter.template, Haystack.of_split("dev"), "dev", **given)
    assert text.prompt_tokens + LENGTHS[-1] <= 512, "the opening has grown; take a model with more positions"
    return Prefilled.of(adapter, text)


@pytest.fixture(scope="module")
def runs(adapter, prefilled):
    """The text under every strategy."""
    bounds = {name: None if name == "dense" else BOUND for name in STRATEGIES}
    kv = {name: replace(KV, strategy=name, resident_bytes=bounds[name]) for name in STRATEGIES}
    return {name: decode(adapter, prefilled, name, own, LENGTHS) for name, own in kv.items()}


class TestAStretch:
    def test_of_dense_decoding_says_what_a_plain_pass_would(self, adapter, prefilled, runs):
        ids = torch.tensor([prefilled.text.token_ids])
        with torch.no_grad():
            logits = adapter.model(ids).logits[0, prefilled.text.prompt_tokens - 1 : -1]
        assert runs["dense"].greedy == tuple(logits.argmax(-1).tolist())
        true = ids[0, prefilled.text.prompt_tokens :]
        losses = torch.nn.functional.cross_entropy(logits.float(), true, reduction="none")
        expected = [float(losses[:48].mean()), float(losses[48:].mean())]
        assert [part.nll for part in runs["dense"].stretches] == pytest.approx(expected, abs=1e-3)
        for part in runs["dense"].stretches:
            assert part.watched.recall == 1
            assert part.watched.attended_mass == pytest.approx(1)
            assert part.watched.output_error < 1e-6

    def test_single_entries_miss_nothing_and_a_window_everything(self, runs):
        for entries, window in zip(runs["entries"].stretches, runs["window"].stretches, strict=True):
            assert entries.watched.recall == 1
            assert entries.watched.attended_mass > window.watched.attended_mass
            assert window.watched.recall == 0
            assert window.watched.output_error > 0.01

    @pytest.mark.parametrize("name", ["dynakv", "static", "local"])
    def test_clusters_lie_between(self, runs, name):
        for part in runs[name].stretches:
            assert 0 < part.watched.recall < 1
            assert part.watched.output_error > 0
            assert part.clusters > 3
            assert part.variance > 0
            assert part.counts["rows"] == part.steps == 48
            assert part.counts["peak_resident_bytes"] <= BOUND
        assert runs[name].updated.seen > 0
        assert list(runs[name].updated.retrieved) == sorted(runs[name].updated.retrieved)

    def test_everything_in_the_budget_is_seen_as_everything(self, adapter, prefilled):
        for part in decode(adapter, prefilled, "all", replace(KV, kv_budget=1.0), LENGTHS).stretches:
            assert part.watched.recall == 1
            assert part.watched.attended_mass == pytest.approx(1, abs=1e-5)
            assert part.watched.output_error < 1e-4


def test_watching_changes_nothing(adapter, prefilled, monkeypatch):
    seen = decode(adapter, prefilled, "dynakv", KV, LENGTHS)
    monkeypatch.setattr("kvweave_lab.eval.decoding.run.LOOK_EVERY", 10**9)
    unseen = decode(adapter, prefilled, "dynakv", KV, LENGTHS)
    assert unseen.greedy == seen.greedy
    for one, other in zip(unseen.stretches, seen.stretches, strict=True):
        for name in ("attended", "retrieved", "splits", "bytes_written"):
            assert one.counts[name] == other.counts[name]
    assert unseen.stretches[1].watched is None


def test_only_answers_from_far_away_are_judged_and_by_all_their_tokens(adapter, prefilled):
    text = prefilled.text
    said = decode(adapter, prefilled, "dense", replace(KV, strategy="dense"), LENGTHS).greedy
    ids = list(text.token_ids)
    first = text.prompt_tokens
    ids[first : first + 2] = said[:2]  # what it says first is right; the text is the same up to there
    replies = (
        Reply(first, first, first + 1, 500),
        Reply(first, first, first + 40, 500),
        Reply(first, first, first + 1, 5),
    )
    given = replace(text, token_ids=tuple(ids), replies=tuple(sorted(replies, key=lambda reply: reply.end)))
    (part,) = decode(
        adapter, Prefilled.of(adapter, given), "dense", replace(KV, strategy="dense"), (48,)
    ).stretches
    assert (part.judged, part.right) == (2, 1)


def test_what_a_model_writes_by_itself_is_its_own_greedy_text(adapter):
    ids = tuple(range(10, 40))
    text = LongText("free", "free", 0, (*ids, 50), 30, (Reply(30, 30, 31, 500),), free_tokens=20)
    run = decode(adapter, Prefilled.of(adapter, text), "dense", replace(KV, strategy="dense"), (21,))
    said = list(ids)
    with torch.no_grad():
        for token in run.greedy[:20]:
            logits = adapter.model(torch.tensor([said])).logits[0, -1]
            logits[2] = float("-inf")  # the end of a text
            assert token == int(logits.argmax())
            said.append(token)
    assert not run.forced
    assert run.stretches[0].judged == 1


def test_clusters_retrieved_again_are_counted_from_their_update():
    import numpy as np

    returns = Returns("0")
    returns.step(np.array([[3, 3]]), [[0]])
    returns.step(np.array([[3, 4]]), [[0]])  # cluster 1 grew, and is not asked for
    for _ in range(2):
        returns.step(np.array([[3, 4]]), [[1]])
    assert returns.updated.again().seen == 1
    assert returns.updated.again().retrieved == (0, 1, 1, 1, 1)


def test_grouping_anew_is_measured_by_squared_distances():
    keys = torch.tensor([[[0.0, 0.0], [0.0, 2.0], [9.0, 0.0], [9.0, 4.0]]])
    assert global_variance(keys, 2) == pytest.approx((1 + 1 + 4 + 4) / 4)


@pytest.fixture(scope="module")
def small():
    """Evaluations have clusters that fit a short text."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "OffloadSettings", lambda *given, **named: replace(KV, **_named(given, named)))
        yield


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("evaluation")


@pytest.fixture(scope="module")
def done(adapter, place, small):
    return evaluate_decoding(adapter, replace(TestAnEvaluation.REQUEST, output=place, resident_bytes=BOUND))


@pytest.mark.usefixtures("small")
class TestAnEvaluation:
    REQUEST = Request(
        ("dialogue", "story"),
        (32, 64),
        ("dynakv", "static"),
        (0.3,),
        seeds=(0, 1),
        samples=1,
        prompt_tokens=100,
    )

    def test_has_a_row_for_every_variant_length_and_task(self, done):
        found = [(row.strategy, row.decode_tokens, row.task) for row in done.rows]
        tasks = ("dialogue", "story", "overall")
        assert found == [
            (name, n, task) for name in ("dense", "dynakv", "static") for n in (32, 64) for task in tasks
        ]
        for row in done.rows:
            assert (row.texts, row.seeds) == (4 if row.task == "overall" else 2, 2)
            if row.strategy == "dense":
                assert row.agreement.value == 1
                assert row.bytes_per_token == 0

    def test_sets_dynakv_beside_others_text_by_text(self, done):
        by_name = {(run.variant, run.text): run for run in done.runs}
        found = list(beside_of(done.runs))
        assert [(row.strategy, row.decode_tokens, row.task) for row in found] == [
            ("static", n, task) for n in (32, 64) for task in ("dialogue", "story", "overall")
        ]
        stories = [name for variant, name in by_name if variant == "static" and "story" in name]
        ours, theirs = (
            [by_name[variant, name].stretches[1] for name in stories] for variant in ("dynakv", "static")
        )
        missed, pages = (
            sum(map(of, ours)) / sum(map(of, theirs))
            for of in (lambda part: 1 - part.watched.recall, lambda part: part.counts["pages_read"])
        )
        assert (found[4].missed.value, found[4].pages.value) == pytest.approx((missed, pages))
        assert found[4].missed.low <= missed <= found[4].missed.high

    def test_writes_json_figures_and_a_page(self, done, tmp_path):
        about = {"command": "kvweave eval decode", "version": "1", "date": "today"}
        names = {path.name for path in write(tmp_path, done, about)}
        assert {"decoding.json", "decoding.html", "decoding-missed.png"} <= names
        assert done.shift is None  # `local` does not run
        assert "decoding-shift.png" not in names
        assert "kvweave eval decode" in (tmp_path / "decoding.html").read_text()
        (row, *_) = [row for row in content(done, about)["rows"] if row["strategy"] == "dynakv"]
        names = (
            "strategy decode_tokens budget recall output_error score pages_read_per_token bytes_per_token"
            " reads_per_token mean_run_entries hit_rate resident_bytes latency_s_per_token recall_interval"
            " prefetched_per_token prefetch_unused"
        )
        assert set(names.split()) <= set(row)
        assert 0 <= row["prefetch_unused"] <= 1

    def test_goes_on_where_it_stopped(self, done, adapter, place, monkeypatch):
        monkeypatch.setattr(measure, "decode", None)  # nothing is left to be run
        monkeypatch.setattr(measure, "Prefilled", None)
        again = evaluate_decoding(adapter, done.request)
        assert again.rows == done.rows

    def test_shows_the_shift_of_keys_where_all_strategies_run_that_it_compares(self, done, adapter, tmp_path):
        variants = ("static", "local", "dynakv")
        request = replace(done.request, tasks=("story",), seeds=(0,), variants=variants)
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

    def test_of_another_model_is_refused_in_the_same_folder(self, done):
        with pytest.raises(InvalidRequest, match="differ in model"):
            evaluate_decoding(tiny_adapter(seed=1), done.request)

    def test_beyond_the_positions_of_the_model_says_how_far(self, adapter):
        with pytest.raises(
            InvalidRequest, match="more than the 512 positions of tiny-llama; take a shorter --length"
        ):
            evaluate_decoding(adapter, replace(self.REQUEST, lengths=(500,)))

    def test_unknown_names_are_listed(self, adapter):
        with pytest.raises(InvalidRequest, match=r"'poem'.*story"):
            evaluate_decoding(adapter, replace(self.REQUEST, tasks=("poem",)))
        with pytest.raises(InvalidRequest, match=r"'dynakv/fast'.*immediate-split"):
            evaluate_decoding(adapter, replace(self.REQUEST, variants=("dynakv/fast",)))


def _named(given, named):
    names = ("kv_budget", "resident_bytes")
    return dict(zip(names, given, strict=False)) | named


def test_every_ablation_changes_one_thing():
    base = OffloadSettings(0.2, 10**6)
    for name in ABLATIONS:
        changed = variant_named(f"dynakv/{name}", base)
        parts = [getattr(changed, part) != getattr(base, part) for part in ("clusters", "flash", "residency")]
        assert sum(parts) == 1
        assert replace(changed, clusters=base.clusters, flash=base.flash, residency=base.residency) == base
    assert {variant_named(name, base).strategy for name in all_variants()} == set(STRATEGIES)
