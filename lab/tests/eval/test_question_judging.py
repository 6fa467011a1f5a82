"""Guard and judge on pairs of questions: what is judged, what is served under which bound, and the pairs that ship."""

import json
from pathlib import Path

import numpy as np
import pytest

import kvweave
from kvweave.config import AnswersConfig
from kvweave.state.judge import Judge, JudgeFit, ScoredPair
from kvweave_lab.eval.question_judging import BOUNDS, judge_pairs, judging_content, judging_table
from kvweave_lab.eval.question_pairs import POOLS, Pair, families, read_pairs
from kvweave_lab.real_models import prepared_folder

ROOT = Path(__file__).parents[3]
SHIPPED = ROOT / "src/kvweave/state/judged_pairs.jsonl"
PEOPLE = ROOT / "lab/src/kvweave_lab/eval/data/questions"
BAND = "Who lends the amplifier to the band?"
GIVEN = "Which person gave the musicians their amplifier?"
TAKEN = "Which person repaired the musicians' old amplifier?"


class SameEncoder:
    """Every question has the same vector."""

    name = "same"

    def encode(self, texts):
        return np.tile(np.array([1, 0], dtype=np.float32), (len(texts), 1))


class FakeJudge:
    """Says yes to GIVEN and to TAKEN, to TAKEN less surely."""

    def __init__(self):
        self.asked = []

    def fit(self, progress):
        same = [ScoredPair(5.0, True)] * 50 + [ScoredPair(2.0, True)] * 50
        return JudgeFit("m", (*same, *[ScoredPair(3.0, False)] * 20, *[ScoredPair(0.0, False)] * 180), 1.0)

    def score(self, one, other):
        self.asked.append(other)
        return {GIVEN: 6.0, TAKEN: 2.5}[other]


PAIRS = [
    Pair("typos", BAND, "Who lends the amplifeir to the band?", True),
    Pair("reworded", BAND, GIVEN, True),
    Pair("part", BAND, TAKEN, False),
    Pair("negation", BAND, "Who does not lend the amplifier to the band?", False),
]


def test_the_judge_is_put_what_the_guard_lets_pass_and_serves_by_bound():
    judge = FakeJudge()
    done = judge_pairs(judge, SameEncoder(), PAIRS)
    assert judge.asked == [GIVEN, TAKEN]
    rows = {row.bound: row for row in done.rows}
    strict, loose = rows[AnswersConfig().answer_error_bound], rows[0.2]
    assert strict.is_default
    assert (strict.threshold, loose.threshold) == (5.0, 2.0)
    assert (strict.hit_rate.value, strict.false_hit_rate.value) == (1.0, 0.0)
    assert (strict.judged_hits, strict.wrong.value) == (1, 0.0)
    assert (loose.judged_hits, loose.wrong.value, loose.false_hit_rate.value) == (2, 0.5, 0.5)
    plain = json.loads(json.dumps(judging_content(done)))
    assert [each["served"]["0.005"] for each in plain["kinds"]] == [1, 1, 0, 0]
    assert [each["judged"] for each in plain["kinds"]] == [0, 1, 1, 0]
    assert judging_table(done).row_count == len(BOUNDS)


def test_a_model_that_cannot_judge_serves_what_is_sure():
    class Mute(FakeJudge):
        def fit(self, progress):
            return JudgeFit("mute", (), 0.0)

    done = judge_pairs(Mute(), SameEncoder(), PAIRS)
    assert all(row.threshold is None and row.judged_hits == 0 and row.wrong is None for row in done.rows)
    assert done.rows[0].hit_rate.value == 0.5


def test_the_page_shows_what_each_measured_model_serves(script):
    page = script("answers_page")
    assert page.judged_questions([None, None]) == "Not measured yet."
    about = {
        "machine": "x86_64",
        "threads": 1,
        "command": "kvweave eval",
        "date": "2026-11-30",
        "commit": "abc",
    }
    judging = judging_content(judge_pairs(FakeJudge(), SameEncoder(), PAIRS))
    shown = page.judged_questions([None, {"about": about, "judging": json.loads(json.dumps(judging))}])
    assert "| m | 0.95 | **2.0%** | 100.0%" in shown
    assert "| m | reworded | 1 | 0 | 1 |" in shown


def words(text):
    return " ".join("".join(each if each.isalnum() else " " for each in text.casefold()).split())


def test_the_pairs_that_ship_share_no_question_with_those_of_the_lab():
    shipped = {words(text) for pair in read_pairs(SHIPPED) for text in (pair.cached, pair.asked)}
    lab = {
        words(text)
        for path in PEOPLE.glob("*.jsonl")
        for pair in read_pairs(path)
        for text in (pair.cached, pair.asked)
    }
    lab |= {words(text) for pool in POOLS for family in families(pool) for text in family.phrasings}
    assert not shipped & lab


@pytest.mark.parametrize("real_model", ["qwen2.5-coder-0.5b"], indirect=True)
def test_a_real_model_tells_the_same_question_from_another(real_model, tmp_path):
    """A coin would order half of these pairs rightly."""
    judge = Judge(
        kvweave.load_model(str(prepared_folder(real_model)), dtype="float32", device="cpu"), tmp_path
    )
    assert judge.can_judge
    asked = "When does the night bus to the airfield leave?"
    same = [judge.score(asked, other) for other in (asked, "When does the night bus leave for the airfield?")]
    others = ("Who drives the night bus to the airfield?", "What did the goat eat for breakfast?")
    assert min(same) > max(judge.score(asked, other) for other in others)
