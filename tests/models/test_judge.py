"""The judge of questions: its score is that of a plain full prefill, and its threshold follows from the labelled pairs."""

import json
import re
import threading
from pathlib import Path

import pytest

from kvweave.answer_cache.matching import ENGLISH
from kvweave.state.judge import Judge, JudgeFit, JudgeFits, ScoredPair, labelled_pairs
from kvweave.testing import tiny_adapter
from kvweave.types import Message
from support.oracle import full_prefill, twin

pytestmark = pytest.mark.usefixtures("few_labelled_pairs")

PAIRS = [("Who lends it?", "Who has it?"), ("When?", "Where is it, and why there?")]


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    """Tiny models have room for 512 tokens, most of which are single letters."""
    monkeypatch.setattr("kvweave.state.judge._EXAMPLES", (("Who?", "who", True), ("Why?", "Who?", False)))
    monkeypatch.setattr("kvweave.state.judge._QUESTION", "Same?")


def expected(adapter, judge, one, other):
    """Return the score that plain transformers gives for the whole prompt."""
    (yes, no), ids = judge.answer_ids, judge.prompt_ids(one, other)
    logits = full_prefill(twin(adapter.model), ids, adapter.rotation)[0]
    return float(logits[0, yes] - logits[0, no])


def test_scores_behind_kept_examples_are_those_of_a_full_prefill(adapter, tmp_path):
    judge = Judge(adapter, tmp_path)
    for one, other in [*PAIRS, PAIRS[0]]:
        assert judge.score(one, other) == pytest.approx(expected(adapter, judge, one, other), abs=1e-4)


def test_the_kept_examples_are_computed_once(tmp_path, monkeypatch):
    adapter = tiny_adapter()
    judge, computed, appended = Judge(adapter, tmp_path), [], []
    compute, append = type(adapter).compute, type(adapter).append
    monkeypatch.setattr(
        type(adapter),
        "compute",
        lambda self, kv, ids, plan: computed.append(len(ids)) or compute(self, kv, ids, plan),
    )
    monkeypatch.setattr(
        type(adapter), "append", lambda self, kv, ids: appended.append(len(ids)) or append(self, kv, ids)
    )
    for pair in PAIRS:
        judge.score(*pair)
    assert len(computed) == 1
    assert len(appended) == len(PAIRS)
    assert max(appended) < computed[0]


def test_threads_share_a_judge(tmp_path):
    judge = Judge(tiny_adapter(), tmp_path)
    alone = [judge.score(*pair) for pair in PAIRS]
    found = {}
    threads = [
        threading.Thread(target=lambda n=n: found.setdefault(n, judge.score(*PAIRS[n % 2]))) for n in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[n] for n in range(6)] == pytest.approx(alone * 3, abs=1e-4)


def test_a_question_that_spells_a_control_token_is_scored(tmp_path):
    adapter = tiny_adapter()
    judge = Judge(adapter, tmp_path)
    spelled = (f"{adapter.tokenizer.eos_token} Who?", "Who?")
    assert judge.score(*spelled) == pytest.approx(expected(adapter, judge, *spelled), abs=1e-4)


def test_a_model_whose_yes_is_its_no_does_not_judge(tmp_path, monkeypatch):
    adapter = tiny_adapter()
    render = adapter.template.render_chat
    monkeypatch.setattr(
        adapter.template,
        "render_chat",
        lambda messages: render([Message(role, text.replace("Yes", "No")) for role, text in messages]),
    )
    judge = Judge(adapter, tmp_path)
    assert not judge.can_judge
    fit = judge.fit()
    assert fit.pairs == ()
    assert fit.threshold(0.5) is None
    assert "cannot" in fit.summary(0.5) or "told apart" in fit.summary(0.5)
    assert judge.found == fit  # so that it is not tried again


# The fit


def pairs(same, different):
    return (*(ScoredPair(score, True) for score in same), *(ScoredPair(score, False) for score in different))


def test_the_threshold_keeps_the_expected_share_of_wrong_answers():
    fit = JudgeFit("m", pairs([4.0, 3.0, 1.0, 2.0], [0.0] * 97 + [2.5] * 2), 1.0)
    # Two of 99 look-alikes have more than 1: of 0.2 at most 3/100 are wrong, beside all paraphrases.
    assert fit.threshold(0.006 / 1.006 + 1e-9) == 1.0
    assert (
        fit.threshold(0.006 / 1.006 - 1e-9) == 3.0
    )  # none has more: 0.2 · 1/100 beside half of the paraphrases
    assert fit.threshold(0.002 / 0.502 - 1e-9) is None
    assert fit.threshold(0.5) == 1.0


def test_rejected_answers_count_as_look_alikes():
    fit = JudgeFit("m", pairs([1.0, 2.0, 3.0, 4.0], [0.0] * 99), 1.0)
    assert fit.threshold(0.005) == 1.0
    assert fit.threshold(0.005, [2.5] * 3) == 3.0
    assert fit.threshold(0.005, [4.5]) == 1.0
    assert fit.threshold(0.005, [4.5] * 20) is None


def test_a_judge_that_guesses_serves_nothing():
    fit = JudgeFit("coin", pairs([n % 7 for n in range(98)], [n % 7 for n in range(196)]), 1.0)
    assert fit.auc == pytest.approx(0.5, abs=0.02)
    assert fit.threshold(0.005) is None
    assert "coin does not judge well enough: AUC 0.5" in fit.summary(0.005)


def test_a_fit_is_stored_for_the_model_and_made_once(tmp_path):
    adapter = tiny_adapter()
    judge = Judge(adapter, tmp_path)
    stages = []
    fit = judge.fit(lambda stage, done, total: stages.append((done, total)))
    assert stages[-1] == (5, 5)
    assert len(fit.pairs) == 5
    assert Judge(adapter, tmp_path).found == fit
    assert judge.fit(lambda *stage: pytest.fail("it was fitted again")) == fit
    assert Judge(tiny_adapter(seed=1), tmp_path).found is None  # other weights


def test_a_fit_that_is_stopped_goes_on_where_it_was(tmp_path):
    judge = Judge(tiny_adapter(), tmp_path)
    seen = []

    def stop():
        seen.append(1)
        if len(seen) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        judge.fit(between=stop)
    assert judge.found is None
    assert not list(tmp_path.rglob("*.json"))
    assert len(judge.fit(between=stop).pairs) == 5
    assert len(seen) == 6


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b'{"version": "1"}'])
def test_a_damaged_fit_is_none(tmp_path, content):
    fits = JudgeFits(tmp_path)
    fits.put("a", JudgeFit("m", pairs([1.0], [0.0]), 1.0))
    (path,) = tmp_path.rglob("a.json")
    assert fits.find("a") is not None
    path.write_bytes(content)
    assert fits.find("a") is None


def test_a_fit_of_other_pairs_does_not_count(tmp_path, monkeypatch):
    fits = JudgeFits(tmp_path)
    monkeypatch.setattr("kvweave.state.judge._version", lambda: "earlier")
    fits.put("a", JudgeFit("m", pairs([1.0], [0.0]), 1.0))
    monkeypatch.undo()
    assert fits.find("a") is None


def test_the_labelled_pairs_have_both_labels_in_eighteen_kinds():
    path = Path(__file__).parents[2] / "src/kvweave/state/judged_pairs.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    kinds = {row["kind"]: row["same"] for row in rows}
    assert len(kinds) == 18
    # The judge is asked about no others, and how it does on others says little about these.
    assert all(ENGLISH.compare(row["b"], row["a"], 1.0, 0.0).sameness == "near" for row in rows)
    assert all(row["same"] is kinds[row["kind"]] for row in rows)
    texts = [re.sub(r"\W+", " ", row[side]).casefold() for row in rows for side in "ab"]
    assert len(set(texts)) == len(texts)
    assert sum(same for *_, same in labelled_pairs()) > 80
    assert len(labelled_pairs()) > 230
