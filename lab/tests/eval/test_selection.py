"""The comparison of selections: observations, measures, and the report as tables and files."""

import json
import math
from dataclasses import replace

import pytest
import torch
from rich.console import Console

import kvweave
from kvweave.errors import InvalidRequest, PromptTooLong
from kvweave.recipes.methods import recipe_named
from kvweave.recipes.prepare import Isolated
from kvweave.recipes.recipe import run
from kvweave.recipes.select import TopScores
from kvweave.results import facts
from kvweave.testing import tiny_adapter, tiny_model
from kvweave.types import Prompt
from kvweave_lab.eval.samples import Sample
from kvweave_lab.eval.selection.analysis import KnownScores, analyse
from kvweave_lab.eval.selection.figures import write_selection, write_sweep
from kvweave_lab.eval.selection.layer_attention import align
from kvweave_lab.eval.selection.measure import (
    attention_divergence,
    common_share,
    jaccard,
    rank_correlation,
    share_left,
)
from kvweave_lab.eval.selection.observe import context_of, observe_full, observe_stale
from kvweave_lab.eval.selection.tables import sweep_table, tables
from kvweave_lab.scores import context_offsets, transfer_scores
from lab_support.selections import CHUNKS, SAMPLES, sample, values


@pytest.fixture(scope="module")
def adapter():
    return tiny_adapter()


@pytest.fixture(scope="module")
def report(adapter, tmp_path_factory):
    return analyse(
        adapter,
        tmp_path_factory.mktemp("kv"),
        SAMPLES,
        answered_ratios=(0.1, 1.0),
        auxiliary=tiny_adapter("qwen3", seed=3),
    )


def render(adapter, of: Sample):
    return adapter.template.render(Prompt(of.question, of.chunks))


class TestObservations:
    def test_decoding_is_what_eager_attention_gives_the_answers_tokens(self, adapter):
        prompt = render(adapter, SAMPLES[0])
        full = observe_full(adapter, prompt, 5)
        ids = torch.tensor([[*prompt.token_ids, *full.answer]])
        plain = tiny_model()
        plain.set_attn_implementation("eager")
        with torch.no_grad():
            out = plain(ids, output_attentions=True, use_cache=False)
        assert out.logits[0, prompt.tokens - 1 : -1].argmax(-1).tolist() == list(full.answer)
        weights = torch.cat(out.attentions)[:, :, prompt.tokens :, full.context.start : full.context.end]
        expected = (weights / weights.sum(-1, keepdim=True)).mean(dim=(1, 2))
        torch.testing.assert_close(full.decoding, expected, atol=1e-5, rtol=1e-3)

    def test_an_answer_that_ends_at_once_counts_with_its_end_token(self, monkeypatch):
        adapter = tiny_adapter()
        prompt = render(adapter, SAMPLES[0])
        first = observe_full(adapter, prompt, 1).answer[0]
        monkeypatch.setattr(adapter.model.generation_config, "eos_token_id", first)
        assert observe_full(adapter, prompt, 5).answer == (first,)

    def test_one_chunk_alone_is_exact_over_isolated_kv(self, adapter, tmp_path):
        prompt = render(adapter, sample("E", chunks=CHUNKS[:1]))
        full = observe_full(adapter, prompt, 1)
        with kvweave.ChunkStore(tmp_path) as store:
            kvweave.prepare(adapter, store, CHUNKS[:1])
            stale = observe_stale(recipe_named("reuse"), adapter, store, prompt)
        torch.testing.assert_close(stale.attended.question, full.attended.question, atol=1e-5, rtol=1e-3)
        torch.testing.assert_close(stale.attended.mass, full.attended.mass, atol=1e-5, rtol=1e-3)

    def test_the_context_knows_the_place_of_each_token(self, adapter):
        prompt = render(adapter, SAMPLES[0])
        context = context_of(prompt)
        for span in prompt.spans[1:-1]:
            own = slice(span.start - context.start, span.end - context.start)
            assert context.chunk[own].tolist() == [span.chunk] * span.tokens
            assert context.offset[own].tolist() == list(range(span.tokens))
        assert context.depth.min() > 0
        assert context.depth.max() < 1


class TestMeasures:
    def test_shares_in_common(self):
        a = torch.tensor([True, True, False, False])
        b = torch.tensor([False, True, True, False])
        assert common_share(a, b) == 0.5
        assert jaccard(a, b).item() == pytest.approx(1 / 3)

    def test_divergence_is_kullback_leiblers_and_finite_where_the_other_has_nothing(self):
        truth, other = torch.tensor([3.0, 1.0]), torch.tensor([1.0, 1.0])
        expected = 0.75 * math.log(0.75 / 0.5) + 0.25 * math.log(0.25 / 0.5)
        assert attention_divergence(truth, other) == pytest.approx(expected, abs=1e-6)
        assert attention_divergence(truth, truth * 5) == pytest.approx(0, abs=1e-9)
        assert 10 < attention_divergence(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])) < 30

    @pytest.mark.parametrize(
        ("left", "right", "expected"),
        [
            ([1, 2, 3], [10, 20, 90], 1),
            ([1, 2, 3], [3, 2, 1], -1),
            ([1, 1, 2], [5, 5, 9], 1),
            ([1, 1], [1, 2], 0),
        ],
    )
    def test_rank_correlation(self, left, right, expected):
        pair = (torch.tensor(values, dtype=torch.float64) for values in (left, right))
        assert float(rank_correlation(*pair)) == pytest.approx(expected)

    def test_rank_correlations_of_many_pairs_are_those_of_each(self):
        left, right = torch.rand(2, 5, 7, 4, dtype=torch.float64)
        each = torch.stack(
            [rank_correlation(*pair) for pair in zip(left.view(-1, 4), right.view(-1, 4), strict=True)]
        )
        torch.testing.assert_close(rank_correlation(left, right), each.view(5, 7))

    def test_share_left_is_the_sum_over_unselected_tokens(self):
        loss = torch.tensor([[4.0, 1.0, 5.0], [0.0, 0.0, 0.0]])
        assert share_left(loss, torch.tensor([3.0, 2.0, 1.0]), 1).tolist() == [0.6, 0.0]


class TestReport:
    def test_matrices_are_symmetric_with_ones_on_the_diagonal(self, report):
        for preparation in report.preparations:
            for grid in (preparation.overlap, preparation.jaccard):
                matrix = torch.tensor([values(row) for row in grid])
                torch.testing.assert_close(matrix, matrix.T)
                torch.testing.assert_close(matrix.diagonal(), torch.ones(len(report.selections)))
                assert matrix.min() >= 0
                assert matrix.max() <= 1 + 1e-6

    def test_what_needs_no_stale_kv_is_the_same_for_every_preparation(self, report):
        names = [
            report.selections.index(name) for name in ("question_full", "decoding", "position", "random")
        ]
        isolated, bare, *others = report.preparations
        for a in names:
            for b in names:
                assert all(isolated.overlap[a][b] == other.overlap[a][b] for other in (bare, *others))
        stale = report.selections.index("question_stale")
        assert values(isolated.overlap[stale]) != values(bare.overlap[stale])

    def test_no_factor_leaves_less_loss_than_the_ideal_one(self, report):
        for preparation in report.preparations:
            ideal, *others = (values(row) for row in preparation.factor_loss)
            for row in (*others, *map(values, preparation.selection_loss)):
                assert all(best <= one + 1e-9 for best, one in zip(ideal, row, strict=True))
            assert ideal == sorted(ideal, reverse=True)

    def test_position_selects_the_heads_of_chunks(self, report):
        place = report.selections.index("position")
        shares = report.preparations[0].depths[place]
        assert sum(values(shares[:3])) == pytest.approx(1)
        assert all(share > 0 for share in values(report.preparations[0].chunks[place]))

    def test_places_and_agreements_have_intervals(self, report):
        first = report.preparations[0]
        found = [*first.depths, *first.chunks, *first.agreement, first.of_optimal]
        for one in [estimate for row in found for estimate in row]:
            assert one.low <= one.high
        random = first.depths[report.selections.index("random")]
        assert any(one.low < one.value < one.high for one in random)
        assert any(one.low < one.high for row in first.agreement for one in row)

    def test_kv_deviates_from_the_second_layer_and_the_second_isolated_chunk_on(self, report):
        isolated, bare, *others = (preparation.deviation for preparation in report.preparations)
        for deviation in (isolated, bare, *others):
            assert deviation.relative[0].value == pytest.approx(0, abs=1e-9)
            assert all(value > 1e-4 for value in values(deviation.relative[1:]))
            assert all(0 < value < 1 for value in values(deviation.left[1:]))
        assert isolated.chunks[0].value == pytest.approx(0, abs=1e-6)
        assert bare.chunks[0].value > 1e-3

    def test_layers_are_separate_and_compared_between_tasks(self, report, adapter):
        layers = report.preparations[0].layers
        assert [(task.task, task.samples) for task in layers] == [
            ("overall", 4),
            ("single", 2),
            ("twohop", 2),
        ]
        overall, single, twohop = (torch.tensor([values(row) for row in task.curves]) for task in layers)
        assert overall.shape == (len(report.layer_curves), adapter.geometry.layers)
        torch.testing.assert_close(overall, (single + twohop) / 2)
        agreement = report.preparations[0].agreement
        assert agreement[0][1] == agreement[1][0]
        assert all(-1 <= value <= 1 + 1e-9 for row in agreement for value in values(row))

    def test_recomputing_everything_answers_as_full_attention(self, report):
        assert report.answers is not None
        assert all(row[1].value == pytest.approx(0, abs=1e-6) for row in report.answers.kl)
        assert all(row[1].value == report.answers.full_score.value for row in report.answers.score)
        assert report.answers.stale_kl.value > 1e-4

    def test_a_preparation_may_be_given_as_such(self, report, adapter, tmp_path):
        again = analyse(adapter, tmp_path, SAMPLES, preparations={"isolated": Isolated()})
        assert again.preparations[0].factor_loss == report.preparations[0].factor_loss
        assert again.answers is None
        assert again.auxiliary is None

    def test_too_long_prompts_are_left_out_and_counted(self, adapter, tmp_path):
        found = analyse(adapter, tmp_path, [SAMPLES[0], sample("E", new_tokens=500)])
        assert (found.samples, found.left_out) == (1, 1)
        assert "1, 1 left out" in "\n".join(lines_of(sweep_table({"one": found})))

    def test_the_store_is_left_empty(self, adapter, tmp_path):
        seen = []
        analyse(adapter, tmp_path, SAMPLES[:1], progress=lambda *told: seen.append(told))
        with kvweave.ChunkStore(tmp_path) as store:
            assert store.stats().entries == 0
        assert seen == [("prompts", 1, 1)]


@pytest.mark.parametrize(
    ("samples", "options", "error", "words"),
    [
        ([], {}, InvalidRequest, "0 samples"),
        (SAMPLES, {"ratio": 0.0}, InvalidRequest, "ratios above 0"),
        (SAMPLES, {"answered_ratios": (1.5,)}, InvalidRequest, "ratios above 0"),
        ([sample("E", chunks=())], {}, InvalidRequest, "no context"),
        ([sample("E", new_tokens=500)], {}, PromptTooLong, "none of the 1 prompts fits"),
    ],
)
def test_impossible_analyses_are_refused(adapter, tmp_path, samples, options, error, words):
    with pytest.raises(error, match=words):
        analyse(adapter, tmp_path, samples, **options)


def test_given_scores_choose_stale_rows_only(adapter, tmp_path):
    tokens = render(adapter, SAMPLES[0])
    first, second = tokens.spans[1:3]
    recipe = replace(
        recipe_named("reuse"), select=TopScores(KnownScores(torch.arange(500.0), start=first.start))
    )
    with kvweave.ChunkStore(tmp_path) as store:
        kvweave.prepare(adapter, store, SAMPLES[0].chunks)
        selected = run(recipe, adapter, store, tokens, ratio=0.1).selected.tolist()
    last = tokens.spans[-2]
    assert selected == list(range(last.end - len(selected), last.end))
    assert second.start < selected[0]


class TestAuxiliary:
    def test_the_same_tokens_keep_their_scores(self, adapter):
        chunks = ("the inn – größer", *CHUNKS)
        offsets = context_offsets(adapter.template, chunks)
        prompt = render(adapter, sample("E", chunks=chunks))
        assert offsets is not None
        assert len(offsets) == context_of(prompt).tokens
        scores = torch.rand(len(offsets), generator=torch.Generator().manual_seed(0))
        carried = transfer_scores(scores, offsets, offsets, sum(len(text) + 2 for text in chunks))
        whole = torch.tensor([offsets.count(offset) == 1 for offset in offsets])
        torch.testing.assert_close(carried[whole], scores.double()[whole])
        assert carried.sum().item() == pytest.approx(scores.double().sum().item())

    def test_a_model_foresees_itself(self, adapter):
        full = observe_full(adapter, render(adapter, SAMPLES[0]), 1)
        found = align(adapter, adapter, SAMPLES[0], full)
        assert found is not None
        assert found.kl == pytest.approx(0, abs=1e-6)
        assert found.jaccard == 1
        assert found.own_kl > 1e-3
        assert found.own_jaccard < 1

    def test_prompts_that_cannot_be_laid_side_by_side_are_counted(self, adapter, tmp_path, monkeypatch):
        other = tiny_adapter()
        real = other.template.chunk_offsets
        monkeypatch.setattr(
            other.template, "chunk_offsets", lambda text: None if text == CHUNKS[2] else real(text)
        )
        some = analyse(adapter, tmp_path, [SAMPLES[0], SAMPLES[3]], auxiliary=other).auxiliary
        assert some is not None
        assert (some.samples, some.left_out) == (1, 1)
        assert analyse(adapter, tmp_path, SAMPLES[:1], auxiliary=other).auxiliary is None

    def test_prompts_that_do_not_fit_the_auxiliary_model_are_counted(self, adapter, tmp_path, monkeypatch):
        other = tiny_adapter("qwen3", seed=3)
        room = max(render(other, SAMPLES[place]).tokens for place in (0, 3)) - 1
        monkeypatch.setattr(other, "geometry", replace(other.geometry, context_tokens=room))
        found = analyse(adapter, tmp_path, [SAMPLES[0], SAMPLES[3]], auxiliary=other).auxiliary
        assert (found.samples, found.left_out) == (1, 1)

    def test_differences_are_paired(self, report):
        found = report.auxiliary
        assert found.kl_difference.value == pytest.approx(found.kl.value - found.own_kl.value)
        assert found.jaccard_difference.value == pytest.approx(found.jaccard.value - found.own_jaccard.value)
        assert found.kl_difference.low <= found.kl_difference.value <= found.kl_difference.high
        text = "\n".join(lines_of(tables(report)[-1]))
        assert f"{found.kl_difference.value:.2f}".lstrip("-0") in text

    def test_the_report_has_both_sides(self, report):
        found = report.auxiliary
        assert (found.samples, found.left_out) == (4, 0)
        assert 0 < found.kl.value < 20
        assert 0 < found.own_kl.value < 20
        assert 0 <= found.jaccard.value <= 1


class TestOutput:
    def test_every_table_prints_and_names_what_it_compares(self, report):
        found = tables(report)
        text = "\n".join(line for table in found for line in lines_of(table))
        for name in (*report.selections, *report.factors, *report.tasks, "isolated", "bare", "tiny-qwen3"):
            assert name in text
        assert len(found) == len({str(table.title) for table in found})

    def test_a_sweep_has_a_column_for_every_report(self, report):
        text = "\n".join(lines_of(sweep_table({"chunks of 64": report, "chunks of 128": report})))
        assert "chunks of 64" in text
        assert "chunks of 128" in text
        assert f"{report.context_tokens:.0f}" in text

    def test_files_hold_the_report_and_its_figures(self, report, tmp_path):
        written = write_selection(tmp_path / "new" / "folder", report)
        assert json.loads(written[0].read_text()) == json.loads(json.dumps(facts(report)))
        assert len(written) == 9
        assert all(path.read_bytes().startswith(b"\x89PNG") for path in written[1:])

    def test_a_sweep_is_written_too(self, report, tmp_path):
        data, picture = write_sweep(tmp_path, {"64": report, "128": report})
        assert list(json.loads(data.read_text())) == ["64", "128"]
        assert picture.read_bytes().startswith(b"\x89PNG")

    @pytest.mark.usefixtures("undrawn")
    def test_files_of_an_earlier_report_are_deleted(self, report, tmp_path):
        write_sweep(tmp_path, {"64": report})
        write_selection(tmp_path, report)
        written = write_selection(tmp_path, replace(report, answers=None))
        assert sorted(tmp_path.iterdir()) == sorted(written)
        assert len(written) == 8

    @pytest.mark.usefixtures("undrawn")
    def test_a_folder_that_is_a_file_is_refused(self, report, tmp_path):
        (tmp_path / "file").write_text("")
        with pytest.raises(InvalidRequest, match=r"cannot be written to .*; name another --output"):
            write_selection(tmp_path / "file", report)


def lines_of(table) -> list[str]:
    console = Console(width=200)
    with console.capture() as captured:
        console.print(table)
    return captured.get().splitlines()
