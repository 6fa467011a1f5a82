"""What lab/docs/answer-cache.md says of learned matchers and of a reader's predictions follows from the figures."""

import pytest


def counted(count, of):
    return {"count": count, "of": of, "share": count / of, "interval": [0.0, 1.0]}


def rows(hand, *, false_hits):
    """A hand's rows: kvweave, cosine, and one learned matcher that lets so many of 1,000 look-alikes pass."""
    about = {"tested": hand, "hits": counted(30, 100)}
    found = [
        about
        | {"matcher": "kvweave, at once", "rate": None, "threshold_from": "fixed"}
        | {"false_hits": counted(2, 1000)}
    ]
    for matcher, wrong in (("cosine", 0), ("logistic", false_hits)):
        for rate in (0.001, 0.01):
            for chosen, passing in (("others", wrong), ("own", 0)):
                found.append(
                    about
                    | {"matcher": matcher, "rate": rate, "threshold_from": chosen}
                    | {"false_hits": counted(passing, 1000)}
                )
    return found


def result(false_hits):
    sizes = {"paraphrases": 100, "lookalikes": 1000, "reworded_lookalikes": 0}
    return {
        "pairs": {"first": sizes},
        "rows": rows("first", false_hits=false_hits),
        "command": "learned_matcher.py",
        "date": "2026-11-29",
        "commit": "abc",
    }


@pytest.mark.parametrize(
    ("false_hits", "told"),
    [
        (1, "1 of 1 keeps 0.1%, with 30.0% to 30.0% hits"),
        (2, "none of 1 keeps 0.1%: false hits are 0.2% to 0.2%"),
    ],
)
def test_a_matcher_keeps_the_aim_only_if_its_false_hits_do(script, false_hits, told):
    text = script("ceilings_page").learned_matchers(result(false_hits))
    assert told in text
    assert "0 of 1,000 is up to 0.38%, 1 of 1,000 is up to 0.56%" in text
    assert "It takes 2,995 without any false hit" in text


def test_a_matcher_without_a_threshold_has_its_rates_once(script):
    text = script("ceilings_page").learned_matchers(result(1))
    assert "| kvweave, at once | 30.0% / 0.20% |  |  |  |" in text
    assert "| logistic | 30.0% / 0.10% | 30.0% / 0.10% | 30.0% | 30.0% |" in text
