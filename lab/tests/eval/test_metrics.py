"""Scores against values worked out by hand from the published definitions."""

import logging
import sys
from types import SimpleNamespace

import pytest

from kvweave.errors import InvalidRequest
from kvweave_lab.eval import metrics as scoring
from kvweave_lab.eval import metrics as similarity
from kvweave_lab.eval.metrics import METRICS, ContainedFacts, bleu, facts, with_classes


@pytest.fixture
def by_character(monkeypatch):
    """Chinese text is compared by characters where jieba is not installed."""
    monkeypatch.setitem(sys.modules, "jieba", None)
    similarity.segmenter.cache_clear()
    yield
    similarity.segmenter.cache_clear()


@pytest.mark.parametrize(
    ("prediction", "references", "all_of", "part_of"),
    [
        ("The numbers are 4417 and 9023.", ["4417", "9023"], 1.0, 1.0),
        ("It is 4417.", ["4417", "9023"], 0.5, 1.0),
        ("paris", ["Paris", "Lyon", "Nice", "Lille"], 0.25, 1.0),
        ("none of them", ["4417", "9023"], 0.0, 0.0),
        ("red\tcar", ["red\ncar"], 1.0, 1.0),  # RULER turns control characters into line ends
    ],
)
def test_ruler_counts_the_references_that_the_answer_contains(prediction, references, all_of, part_of):
    assert METRICS["string_match_all"](prediction, references) == all_of
    assert METRICS["string_match_part"](prediction, references) == part_of


@pytest.mark.parametrize(
    ("prediction", "references", "score"),
    [
        ("Brenek 4417, Toulia 9023.", ["4417", "9023"], 1.0),
        ("Brenek 14417, Toulia 9023", ["4417", "9023"], 0.5),  # RULER's containment would count it
        ("lanterns, kettle-drum", ["lantern", "kettle"], 0.0),
        ("Kettle\nLANTERN", ["lantern", "kettle"], 1.0),
        ("It is (c3).", ["C3", "c"], 0.5),
        ("", ["kettle"], 0.0),
    ],
)
def test_references_that_the_answer_contains_as_whole_words(prediction, references, score):
    assert METRICS["words_match_all"](prediction, references) == score


@pytest.mark.parametrize(
    ("prediction", "score"),
    [
        ("Brenek, kettle", 1.0),
        ("kettle", 1.0),
        ("It is the kettle now.", 1.0),
        ("kettle, lantern", 0.0),
        ("lantern, kettles", 0.0),
        ("kettle,", 0.0),
    ],
)
def test_steps_before_the_last_comma_are_not_judged(prediction, score):
    assert METRICS["words_match_last"](prediction, ["kettle"]) == score


_UUID = "550e8400-e29b-41d4-a716-446655440000"


@pytest.mark.parametrize(
    ("prediction", "reference", "score"),
    [
        (_UUID, _UUID, 1.0),
        (f"{_UUID.upper()}.", _UUID, 1.0),
        (_UUID[:-1], _UUID, 0.0),
        (_UUID.replace("a", "b"), _UUID, 0.0),
        (_UUID.replace("-a716", ""), _UUID, 0.0),
        ("4417201.", "4417201", 1.0),
        ("44172011", "4417201", 0.0),
        ("4417201, 9023117", "4417201", 0.0),
        ("417201", "4417201", 0.0),
    ],
)
def test_exact_match_tells_generated_values_apart(prediction, reference, score):
    assert METRICS["exact_match"](prediction, [reference]) == score


@pytest.mark.parametrize(
    ("prediction", "references", "score"),
    [
        ("The Cat!", ["cat"], 1.0),
        ("cats", ["cat"], 0.0),
        ("New  York", ["Boston", "new york."], 1.0),
        ("a theatre", ["Theatre"], 1.0),
        ("an other", ["another"], 0.0),
    ],
)
def test_exact_match_sees_past_case_punctuation_articles_and_spaces(prediction, references, score):
    assert METRICS["exact_match"](prediction, references) == score


@pytest.mark.parametrize(
    ("prediction", "references", "score"),
    [
        ("The cat sat.", ["a cat sat down"], 0.8),  # precision 2/2, recall 2/3
        ("cat cat", ["cat"], 2 / 3),  # precision 1/2, recall 1
        ("red and blue", ["green", "blue", "red blue"], 0.8),  # best: precision 2/3, recall 1
        ("it's", ["its"], 1.0),
        ("the", ["a"], 0.0),  # nothing is left of either
        ("", ["cat"], 0.0),
    ],
)
def test_f1_is_squads_over_the_best_reference(prediction, references, score):
    assert METRICS["f1"](prediction, references) == pytest.approx(score)


@pytest.mark.parametrize(
    ("prediction", "references", "score"),
    [
        ("the cat sat", ["the cat ran fast"], 4 / 7),  # precision 2/3, recall 2/4
        ("b a", ["a b"], 0.5),  # one word in common order
        ("Cat", ["cat"], 0.0),  # case counts
        ("no no no yes", ["no yes"], 1.0),  # a word counts once, however often it occurs
        ("a b. c d", ["c d. a b"], 1.0),  # every sentence is compared with every one
        ("y z x x", ["x x y z"], 2 / 3),  # of two longest subsequences the one that ends the reference
        ("a b", ["c", "a b c d", "b"], 2 / 3),  # best of 0, 2·1·½/1½ and 2·½·1/1½
        ("", ["a"], 0.0),
        ("...", ["a"], 0.0),
        ("a. .", ["a"], 2 / 3),  # white space between full stops is one empty word
    ],
)
def test_rouge_l_is_that_of_the_package_longbench_uses(prediction, references, score):
    assert METRICS["rouge_l"](prediction, references) == pytest.approx(score, abs=1e-7)


def test_rouge_l_scores_sentences_of_any_length():
    words = " ".join(f"w{number}" for number in range(700))
    assert METRICS["rouge_l"](words, [words]) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("metric", "prediction", "reference", "score"),
    [
        ("f1_zh", "北京大学。", "北京", 2 / 3),  # precision 2/4, recall 1
        ("f1_zh", "使用AI模型", "ai", 1 / 3),  # a Latin word is one: precision 1/5, recall 1
        ("f1_zh", "！，。", "！", 0.0),
        ("f1_zh", "《书》", "书", 2 / 3),  # 《 is none of LongBench's punctuation, 》 is
        ("rouge_l_zh", "北京大学", "北大", 2 / 3),
        ("rouge_l_zh", "大北", "北大", 0.5),
        ("rouge_l_zh", "甲.乙", "乙.甲", 1.0),
    ],
)
def test_chinese_is_compared_by_character_without_jieba(by_character, metric, prediction, reference, score):
    assert METRICS[metric](prediction, [reference]) == pytest.approx(score, abs=1e-7)


def test_comparing_by_character_is_reported_once(by_character, caplog):
    with caplog.at_level(logging.WARNING):
        METRICS["f1_zh"]("一二", ["三四"])
        METRICS["f1_zh"]("一二", ["三四"])
    assert len([record for record in caplog.records if "jieba" in record.message]) == 1


def test_chinese_is_compared_by_jiebas_words_where_it_is_installed(by_character, monkeypatch):
    words = {"北京大学": ["北京", "大学"], "北京人": ["北京", "人"]}
    monkeypatch.setitem(sys.modules, "jieba", SimpleNamespace(lcut=words.__getitem__))
    assert METRICS["f1_zh"]("北京大学", ["北京人"]) == 0.5
    assert METRICS["rouge_l_zh"]("北京大学", ["北京人"]) == pytest.approx(0.5)


def test_first_line_metrics_leave_out_what_follows_the_first_line():
    prediction = "\n\nParis\nQuestion: more"
    assert METRICS["f1_first_line"](prediction, ["Paris"]) == 1.0
    assert METRICS["f1"](prediction, ["Paris"]) == 0.5  # precision 1/3, recall 1
    assert METRICS["rouge_l_first_line"](prediction, ["Paris"]) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("prediction", "right", "classes", "score"),
    [
        ("Date", ["Date"], ["Date", "City"], 1.0),
        ("Date or City", ["Date"], ["Date", "City"], 0.5),
        ("City", ["Date"], ["Date", "City"], 0.0),
        ("\nCity\nType: Date", ["City"], ["Date", "City"], 1.0),  # the first line only
        ("Other entity", ["Other entity"], ["entity", "Other entity"], 1.0),  # part of the right name
        (
            "Other entity",
            ["Other entity"],
            ["Other", "entity", "Other entity"],
            0.5,
        ),  # "entity" is passed over
        ("City", ["Date", "City"], ["Date", "City"], 1.0),
    ],
)
def test_classification_shares_the_point_among_the_classes_named(prediction, right, classes, score):
    assert METRICS["classification"](prediction, with_classes(right, classes)) == score


@pytest.mark.parametrize(
    ("metric", "prediction", "reference", "score"),
    [
        ("retrieval", "Paragraph 3", "Paragraph 3", 1.0),
        ("retrieval", "3 or 5", "Paragraph 3", 0.5),
        ("retrieval", "Paragraph 13", "Paragraph 3", 0.0),
        ("retrieval", "the third", "Paragraph 3", 0.0),
        ("retrieval_zh", "段落7", "段落7", 1.0),
        ("retrieval_zh", "7，8，9，10", "段落7", 0.25),
        ("count", "5", "5", 1.0),
        ("count", "5, not 7, but 5", "5", 2 / 3),
        ("count", "five", "5", 0.0),
    ],
)
def test_numbers_share_the_point(metric, prediction, reference, score):
    assert METRICS[metric](prediction, [reference]) == pytest.approx(score)


@pytest.mark.parametrize(
    ("prediction", "reference", "score"),
    [
        ("return x", "return x", 1.0),
        ("```python\n# note\nreturn x\nmore", "return y", 0.88),  # 2·7 of 16 characters, in steps of 0.01
        ("\n\nab // note\nxyz", "abc", 0.0),
        ("abcd", "bcde", 0.75),
        ("# only a note", "abc", 0.0),
    ],
)
def test_code_similarity_compares_the_first_line_of_code(prediction, reference, score):
    assert METRICS["code_similarity"](prediction, [reference]) == score


def test_a_reference_without_a_paragraph_is_refused():
    with pytest.raises(InvalidRequest, match="names no paragraph"):
        METRICS["retrieval"]("Paragraph 3", ["three"])


@pytest.fixture
def afresh():
    scoring.bleu_scorer.cache_clear()
    yield
    scoring.bleu_scorer.cache_clear()


def test_it_is_the_geometric_mean_of_the_common_n_grams_of_every_order():
    # 5 of 6 words, 3 of 5 pairs, 2 of 4 triples, 1 of 3 quadruples; both texts are as long.
    expected = (5 / 6 * 3 / 5 * 2 / 4 * 1 / 3) ** 0.25
    assert bleu("the cat sat on the mat", ["the cat sat on a mat"]) == pytest.approx(expected)


def test_orders_that_a_short_answer_has_none_of_are_left_out():
    assert bleu("walnut", ["walnut"]) == pytest.approx(1)
    assert bleu("fence, candle", ["fence, candle"]) == pytest.approx(1)
    assert bleu("walnut", ["daisy"]) == bleu("", ["daisy"]) == 0


def test_any_reference_may_have_it():
    assert bleu("walnut", ["daisy", "walnut"]) == pytest.approx(1)


def test_without_sacrebleu_there_is_none(monkeypatch, afresh):
    monkeypatch.setitem(sys.modules, "sacrebleu.metrics", None)
    assert bleu("walnut", ["walnut"]) is None


CHUNKS = ("Brenek has the access code 4417.", "A lantern stands in box 9f1c-22ab.")


@pytest.mark.parametrize(
    ("answer", "stated"),
    [
        ("lantern, Kettle", ("lantern", "kettle")),
        ("Brenek 4417, Toulia 9023", ("brenek", "4417", "toulia", "9023")),
        ("The access code of Brenek is 4417.", ("brenek", "4417")),
        ("it is in the drawer", ("it", "is", "in", "the", "drawer")),
        ("9f1c-22ab; 3.5", ("9f1c-22ab", "3.5")),
        ("lantern, lantern", ("lantern",)),
        (" .", ()),
    ],
)
def test_facts_are_the_values_an_answer_states(answer, stated):
    assert facts(answer) == stated


@pytest.mark.parametrize(
    ("answer", "share"),
    [
        ("4417", 1.0),
        ("441", 0.0),  # part of a value is another value
        ("Lantern, kettle", 0.5),
        ("9f1c-22ab, 9f1c-22ac, brenek, 4418", 0.5),
        ("The code of Brenek is 9023.", 0.5),
        ("", 0.0),
    ],
)
def test_share_of_facts_that_the_context_contains(answer, share):
    assert ContainedFacts().share(answer, CHUNKS) == share
