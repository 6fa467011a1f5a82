"""Recipes on natural prompts: exact against plain transformers, resumable, and the rows made of the outcomes."""

import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from kvweave.errors import InvalidRequest, PromptTooLong
from kvweave.kvstore.chunk_store import ChunkStore
from kvweave.kvstore.memory_store import MemoryStore
from kvweave.recipes.methods import recipe_named
from kvweave.recipes.recipe import run
from kvweave.testing import tiny_adapter
from kvweave_lab.eval.natural.fallback import MARGINS, fallbacks
from kvweave_lab.eval.natural.measure import NaturalRunner, reference_ids
from kvweave_lab.eval.natural.outcomes import (
    FULL_LABEL,
    NO_CONTEXT_LABEL,
    REUSE_LABEL,
    NaturalLog,
    NaturalOutcome,
)
from kvweave_lab.eval.natural.prompts import make_prompt, no_context
from kvweave_lab.eval.natural.rows import comparisons, gap, summary_rows
from kvweave_lab.eval.natural.run import NaturalBenchmark, Request, chosen_candidates, read_request_set
from kvweave_lab.eval.preparation import prepare_prompt
from kvweave_lab.eval.replies import generate_together
from kvweave_lab.eval.runner import Candidate
from lab_support.natural_set import QUESTIONS, WordEncoder, library_of, write_set

REUSE = Candidate(recipe_named("reuse"), 0.0)


@pytest.fixture(scope="module")
def adapter():
    return tiny_adapter()


@pytest.fixture(scope="module")
def found(adapter, tmp_path_factory):
    return library_of(tmp_path_factory.mktemp("library"), adapter)


@pytest.fixture(scope="module")
def prompt(adapter, found):
    content, library = found
    return make_prompt(adapter, library, content.questions[2], 64, None)


@pytest.fixture
def runner(adapter, found):
    _, library = found
    return NaturalRunner(adapter, library.corpus(adapter.template), NaturalLog(None, {}), answers=8)


def plain_logits(adapter, tokens, reference):
    """The logits at each token of the reference answer, from the model alone."""
    ids = torch.tensor([[*tokens.token_ids, *reference]])
    with torch.inference_mode():
        logits = adapter.model(ids, use_cache=False).logits[0]
    return logits[tokens.tokens - 1 : -1].double().log_softmax(-1)


def outcomes(runner, prompt, *candidates):
    return {outcome.label: outcome for outcome in runner.outcomes(prompt, candidates)}


def test_likelihoods_are_those_of_plain_transformers(adapter, runner, prompt):
    done = outcomes(runner, prompt)
    reference = reference_ids(adapter, prompt)
    assert adapter.template.decode(reference).strip() == "Osgood"
    alone = no_context(adapter, prompt.question, None)
    columns = torch.arange(len(reference))
    right = plain_logits(adapter, prompt.tokens, reference)
    other = plain_logits(adapter, alone, reference)
    full, without = done[FULL_LABEL], done[NO_CONTEXT_LABEL]
    assert full.nll == pytest.approx(-float(right[columns, reference].mean()), abs=1e-5)
    assert without.nll == pytest.approx(-float(other[columns, reference].mean()), abs=1e-5)
    divergence = (right.exp() * (right - other)).sum(-1)
    assert without.kl == pytest.approx(float(divergence.mean()), abs=1e-5)
    assert without.first_kl == pytest.approx(float(divergence[0]), abs=1e-5)
    assert full.kl == full.first_kl == 0
    assert full.same_first


def test_rounded_weights_are_compared_as_plain_transformers_computes_them(adapter, found, prompt):
    _, library = found
    rounded, log = tiny_adapter(dtype=torch.bfloat16), NaturalLog(None, {})
    corpus = library.corpus(adapter.template)
    runner = NaturalRunner(adapter, corpus, log, answers=8, rounded={"full, bfloat16 weights": rounded})
    done = list(runner.outcomes(prompt, [REUSE]))
    reference = reference_ids(adapter, prompt)
    right, other = (plain_logits(each, prompt.tokens, reference) for each in (adapter, rounded))
    (found_kl,) = (each.kl for each in done if each.label == ("full, bfloat16 weights", None, None))
    assert found_kl == pytest.approx(float((right.exp() * (right - other)).sum(-1).mean()), rel=0.02)
    assert found_kl > 1e-5
    rows = {row.recipe: row for row in summary_rows(done, {})}
    assert rows["full, bfloat16 weights"].same_answer is not None
    assert rows["full, bfloat16 weights"].rows.value == rows["full"].rows.value


@pytest.mark.parametrize("name", ["cacheblend", "weave", "fusionrag", "cachecraft", "int8+prophetkv"])
def test_recomputing_everything_equals_full_attention(runner, prompt, name):
    done = outcomes(runner, prompt, Candidate(recipe_named(name), 1.0), REUSE)
    assert done[recipe_named(name).name, 1.0, None].kl < 1e-6
    assert done[REUSE_LABEL].kl > 1e-3  # this model's KV depends on what is before it


def test_outcomes_do_not_depend_on_what_ran_before(adapter, found, prompt):
    _, library = found
    names = (
        "direct",
        "bare+prophetkv",
        "following+prophetkv",
        "observed+prophetkv",
        "prophetkv",
        "int8+prophetkv",
    )
    candidates = [Candidate(recipe_named(name), 0.0 if name == "direct" else 0.2) for name in names]
    corpus = library.corpus(adapter.template)

    def together(order):
        return outcomes(NaturalRunner(adapter, corpus, NaturalLog(None, {})), prompt, *order)

    one_by_one = {}
    for candidate in candidates:
        one_by_one |= together([candidate])
    assert together(candidates) == one_by_one == together(candidates[::-1])


def on_disk(folder, **more):
    """Return what opens a store per group of preparations in one folder, as a run does."""
    return lambda group: ChunkStore(folder, namespace=str(zlib.crc32(group.encode())), **more)


def test_kv_of_an_earlier_run_is_used_and_gives_the_same_outcomes(
    adapter, found, prompt, tmp_path, monkeypatch
):
    _, library = found
    corpus = library.corpus(adapter.template)
    names = ("reuse", "weave", "following+prophetkv", "int8+prophetkv", "observed+prophetkv", "cachecraft")
    candidates = [Candidate(recipe_named(name), 0.0 if name == "reuse" else 0.3) for name in names]

    def ran(**more):
        return outcomes(NaturalRunner(adapter, corpus, NaturalLog(None, {}), **more), prompt, *candidates)

    in_memory = ran()
    assert ran(open_store=on_disk(tmp_path)) == in_memory
    monkeypatch.setattr("kvweave.recipes.prepare.Isolated.compute", None)  # nothing may be prepared again
    del candidates[-2:]  # requests are simulated anew for each prompt
    again = ran(open_store=on_disk(tmp_path))
    assert again == {label: in_memory[label] for label in again}


def test_two_runs_share_a_folder_at_once(adapter, found, tmp_path):
    content, library = found
    prompts = [make_prompt(adapter, library, question, 64, None) for question in content.questions[:3]]
    corpus, candidates = library.corpus(adapter.template), [REUSE, Candidate(recipe_named("weave"), 0.2)]

    def ran(_=None):
        runner = NaturalRunner(adapter, corpus, NaturalLog(None, {}), open_store=on_disk(tmp_path))
        return [outcomes(runner, each, *candidates) for each in prompts]

    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(ran, range(2))
    assert one == other


def test_kv_of_a_prompt_that_does_not_fit_is_named(adapter, found, prompt, tmp_path):
    _, library = found
    corpus = library.corpus(adapter.template)
    runner = NaturalRunner(adapter, corpus, NaturalLog(None, {}), open_store=on_disk(tmp_path, limit_bytes=1))
    with pytest.raises(InvalidRequest, match="raise --kv-limit"):
        outcomes(runner, prompt, REUSE)


def test_answers_are_those_that_each_candidate_generates_alone(adapter, found, monkeypatch):
    """Whether they follow full attention's to the end, leave it on the way, or end elsewhere."""
    content, library = found
    corpus = library.corpus(adapter.template)
    monkeypatch.setattr("kvweave_lab.eval.natural.measure.BATCH", 3)
    names = ("reuse", "weave", "prophetkv", "int8+prophetkv", "epic")
    candidates = [
        REUSE,
        *(Candidate(recipe_named(name), ratio) for name in names[1:] for ratio in (0.1, 1.0)),
    ]
    compared = []
    for question in content.questions:
        prompt = make_prompt(adapter, library, question, 64, None)
        runner = NaturalRunner(adapter, corpus, NaturalLog(None, {}), answers=8)
        done = outcomes(runner, prompt, *candidates)

        def alone(candidate, tokens):
            store = MemoryStore()
            prepare_prompt(adapter, store, tokens, candidate.recipe, corpus)
            result = run(candidate.recipe, adapter, store, tokens, ratio=candidate.ratio)
            (reply,) = generate_together(
                adapter, [(result.kv_cache, tokens.token_ids, result.logits)], 8, tokens.reply
            )
            return reply

        full = alone(Candidate(recipe_named("full"), 1.0), prompt.tokens)
        for candidate in candidates:
            reply, mine = alone(candidate, prompt.tokens), done[candidate.label]
            same = list(reply.ids) == list(full.ids) and reply.finish_reason == full.finish_reason
            assert (mine.answer, mine.answer_tokens) == (reply.text.strip(), reply.tokens)
            assert mine.same_answer is same
            assert (mine.same_tokens == full.tokens == reply.tokens) or not same
            assert mine.answer_kl >= 0
            assert (mine.agreed == 1) == same
            compared.append((same, mine.same_tokens))
    assert {same for same, _ in compared} == {True, False}
    assert any(common for same, common in compared if not same)  # some leave it on the way


def test_a_question_without_answer_is_measured_by_the_first_token(adapter, found, runner):
    content, library = found
    unanswerable = make_prompt(adapter, library, content.questions[-1], 64, None)
    done = outcomes(runner, unanswerable, REUSE)
    assert done[REUSE_LABEL].kl == done[REUSE_LABEL].first_kl > 0
    assert done[FULL_LABEL].kl == 0
    assert done[FULL_LABEL].nll < 6  # 320 tokens that are equally likely would have 5.8
    assert done[REUSE_LABEL].f1 is None


def request(tmp_path, **more):
    documents, questions = write_set(tmp_path)
    return Request(
        **{
            "recipes": ("weave", "prophetkv"),
            "ratios": (0.2,),
            "lengths": (64,),
            "chunk_tokens": 16,
            "examples": 0,
            "distractors": 3,
            "documents": documents,
            "questions": questions,
            "index": tmp_path / "index",
            "kv": tmp_path / "kv",
            **more,
        }
    )


def test_a_run_resumes_and_its_rows_compare_at_equal_preparation_and_bytes(adapter, tmp_path, monkeypatch):
    asked = request(
        tmp_path,
        preparations=("isolated", "following"),
        storages=("int8",),
        limit=2,
        against="weave",
        output=tmp_path / "out",
    )
    benchmark = NaturalBenchmark(adapter, asked, read_request_set(asked), WordEncoder())
    done = benchmark.run()
    rows = {row.label: row for row in done.rows}
    assert rows[REUSE_LABEL].kl_recovery.value == 0
    assert rows[FULL_LABEL].kl_recovery.value == 1
    isolated, both = rows["prophetkv", 0.2, None], rows["following+prophetkv", 0.2, None]
    assert isolated.offline_passes == 1
    assert 1.5 < both.offline_passes <= 2
    assert both.bytes_per_token > 1.4 * isolated.bytes_per_token
    assert isolated.bytes_per_token == adapter.geometry.token_bytes
    assert rows["isolated-int8+prophetkv", 0.2, None].bytes_per_token < isolated.bytes_per_token
    equal = {(each.by, each.group, each.recipe, each.against) for each in done.comparisons}
    assert ("own", "exact", "prophetkv", "weave") in equal
    assert ("preparation", "isolated, exact", "prophetkv", "isolated+weave") in equal
    assert ("preparation", "following, int8", "following-int8+prophetkv", "following-int8+weave") in equal
    assert any(by == "bytes" and recipe == "following+prophetkv" for by, _, recipe, _ in equal)
    monkeypatch.setattr(NaturalRunner, "_compute", None)
    again = NaturalBenchmark(adapter, asked, read_request_set(asked), WordEncoder()).run()
    assert again.rows == done.rows


def test_a_run_that_ends_in_time_reports_what_is_done_and_is_continued(adapter, tmp_path, monkeypatch):
    asked = request(tmp_path, recipes=("reuse",), lengths=(64,), output=tmp_path / "out")
    content = read_request_set(asked)
    none = replace(asked, minutes=0.0)
    with pytest.raises(InvalidRequest, match="prompts were not begun within 0 minutes"):
        NaturalBenchmark(adapter, none, content, WordEncoder()).run()
    first = replace(asked, limit=1)
    NaturalBenchmark(adapter, first, content, WordEncoder()).run()
    said = []
    some = NaturalBenchmark(adapter, none, content, WordEncoder()).run(said.append)
    assert {row.prompts for row in some.rows} == {1}
    assert any("the same command with --output continues" in each for each in said)
    done = NaturalBenchmark(adapter, asked, content, WordEncoder()).run()
    assert {row.prompts for row in done.rows} == {3}


def test_a_limit_begins_with_the_same_questions_and_prompts_that_are_too_long_are_counted(adapter, tmp_path):
    asked = request(tmp_path, recipes=(), lengths=(64, 100_000))
    said = []
    benchmark = NaturalBenchmark(adapter, asked, read_request_set(asked), WordEncoder())
    questions = benchmark.questions
    few = replace(asked, limit=1)
    limited = NaturalBenchmark(adapter, few, read_request_set(few), WordEncoder())
    assert limited.questions == questions[:1]
    assert {question.split for question in questions} == {"dev"}
    done = limited.run(said.append)
    assert done.left_out in (0, 1)
    assert {row.recipe for row in done.rows} == {"full", "no context", "reuse"}


def test_what_cannot_run_is_refused(adapter, tmp_path):
    with pytest.raises(InvalidRequest, match="the set has no kind 'easy'; choose from "):
        read_request_set(request(tmp_path, kinds=("easy",)))
    with pytest.raises(InvalidRequest, match=r"write weave:0\.2"):
        chosen_candidates(Request(recipes=("weave:a tenth",)))
    with pytest.raises(InvalidRequest, match="there is no split 'train'"):
        read_request_set(request(tmp_path, split="train"))
    with pytest.raises(InvalidRequest, match="belong together"):
        read_request_set(request(tmp_path, questions=None))
    long = request(tmp_path, examples=3)
    with pytest.raises(PromptTooLong, match="no prompt fits the model"):
        NaturalBenchmark(adapter, long, read_request_set(long), WordEncoder()).run()


def test_any_word_is_a_kind_with_results_of_its_own(adapter, tmp_path):
    (own := tmp_path / "own").mkdir()
    folder, file = write_set(own, [{**each, "kind": "billing"} for each in QUESTIONS if each["answers"]])
    asked = request(tmp_path, documents=folder, questions=file, recipes=(), lengths=(64,), kinds=("billing",))
    done = NaturalBenchmark(adapter, asked, read_request_set(asked), WordEncoder()).run()
    assert {row.prompts for row in done.subsets["billing"]} == {row.prompts for row in done.rows}
    assert set(done.subsets) <= {"all evidence", "billing"}


def test_every_recipe_runs_by_default_and_combined_with_a_preparation():
    labels = {candidate.label for candidate in chosen_candidates(Request(preparations=("isolated",)))}
    assert ("epic", 0.1, None) in labels
    assert ("isolated+weave", 0.3, None) in labels
    assert ("weave", 0.1, None) in labels
    assert not any(recipe == "full" for recipe, _, _ in labels)


def test_a_recipe_with_its_ratio_runs_with_this_one_alone():
    labels = [each.label for each in chosen_candidates(Request(recipes=("weave", "prophetkv:0.2")))]
    assert labels == [
        ("reuse", 0.0, None),
        ("weave", 0.1, None),
        ("weave", 0.3, None),
        ("prophetkv", 0.2, None),
    ]


def outcome(prompt, recipe, ratio, nll, kl, **more):
    fields = {"question": "q", "kind": "within", "context_tokens": 64, "chunk_tokens": 60, "evidence": 1.0}
    return NaturalOutcome(
        prompt=prompt, recipe=recipe, ratio=ratio, coverage=None, nll=nll, first_kl=kl, kl=kl, same_first=True, rows=1,
        **fields, **more,
    )  # fmt: skip


def test_recovery_and_gap_are_ratios_of_means():
    rows = [
        each
        for prompt, harder in (("a", 0.0), ("b", 2.0))
        for each in (
            outcome(
                prompt,
                "full",
                1.0,
                1.0 + harder,
                0.0,
                f1=1.0,
                contains=1.0 - harder / 2,
                ttft_s=2.0,
                full_ttft_s=2.0,
            ),
            outcome(prompt, "no context", None, 5.0 + harder, 3.0, f1=0.0),
            outcome(prompt, "reuse", 0.0, 2.0 + harder, 0.4, f1=0.5),
            outcome(
                prompt,
                "weave",
                0.1,
                1.25 + harder,
                0.1,
                f1=0.75,
                contains=1.0,
                same_answer=not harder,
                ttft_s=1.0,
                full_ttft_s=2.0 + harder,
            ),
            outcome(prompt, "epic", 0.1, 1.5 + harder, 0.2, f1=0.5),
        )
    ]
    summed = summary_rows(rows, {})
    weave = next(row for row in summed if row.recipe == "weave")
    assert weave.nll_recovery.value == pytest.approx(0.75)
    assert weave.kl_recovery.value == pytest.approx(0.75)
    assert weave.nll_pgr.value == pytest.approx(3.75 / 4)
    assert weave.f1_pgr.value == pytest.approx(0.75)
    assert weave.same_answer.value == 0.5  # of the two prompts
    assert (weave.contains.value, weave.kept_right.value) == (1, 1)  # full attention is right once
    assert weave.time.value == pytest.approx(2 / 6)
    assert (
        next(row for row in summed if row.recipe == "epic").same_answer is None
    )  # its answers are not known
    assert [row.recipe for row in gap(summed, 64)] == ["full", "reuse", "no context"]
    (compared,) = [each for each in comparisons(rows, summed, "weave") if each.by == "own"]
    assert compared.nll.value == pytest.approx(0.25)
    assert compared.nll.low == pytest.approx(0.25)  # paired: how hard the prompts are does not count
    assert compared.kl.value == pytest.approx(0.1)
    assert compared.f1.value == pytest.approx(-0.25)


def test_a_fallback_keeps_answers_whose_first_wrong_token_is_not_before_the_first_open_one():
    def weave(prompt, same, *margins):
        times = {"ttft_s": 1.0, "full_ttft_s": 4.0}
        return outcome(prompt, "weave", 0.1, 1.0, 0.1, same_answer=same, margins=margins, **times)

    rows = [
        weave("a", True, 3.0, 0.6, 5.0),
        weave("b", False, 3.0, 0.1),  # another token, which hardly leads
        weave("c", False, 0.3, 3.0),  # another token, which leads, after one that hardly does
        weave("d", False, 3.0),  # another first token, which leads
        outcome("a", "full", 1.0, 1.0, 0.0, same_answer=True),
    ]
    found = {each.margin: each for each in fallbacks(rows)}
    assert set(found) == set(MARGINS)
    assert {margin: each.same_answer.value for margin, each in found.items()} == {
        0.25: 0.5,
        0.5: 0.75,
        1.0: 0.75,
        2.0: 0.75,
    }
    assert [found[margin].fell_back.value for margin in (0.25, 0.5, 1.0)] == [0.25, 0.5, 0.75]
    assert [found[margin].time.value for margin in (0.25, 0.5)] == [4 / 16, (4 + 4) / 16]
    assert found[0.5].prefill.value == pytest.approx((4 + 8) / 16)


def test_margins_are_those_of_the_tokens_before_the_first_wrong_one_and_of_this_one(adapter, runner, prompt):
    full_again = Candidate(recipe_named("cacheblend"), 1.0)
    done = outcomes(runner, prompt, REUSE, full_again)
    reuse, whole = done[REUSE.label], done[full_again.label]
    assert len(reuse.margins) == min(reuse.same_tokens + 1, 8)  # of at most 8 tokens
    assert min(reuse.margins) >= 0
    first, second = plain_logits(adapter, prompt.tokens, (0,))[0].topk(2).values.tolist()
    assert whole.margins[0] == pytest.approx(first - second, abs=1e-3)
