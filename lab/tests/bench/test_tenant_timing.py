"""The experiment that measures tenants' timing: its cases, its AUC and interval. The server is another test's."""

import tomllib
from collections import Counter

import numpy as np
import pytest


@pytest.fixture
def timing(script):
    return script("tenant_timing")


def test_cases_are_balanced_and_in_random_order(timing):
    order = timing.cases(("documents", "chat"), 5, seed=1)
    counted = Counter(order)
    assert set(counted.values()) == {5}
    assert len(counted) == 2 * 2 * 2
    assert order == timing.cases(("documents", "chat"), 5, seed=1)
    assert order != sorted(order, key=lambda case: (case.way, case.before, case.cached))


def test_auc_counts_faster_probes_and_halves_ties(timing):
    assert timing.auc([1, 2], [3, 4]) == 1
    assert timing.auc([3, 4], [1, 2]) == 0
    assert timing.auc([1, 2], [2, 1]) == 0.5
    assert timing.auc([2, 2], [2, 3]) == 0.75


def test_auc_is_scikit_learn_s(timing):
    from sklearn.metrics import roc_auc_score

    draws = np.random.default_rng(0)
    cached, uncached = draws.normal(1, 1, 60).round(1), draws.normal(1.5, 1, 50).round(1)
    expected = roc_auc_score([1] * 60 + [0] * 50, -np.concatenate([cached, uncached]))
    assert timing.auc(cached, uncached) == pytest.approx(expected)


def test_the_interval_covers_chance_when_nothing_leaks_and_not_when_something_does(timing):
    draws = np.random.default_rng(1)
    noise = [draws.normal(1, 0.1, 500).tolist() for _ in range(2)]
    low, high = timing.auc_interval(*noise)
    assert low < 0.5 < high
    assert high - low < 0.1
    low, high = timing.auc_interval(noise[0], [value + 0.05 for value in noise[1]])
    assert low > 0.55


def test_rows_tell_ways_and_senders_apart(timing):
    probes = [
        timing.Probe(case, 1.0 if case.cached and case.before == "attacker" else 2.0)
        for case in timing.cases(("documents",), 4, seed=0)
    ]
    rows = {row["before"]: row for row in timing.summarize(probes)}
    assert (rows["attacker"]["auc"], rows["other"]["auc"]) == (1.0, 0.5)
    assert rows["attacker"]["median_s"] == [1.0, 2.0]
    assert rows["other"]["probes"] == [4, 4]


def test_no_text_is_used_twice_and_tenants_have_their_own_keys(timing, tmp_path):
    class Words:
        def __call__(self, text, **_):
            return {"input_ids": text.split()}

        def decode(self, ids):
            return " ".join(ids)

    texts, warm = timing.Texts(Words(), 30, 100), timing.Texts(Words(), 30, 0)
    used = [text for number in range(20) for text in (*texts.pair(number), *warm.pair(number))]
    assert len(set(used)) == 80
    timing.write_tenants(tmp_path / "tenants.toml")
    written = tomllib.loads((tmp_path / "tenants.toml").read_text())
    assert set(written["tenants"].values()) == set(timing.KEYS.values())
