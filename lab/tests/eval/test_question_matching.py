"""Pairs of questions, and the hit rates of matchers on them."""

import random
import re
from pathlib import Path

import numpy as np
import pytest

from kvweave.errors import InvalidRequest
from kvweave_lab.eval.question_matching import (
    MATCHERS,
    REJECTED,
    THRESHOLDS,
    content,
    evaluate_matchers,
    kind_table,
    matcher_curves,
    threshold_table,
    wilson_interval,
    write,
)
from kvweave_lab.eval.question_pairs import (
    LOOKALIKES,
    PARAPHRASE,
    POOLS,
    draw_value,
    families,
    make_pairs,
    read_pairs,
)
from kvweave_lab.eval.world import DEV, HIDDEN, TEST, World, split_of

ROOT = Path(__file__).parents[3]
PEOPLE = ROOT / "lab" / "src" / "kvweave_lab" / "eval" / "data" / "questions"


class FakeEncoder:
    """Places questions on a circle by length, so that questions of similar length are near."""

    name = "fake"

    def encode(self, texts):
        angles = np.array([len(text) / 60 for text in texts])
        return np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)


@pytest.fixture(scope="module")
def done():
    return evaluate_matchers(FakeEncoder(), make_pairs(DEV, 60, 160, seed=1), DEV, 1)


def bare(text):
    """Return the words only, with all placeholders alike."""
    return " ".join(re.findall(r"\w+|{}", re.sub(r"{\w+}", "{}", text).lower()))


def test_the_pools_share_no_phrasing():
    pools = {
        split: {bare(text) for family in families(split) for text in family.phrasings} for split in POOLS
    }
    assert all(len(phrasings) > 100 for phrasings in pools.values())
    assert not pools[DEV] & pools[TEST]
    assert not {f.name for f in families(DEV)} & {f.name for f in families(TEST)}


def test_no_test_phrasing_occurs_where_question_normalization_is_developed():
    """The rules hold words, not sentences. Every file that could hold sentences is searched."""
    places = [
        *(ROOT / "src" / "kvweave" / "answer_cache").rglob("*.*"),
        *(ROOT / "tests" / "answer_cache").glob("*.py"),
    ]
    texts = {
        path.name: path.read_text("utf-8")
        for path in places
        if path.is_file() and path.suffix not in (".pyc", ".xz")
    }
    assert {"guard.py", "test_guard.py", "matching.py", "test_matching.py"} <= set(texts)
    strings = {bare(text) for content in texts.values() for text in re.findall(r'"([^"\n]+)"', content)}
    assert "who blackmails the vicar" in strings
    for family in families(TEST):
        for phrasing in family.phrasings:
            pattern = re.compile(re.escape(bare(phrasing)).replace(r"\{\}", r"[\w -]+"))
            assert [text for text in strings if pattern.fullmatch(text)] == []


def test_names_belong_to_the_split():
    for split in POOLS:
        rng = random.Random(0)
        for _ in range(200):
            for kind in ("person", "town", "thing"):
                (text,) = draw_value(kind, World(rng, split))
                assert {split_of(name) for name in text.split()} == {split}


def test_pairs_are_seeded_distinct_and_evenly_spread_over_kinds():
    pairs = make_pairs(TEST, 100, 240, seed=0)
    assert pairs == make_pairs(TEST, 100, 240, seed=0) != make_pairs(TEST, 100, 240, seed=1)
    assert len({frozenset((pair.cached, pair.asked)) for pair in pairs}) == 340
    assert all(pair.cached != pair.asked for pair in pairs)
    counts = {kind: sum(pair.kind == kind for pair in pairs) for kind in (PARAPHRASE, *LOOKALIKES)}
    assert counts == {PARAPHRASE: 100} | dict.fromkeys(LOOKALIKES, 30)
    assert all(len({pair.family for pair in pairs if pair.kind == kind}) > 5 for kind in counts)


def test_the_default_numbers_give_enough_look_alikes():
    pairs = make_pairs(TEST, 1000, 5000, seed=0)
    assert sum(not pair.is_paraphrase for pair in pairs) >= 3000


def test_look_alikes_differ_according_to_their_kind():
    for pair in make_pairs(DEV, 1, 400, seed=0):
        words = [set(re.findall(r"[\w:']+", text.lower())) for text in (pair.cached, pair.asked)]
        if pair.kind in ("renamed", "renumbered", "redated"):
            assert words[0] != words[1], pair
        if pair.kind == "negated":
            assert re.search(r"\b(not|never|no)\b|n't\b", pair.asked), pair


def test_a_split_without_a_pool_is_refused():
    with pytest.raises(InvalidRequest, match="dev, test"):
        make_pairs(HIDDEN, 1, 1, 0)


def test_every_matcher_has_a_row_at_its_default_threshold(done):
    for matcher in MATCHERS:
        row = done.default(matcher.name)
        assert matcher.threshold in (row.threshold, None)
        rows = [row for row in done.rows if row.matcher == matcher.name]
        assert [row.threshold for row in rows] == sorted({row.threshold for row in rows})
        rates = [row.hit_rate.value for row in rows]
        assert rates == sorted(rates, reverse=True)


def test_the_gptcache_rule_compares_squared_distances():
    """Its score is 4 minus the squared L2 distance, its threshold 0.8 of that range."""
    rng = np.random.default_rng(0)
    one, other = (
        vectors / np.linalg.norm(vectors, axis=1, keepdims=True) for vectors in rng.normal(size=(2, 500, 4))
    )
    squared = ((one - other) ** 2).sum(axis=1)
    gptcache = next(matcher for matcher in MATCHERS if matcher.name == "gptcache")
    scores = gptcache.score([], (one * other).sum(axis=1))
    np.testing.assert_array_equal(scores >= gptcache.threshold, 4 - squared >= 0.8 * (4 - 0))


def test_kvweave_accepts_what_cosine_accepts_except_differing_questions():
    pairs = make_pairs(DEV, 50, 80, seed=2)
    cosines = np.linspace(0.5, 1, len(pairs))
    ours, cosine, guarded, *_ = (matcher.score(pairs, cosines) for matcher in MATCHERS)
    assert np.all((ours == cosine) | (ours == REJECTED) | (ours == 1))
    assert np.all((guarded == cosine) | (guarded == REJECTED))
    assert np.all(guarded[ours != REJECTED] != REJECTED)
    same = np.array([pair.is_paraphrase for pair in pairs])
    assert (ours[~same] != REJECTED).sum() == 0


def test_intervals_keep_their_width_at_shares_of_0_and_1():
    nothing, everything, half = wilson_interval(0, 3000), wilson_interval(50, 50), wilson_interval(40, 80)
    assert (nothing.value, nothing.low) == (0, 0)
    assert 0.001 < nothing.high < 0.0014  # Wilson: z² / (n + z²)
    assert (everything.value, everything.high) == (1, pytest.approx(1))
    assert everything.low < 0.95
    assert half.value - half.low == pytest.approx(half.high - half.value)


def test_tables_json_and_figure_have_every_matcher(done, tmp_path):
    plain = content(done, {"command": "command"})
    assert {row["matcher"] for row in plain["rows"]} == {matcher.name for matcher in MATCHERS}
    fields = {
        "matcher",
        "threshold",
        "hit_rate",
        "hit_rate_interval",
        "false_hit_rate",
        "false_hit_rate_interval",
    }
    assert all(fields <= set(row) for row in plain["rows"])
    assert {row["kind"] for row in plain["kinds"]} == {PARAPHRASE, *LOOKALIKES}
    assert threshold_table(done).row_count >= 9
    assert kind_table(done).row_count == 9
    assert matcher_curves(done).startswith(b"\x89PNG")
    assert {path.name for path in write(tmp_path / "out", done, {"command": "command"})} == {
        "lookalikes.json",
        "lookalikes.png",
    }


def test_a_folder_that_cannot_be_written_to_is_refused(done, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidRequest, match="--output"):
        write(tmp_path / "file", done, {"command": "command"})


def test_zero_pairs_are_refused():
    with pytest.raises(InvalidRequest, match="at least one"):
        evaluate_matchers(FakeEncoder(), make_pairs(DEV, 0, 5, seed=0), DEV)


def test_thresholds_range_from_0_5_to_0_99():
    assert (THRESHOLDS[0], THRESHOLDS[-1]) == (0.5, 0.99)


PAIR = '{"a": "Who wrote it?", "b": "Who is the author?", "same": true, "kind": "natural"}'
LOOKALIKE = '{"a": "Who wrote it?", "b": "Who read it?", "same": false, "kind": "role"}'


def test_pairs_of_a_file_are_measured_by_kind(tmp_path):
    (tmp_path / "pairs.jsonl").write_text(f"{PAIR}\n\n{LOOKALIKE}\n")
    pairs = read_pairs(tmp_path / "pairs.jsonl")
    assert [(pair.kind, pair.cached, pair.asked, pair.is_paraphrase) for pair in pairs] == [
        ("natural", "Who wrote it?", "Who is the author?", True),
        ("role", "Who wrote it?", "Who read it?", False),
    ]
    done = evaluate_matchers(FakeEncoder(), pairs, "pairs.jsonl")
    assert (done.pool, done.paraphrases, done.lookalikes) == ("pairs.jsonl", 1, 1)
    assert {(row.kind, row.pairs) for row in done.kinds} == {("natural", 1), ("role", 1)}


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([PAIR], "needs pairs with same true and pairs with same false"),
        ([PAIR, LOOKALIKE, PAIR], "line 3: this pair stands in the file before"),
        ([PAIR, LOOKALIKE.replace("role", "natural")], "line 2: kind 'natural' has pairs"),
        ([PAIR, "{"], "line 2: no JSON"),
        ([PAIR, '{"a": 1}'], "line 2: an object with a, b"),
        ([PAIR, LOOKALIKE.replace("Who read it?", " ")], "line 2: a question is empty"),
    ],
)
def test_wrong_files_of_pairs_are_named(tmp_path, lines, said):
    (tmp_path / "pairs.jsonl").write_text("\n".join(lines))
    with pytest.raises(InvalidRequest, match=re.escape(said)):
        read_pairs(tmp_path / "pairs.jsonl")
    with pytest.raises(InvalidRequest, match="--pairs"):
        read_pairs(tmp_path / "missing.jsonl")


@pytest.mark.parametrize("part", ["dev", "test"])
def test_the_pairs_that_come_with_the_lab_are_whole(part):
    pairs = read_pairs(PEOPLE / f"people_{part}.jsonl")
    assert sum(pair.is_paraphrase for pair in pairs) >= 200
    assert sum(not pair.is_paraphrase for pair in pairs) >= 600


def test_the_two_parts_share_no_question():
    dev, test = (
        {
            bare(text)
            for pair in read_pairs(PEOPLE / f"people_{part}.jsonl")
            for text in (pair.cached, pair.asked)
        }
        for part in ("dev", "test")
    )
    assert not dev & test
