"""Prompts through recipes, on a tiny model."""

import gc
from dataclasses import replace

import pytest
import torch

from kvweave.errors import PromptTooLong
from kvweave.recipes.methods import METHODS, recipe_named
from kvweave.testing import tiny_adapter
from kvweave.types import Prompt
from kvweave_lab.eval.outcomes import OutcomeLog
from kvweave_lab.eval.runner import Candidate, Runner
from kvweave_lab.eval.samples import Sample

SAMPLE = Sample(
    name="here/0",
    task="here",
    chunks=("The inn is in the north.", "There is rain on the river.", "The road then leads on."),
    question="Where is the inn?",
    answers=("north",),
    metric="string_match_all",
    max_new_tokens=4,
)


@pytest.fixture(scope="module")
def adapter():
    return tiny_adapter()


@pytest.fixture
def runner(adapter):
    """A runner with its own log in memory."""
    return Runner(adapter, OutcomeLog(None, {}))


def run(runner, *candidates, sample=SAMPLE):
    """Outcomes by label, `(recipe, ratio)` as candidates."""
    chosen = [Candidate(recipe_named(name), ratio) for name, ratio in candidates]
    outcomes = list(runner.outcomes(sample, chosen, context_tokens=64, seed=7))
    assert [(o.recipe, o.ratio) for o in outcomes] == [("full", 1.0), *candidates]
    return {(outcome.recipe, outcome.ratio): outcome for outcome in outcomes}


def tokens(adapter, sample=SAMPLE):
    return adapter.template.render(Prompt(sample.question, sample.chunks))


OTHERS = [name for name in METHODS if name != "full"]


@pytest.fixture(scope="module")
def in_both_orders(adapter):
    """Outcomes of all recipes one after another, forwards and backwards: each ran after every other one in one of them."""
    return [
        run(Runner(adapter, OutcomeLog(None, {})), *((name, 0.0) for name in order))
        for order in (OTHERS, OTHERS[::-1])
    ]


@pytest.mark.parametrize("name", OTHERS)
class TestEveryRecipe:
    def test_recomputing_everything_is_full_attention(self, name, runner):
        outcomes = run(runner, (name, 1.0))
        full, outcome = outcomes["full", 1.0], outcomes[name, 1.0]
        assert outcome.agreement
        assert outcome.kl < 1e-6
        assert (outcome.answer, outcome.score) == (full.answer, full.score)

    def test_a_trace_adds_up_to_the_prompt(self, name, runner, adapter):
        outcomes = run(runner, (name, 0.0), (name, 1.0))
        for ratio in (0.0, 1.0):
            trace = outcomes[name, ratio].trace
            assert trace.exact + trace.stale + trace.fresh == tokens(adapter).tokens
            assert trace.recomputed <= trace.exact + trace.stale
            assert trace.decoded <= SAMPLE.max_new_tokens

    def test_what_ran_before_changes_nothing(self, name, runner, in_both_orders):
        alone = run(runner, (name, 0.0))[name, 0.0]
        assert [outcomes[name, 0.0] for outcomes in in_both_orders] == [alone, alone]


def test_full_attention_is_compared_with_itself(runner, adapter):
    outcome = run(runner)["full", 1.0]
    assert (outcome.agreement, outcome.kl, outcome.selection) == (True, 0.0, None)
    trace = outcome.trace
    assert (trace.exact, trace.stale, trace.recomputed, trace.fresh) == (0, 0, 0, tokens(adapter).tokens)


def test_full_attentions_answer_is_the_models(runner, adapter):
    ids = torch.tensor([tokens(adapter).token_ids])
    generated = adapter.model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False, pad_token_id=0
    )
    answer = adapter.tokenizer.decode(generated[0, ids.shape[1] :], skip_special_tokens=True).strip()
    assert run(runner)["full", 1.0].answer == answer


def test_reuse_diverges_and_reports_the_origins_of_its_tokens(runner, adapter):
    outcome = run(runner, ("reuse", 0.0))["reuse", 0.0]
    assert outcome.kl > 1e-3
    system, one, two, three, question = (span.tokens for span in tokens(adapter).spans)
    trace = outcome.trace
    # The first chunk comes after exactly the text that it was prepared after.
    assert (trace.exact, trace.stale, trace.fresh) == (system + one, two + three, question)
    assert trace.recomputed == 0


def test_rows_are_the_context_tokens_that_were_computed(runner, adapter):
    outcomes = run(runner, ("reuse", 0.0), ("naive", 0.0), ("prefix", 0.0), ("reuse", 1.0))
    context = sum(span.tokens for span in tokens(adapter).spans[1:-1])
    assert [outcome.rows for outcome in outcomes.values()] == [context, 0, 0, context, context]


class Chooses:
    """Selects given places among the stale rows."""

    selective = supports_coverage = True
    extractors = ()

    def __init__(self, places):
        self._places = places

    def choose(self, state):
        return state.stale[self._places]


class TestSelection:
    @staticmethod
    def selection(runner, places):
        recipe = replace(recipe_named("reuse"), name=f"chooses {places}", select=Chooses(places))
        *_, outcome = runner.outcomes(SAMPLE, [Candidate(recipe, 0.5)], 64, 7)
        assert outcome.rows == len(places)
        return outcome.selection

    def test_every_stale_row_alone_is_best_just_once(self, runner, adapter):
        """Exact rows are never selected, even if the question attends to them."""
        _, _, two, three, _ = (span.tokens for span in tokens(adapter).spans)
        alone = [self.selection(runner, [place]) for place in range(two + three)]
        assert sorted(alone) == [0.0] * (two + three - 1) + [1.0]

    def test_all_stale_rows_are_all_the_best(self, runner, adapter):
        _, _, two, three, _ = (span.tokens for span in tokens(adapter).spans)
        assert self.selection(runner, list(range(two + three))) == 1.0
        assert run(runner, ("reuse", 1.0))["reuse", 1.0].selection == 1.0

    def test_nothing_stale_recomputed_has_no_share(self, runner):
        one_chunk = replace(SAMPLE, name="here/2", chunks=SAMPLE.chunks[:1])  # exact after the system prefix
        found = run(runner, ("reuse", 0.0), ("reuse", 1.0), sample=one_chunk)
        assert [outcome.selection for outcome in found.values()] == [None] * 3


def test_a_coverage_reports_the_share_it_selected_and_no_ratio(runner, adapter):
    recipe = recipe_named("prophetkv")
    asked = [Candidate(recipe, None, 0.4), Candidate(recipe, 1.0), Candidate(recipe, 0.4)]
    _, by_coverage, everything, by_ratio = runner.outcomes(SAMPLE, asked, 64, 7)
    assert by_coverage.label == ("prophetkv", None, 0.4)
    assert by_ratio.label == ("prophetkv", 0.4, None)
    stale = by_coverage.trace.stale
    assert by_coverage.rows == by_coverage.trace.recomputed != by_ratio.rows == -(-2 * stale // 5)
    assert 0 < by_coverage.rows < everything.rows


def test_an_outcome_has_its_cost(runner):
    outcomes = run(runner, ("reuse", 0.0)).values()
    assert all(outcome.took_s > 0 for outcome in outcomes)


def test_an_outcome_has_its_prompt_and_recipe(runner):
    outcome = run(runner)["full", 1.0]
    assert (outcome.task, outcome.sample, outcome.context_tokens, outcome.seed) == ("here", "here/0", 64, 7)


def test_answers_are_scored_and_judged(adapter):
    class Doubtful:
        name = "doubtful"

        def share(self, answer, chunks):
            assert chunks == SAMPLE.chunks
            return 0.25

    runner = Runner(adapter, OutcomeLog(None, {}), Doubtful())
    answer = run(runner)["full", 1.0].answer
    for number, (answers, score) in enumerate([(("no", answer), 1.0), (("no",), 0.0)]):
        asked = replace(SAMPLE, name=f"here/1/{number}", metric="exact_match", answers=answers)
        outcome = run(runner, sample=asked)["full", 1.0]
        assert (outcome.score, outcome.faithfulness) == (score, 0.25)


class TestResuming:
    CANDIDATES = (("reuse", 0.0), ("naive", 0.0), ("prefix", 0.0), ("reuse", 1.0))

    def test_outcomes_in_the_log_are_not_computed_again(self, runner, monkeypatch):
        first = run(runner, *self.CANDIDATES)
        monkeypatch.setattr(type(runner.adapter), "compute", _never)
        assert run(runner, *self.CANDIDATES) == first
        assert run(runner, self.CANDIDATES[1]) == {
            label: first[label] for label in (("full", 1.0), ("naive", 0.0))
        }

    def test_a_resumed_run_gives_what_an_unbroken_one_gives(self, runner, adapter, tmp_path):
        unbroken = run(runner, *self.CANDIDATES)
        for number in range(len(self.CANDIDATES)):
            with OutcomeLog(tmp_path / str(number), {}) as log:
                run(Runner(adapter, log), *self.CANDIDATES[:number])
            with OutcomeLog(tmp_path / str(number), {}) as log:
                assert run(Runner(adapter, log), *self.CANDIDATES) == unbroken

    def test_stopping_early_keeps_finished_outcomes(self, adapter, monkeypatch):
        runner = Runner(adapter, OutcomeLog(None, {}), batch=2)
        prefilled = runner.prefill

        def stops(candidate, *others):
            if candidate.label == ("prefix", 0.0, None):  # the first of the second batch
                raise KeyboardInterrupt
            return prefilled(candidate, *others)

        monkeypatch.setattr(runner, "prefill", stops)
        with pytest.raises(KeyboardInterrupt):
            run(runner, *self.CANDIDATES)
        monkeypatch.setattr(type(adapter), "compute", _never)
        assert set(run(runner, *self.CANDIDATES[:2])) == {("full", 1.0), *self.CANDIDATES[:2]}

    def test_a_batch_gives_what_one_by_one_gives(self, adapter):
        alone, together = (
            run(Runner(adapter, OutcomeLog(None, {}), batch=batch), *self.CANDIDATES) for batch in (1, 3)
        )
        assert together == alone


def test_nothing_is_warm_for_the_next_prompt(runner, adapter):
    second = replace(SAMPLE, name="here/1", chunks=(SAMPLE.chunks[0], SAMPLE.chunks[2]))
    run(runner, ("reuse", 0.0), ("prefix", 0.0))
    after = run(runner, ("prefix", 0.0), ("reuse", 0.0), sample=second)
    fresh = Runner(adapter, OutcomeLog(None, {}))
    assert run(fresh, ("prefix", 0.0), ("reuse", 0.0), sample=second) == after


def test_recipes_with_the_same_preparation_share_prepared_kv(runner, adapter, monkeypatch):
    """Also with other recipes between them. The system prefix is the same for every prompt."""
    encoded = []
    encode = type(adapter).encode
    monkeypatch.setattr(
        type(adapter),
        "encode",
        lambda self, ids, *before: encoded.append(ids) or encode(self, ids, *before),
    )
    run(runner, ("reuse", 0.0), ("naive", 0.0), ("reuse", 1.0), ("direct", 0.0))
    chunks = len(SAMPLE.chunks)
    assert len(encoded) == 1 + 2 * chunks  # after the system prefix, and bare
    run(runner, ("naive", 0.0), sample=replace(SAMPLE, name="here/1"))
    assert len(encoded) == 1 + 3 * chunks


def test_a_prompt_that_leaves_no_context_for_its_answer_is_refused(runner, adapter):
    room = adapter.geometry.context_tokens - tokens(adapter).tokens
    run(runner, sample=replace(SAMPLE, max_new_tokens=room))
    with pytest.raises(PromptTooLong, match=f"^here/1: .*the answer may take {room + 1}: 1 more than"):
        run(runner, sample=replace(SAMPLE, name="here/1", max_new_tokens=room + 1))


def _never(*args, **kwargs):
    raise AssertionError("the model was asked again")


def test_nothing_of_a_prompt_is_held_once_it_is_answered(runner):
    """Not even until Python looks for cycles, which it does the more rarely the larger the process is."""
    everything = [
        (name, 0.2 if make().select.selective else 0.0) for name, make in METHODS.items() if name != "full"
    ]
    run(runner, *everything)  # KV that is kept for all prompts is computed by now
    gc.collect()
    gc.disable()
    try:
        before = tensor_bytes()
        run(runner, *everything, sample=replace(SAMPLE, name="here/1"))
        assert tensor_bytes() == before
    finally:
        gc.enable()


def tensor_bytes() -> int:
    """Of all tensors in this process that Python knows."""
    storages = {
        held.untyped_storage().data_ptr(): held.untyped_storage().nbytes()
        for held in gc.get_objects()
        if type(held) is torch.Tensor
    }
    return sum(storages.values())
