"""The rows of single figures of papers: their verdicts follow results, and none is without a reason or a number."""

import importlib
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

pytestmark = pytest.mark.usefixtures("script")


@pytest.fixture
def rows(script):
    return script("figure_rows")


@pytest.fixture
def papers(script):
    return script("claims_page").PAPERS


def stored(name):
    path = ROOT / "lab" / "results" / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def figures(papers):
    return [(paper, figure) for paper, found in papers.items() for figure in found]


def test_every_paper_has_rows_and_every_row_says_something(papers):
    assert list(papers) == ["FusionRAG", "ProphetKV", "CacheClip", "PerCache", "DynaKV"]
    for paper, figure in figures(papers):
        assert re.match(r"(figs?\.|tables?|§)", figure.name), paper
        assert figure.says.endswith("."), figure
        assert isinstance(figure.seen, str) is not callable(figure.seen)
        assert figure.unmeasured in ("not measurable here", "not measured")
    said = [(paper, figure.name, figure.says) for paper, figure in figures(papers)]
    assert len(set(said)) == len(said)


def test_results_give_a_verdict_with_a_model_and_a_number(papers):
    for paper, figure in figures(papers):
        if callable(figure.seen):
            seen = figure.seen(stored)
            assert seen is not None, (paper, figure.name)
            assert seen.held in (True, False, None)
            assert seen.where
            assert re.search(r"\d", seen.numbers)
            assert not re.search(r"(?<!\\)\|", figure.says + seen.where + seen.numbers), "it would end a cell"


def test_without_results_nothing_is_said(papers):
    assert [figure.seen(lambda name: None) for _, figure in figures(papers) if callable(figure.seen)] == [
        None for _, figure in figures(papers) if callable(figure.seen)
    ]


def changed(name, change):
    """Return the stored results, one of them changed in place by a function."""
    found = stored(name)
    change(found)
    return lambda asked: found if asked == name else stored(asked)


def one(papers, paper, name, says=""):
    (figure,) = (each for each in papers[paper] if each.name == name and each.says.startswith(says))
    return figure.seen


def test_verdicts_follow_the_results(papers):
    deviation = one(papers, "FusionRAG", "fig. 7b")
    assert deviation(stored).held is False

    def lower(found):
        found["deviation"]["similar"]["relative"][1] = {"value": 0.001, "low": 0.0009, "high": 0.0011}

    assert deviation(changed("selection", lower)).held is True

    def close(found):
        found["deviation"]["similar"]["relative"][1] = found["deviation"]["isolated"]["relative"][1]

    assert deviation(changed("selection", close)).held is None


def test_fusionrags_rows_follow_its_own_recipe_on_retrieved_text(papers):
    def measured(recovered, low, high):
        def change(found):
            (row,) = (row for row in found["rows"] if row["recipe"] == "fusionrag")
            row |= {"nll_recovery": recovered, "nll_recovery_interval": [low, high]}

        return changed("natural_1k", change)

    quality, parts = (one(papers, "FusionRAG", name) for name in ("figs. 2, 13", "fig. 18"))
    assert quality(stored).label == "held 1, not seen 2"
    assert quality(measured(1.0, 0.9, 1.1)).label == "held 2, not seen 1"
    worse = quality(measured(0.1, 0.0, 0.12))
    assert worse.held is False
    assert worse.numbers.startswith("NLL recovered 0.10 (0.00 to 0.12)")
    assert parts(stored).label == "held 1, not seen 1, the opposite 1"


def test_neighbours_retrieved_together_are_told_at_every_length(papers):
    seen = one(papers, "FusionRAG", "fig. 7a")(stored)
    assert seen.label == "held 1, not seen 2, the opposite 1"
    assert "2,048 tokens: one of ten 0.785" in seen.numbers
    assert "8,192 tokens: one of ten 0.833" in seen.numbers


@pytest.mark.parametrize("name", ["fig. 17 (stride)", "fig. 18 (storage)", "fig. 19"])
def test_one_user_gives_no_verdict(papers, name):
    seen = one(papers, "PerCache", name)
    assert seen(stored).label == "not judged"
    assert seen(stored).held is None
    assert seen(stored).numbers.endswith("No verdict: it is one user")

    def more(found):
        found["about"]["users of further experiments"] = 2

    assert seen(changed("personas", more)).held is True


def test_percache_is_judged_by_its_own_reuse(papers):
    seen = one(papers, "PerCache", "fig. 16a")

    def longer_in(table):
        def change(found):
            (row,) = (
                row
                for row in found["further"]
                if (row["trial"], row["table"], row["answers"], row["decoding"])
                == ("PerCache without KV", table, "long", "token")
            )
            row["mean_s"] = {"value": 30.0, "low": 29.0, "high": 31.0}

        return changed("personas", change)

    assert seen(stored).label == "held 1, not seen 2"
    assert seen(longer_in("B")) == seen(stored)
    assert seen(longer_in("A")).label == "held 2, not seen 1"


def test_a_better_score_from_more_bytes_is_not_judged(papers):
    seen = one(papers, "DynaKV", "fig. 10a")
    assert seen(stored).label == "not judged"
    assert "times the bytes of `static`" in seen(stored).numbers

    def as_few(found):
        for row in found["rows"]:
            row["bytes_per_token"] = 1000.0

    assert (seen(changed("decoding", as_few)).held, seen(changed("decoding", as_few)).label) == (True, "")


def test_another_recipes_time_is_not_judged(papers):
    seen = one(papers, "FusionRAG", "fig. 14a", "The same on a processor")
    assert seen(stored).label == "not judged"

    def timed(found):
        (row,) = (
            row
            for row in found["rows"]
            if (row["context_tokens"], row["recipe"], row["ratio"], row["kv_from"])
            == (27648, "prophetkv", 0.15, "memory")
        )
        found["rows"].append(row | {"recipe": "fusionrag"})

    assert seen(changed("ttft_longest", timed)).held is True


def test_a_verdict_is_removed_only_for_a_reason(rows):
    seen = rows.Seen(True, "here", "0.9", "held 1")
    assert rows.without_verdict(seen, "", "") == seen
    assert rows.without_verdict(seen, "", rows.single(1, "head")) == rows.Seen(
        None, "here", "0.9. No verdict: it is one head", "not judged"
    )
    assert rows.single(2, "head") == ""


def test_every_row_names_the_model_that_it_rests_on(papers, rows):
    places = [figure.seen(stored).where for _, figure in figures(papers) if callable(figure.seen)]
    kinds = [rows.rests_on(where) for where in places]
    assert len(set(kinds)) == 4
    unnamed = [where for where, kind in zip(places, kinds, strict=True) if kind == "no language model"]
    assert all(re.match(r"retrieval on|counted", where) for where in unnamed)


def test_prophetkv_is_best_at_every_chunk_size_on_its_own_task(papers):
    seen = one(papers, "ProphetKV", "fig. 10", "Best")(stored)
    assert (seen.held, seen.label) == (True, "held 3 on `multivalue`")
    assert "`prophetkv` scores lower in 9 of 9 comparisons" in seen.numbers


def test_a_gain_that_is_smaller_than_the_papers_is_not_called_the_opposite(rows):
    assert [rows.reaches(value, 4.0) for value in (5.0, 4.0, 2.0, 1.0, 0.5)] == [
        True,
        True,
        None,
        False,
        False,
    ]
    number = rows.Number
    assert rows.above(number(2, 1, 3), 0.5) is True
    assert rows.above(number(2, 1, 3), number(4, 3.5, 5)) is False
    assert rows.above(number(2, 1, 3), number(4, 2.5, 5)) is None
    assert rows.together([True, None]) is None
    assert rows.together([True, None, False]) is False
    assert rows.together([True, True]) is True


def test_the_page_has_a_line_for_each(papers):
    page = importlib.import_module("claims_page")
    claims = importlib.import_module("papers").CLAIMS
    text = page.claims_page(claims, stored("claims"), [], stored)
    for paper, figure in figures(papers):
        assert f"| {figure.name} | {figure.says} |" in text.partition(f"### {paper}")[2].partition("###")[0]
    assert "Figure by figure" not in page.claims_page(claims, stored("claims"), [])


def test_what_the_worst_tokens_leave_is_that_of_the_second_layer(papers):
    def left(*layers):
        by_layer = [dict(zip(("value", "low", "high"), layer, strict=True)) for layer in layers]
        return lambda asked: (
            {"context_tokens": 517.0, "samples": 200, "left": {"isolated": by_layer, "bare": by_layer}}
            if asked == "deviation_left"
            else None
        )

    seen = one(papers, "FusionRAG", "fig. 3a")
    assert seen(left((0, 0, 0), (0.6, 0.55, 0.65), (0.2, 0.1, 0.3))).held is True
    assert seen(left((0.6, 0.5, 0.7), (0.1, 0.05, 0.2), (0.9, 0.8, 1))).held is False
    assert seen(left((0, 0, 0), (0.5, 0.4, 0.6))).held is None
