"""The measurements of what prediction and matching could reach at best: their data, scores and thresholds."""

import numpy as np
import pytest
import torch

from kvweave.testing import tiny_adapter
from kvweave_lab.eval.natural.questions import shipped_set
from kvweave_lab.eval.prediction.run import Request, choose


@pytest.fixture
def reader(script):
    return script("reader_predictions")


@pytest.fixture
def learned(script):
    return script("learned_matcher")


def test_the_readers_questions_are_about_the_evaluations_documents(reader):
    content = shipped_set()
    names, asked = choose(content, Request(reader.DOCUMENTS, 60, "test"))
    rows = reader.read_predictions()
    assert [each.doc for each in rows] == [name for name in names for _ in range(6)]
    assert all(content.documents[each.doc].count(each.quote) == 1 for each in rows)
    texts = [text for each in rows for text in each.wordings]
    assert len(set(texts)) == 3 * len(rows)
    assert not set(texts) & {each.text for each in asked} - {"How deep is Lough Keeraun?"}
    about = {each.id: {one.doc for one in each.evidence} for each in asked}
    judged = [(each.doc, id_) for each in rows for id_ in (*each.asked_by, *each.turned)]
    assert all(id_ in about for _, id_ in judged)
    # Of a fact that two documents state, the prediction may be about either.
    assert sum(doc in about[id_] for doc, id_ in judged) >= len(judged) - 4


def test_a_line_or_a_mark_ends_a_sentence(reader):
    text = "# Head\nThe inn is in the north. It costs 1.50 a night!\nTwo words\nA last line without a mark"
    found = [text[start:end].strip() for start, end in reader.sentences(text)]
    assert found == [
        "The inn is in the north.",
        "It costs 1.50 a night!",
        "A last line without a mark",
    ]


def test_edits_count_insertions_deletions_and_replacements(learned):
    assert learned.edits("kitten", "sitting") == pytest.approx(3 / 7)
    assert learned.edits(["a", "b"], ["a", "b"]) == 0
    assert learned.edits("", "") == 0
    assert learned.edits("ab", "") == learned.edits("", "ab") == 1


@pytest.mark.parametrize(("rate", "passing"), [(0.0, 0), (0.1, 1), (0.19, 1), (0.5, 5)])
def test_at_most_the_wanted_share_passes_a_threshold(learned, rate, passing):
    values = np.random.default_rng(0).permutation(10).astype(float)
    assert (values > learned.threshold(values, rate)).sum() == passing


def test_equal_scores_at_the_threshold_all_fail(learned):
    values = np.array([1.0, 1.0, 1.0, 0.0])
    assert (values > learned.threshold(values, 0.25)).sum() == 0


def test_a_matcher_learns_nothing_from_the_hand_it_is_tested_on(learned):
    rng = np.random.default_rng(0)
    hand = np.array([name for name in learned.HANDS for _ in range(60)])
    same = rng.random(180) < 0.5
    kind = question = np.array([str(number) for number in range(180)])
    values = {"cosine": same[:, None] + rng.normal(0, 0.1, (180, 1))}
    pool = learned.Pool(same, np.zeros(180, bool), hand, kind, question, values, same, same)
    way = learned.Learned(("cosine",), learned.logistic)
    unseen, own = learned.scores(pool, way, learned.HANDS[0])
    tested = hand == learned.HANDS[0]
    assert (np.isnan(unseen) == ~tested).all()
    assert (np.isnan(own) == tested).all()
    assert ((unseen[tested] > 0) == same[tested]).all()
    turned = pool._replace(same=np.where(tested, ~same, same))
    assert (learned.scores(turned, way, learned.HANDS[0])[0][tested] == unseen[tested]).all()


def test_likelihoods_are_those_of_a_plain_pass_and_are_kept(script, tmp_path):
    module = script("question_likelihood")
    adapter, path = tiny_adapter(), tmp_path / "likelihoods.jsonl"
    keys = [("Who keeps it?", "In whose hands is it?"), ("", "When does it close, and why so early?")]
    found = module.Likelihoods(adapter, path).of(keys)
    encode = adapter.tokenizer.encode
    for (first, then), value in zip(keys, found, strict=True):
        before = encode(f"{first}{module.ARROW}", add_special_tokens=False) if first else []
        scored = encode(f" {then}" if first else then, add_special_tokens=False)
        ids = torch.tensor([[*encode(module.EXAMPLES), *before, *scored]])
        with torch.inference_mode():
            logits = adapter.model(input_ids=ids).logits[0].log_softmax(-1)
        rows = logits[-len(scored) - 1 : -1]
        expected = rows.gather(1, torch.tensor(scored)[:, None]).mean()
        assert value == pytest.approx(float(expected), abs=1e-4)
    lines = path.read_text()
    assert module.Likelihoods(adapter, path).of(keys[::-1]) == found[::-1]
    assert path.read_text() == lines
