import random

import pytest

from kvweave.errors import InvalidRequest
from kvweave.evaluation.haystack import Haystack


def test_sentences_are_cut_at_their_ends():
    haystack = Haystack(['He asked: "Why?" She shrugged! It cost 3.50 that day.\n\nThe end'])
    assert list(haystack.sentences()[0]) == [
        'He asked: "Why?"',
        "She shrugged!",
        "It cost 3.50 that day.",
        "The end",
    ]


def test_a_folder_gives_its_text_files_at_any_depth(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "b.txt").write_text("Second.")
    (tmp_path / "a.md").write_text("First.")
    (tmp_path / "deep" / "c.txt").write_bytes(b"Third \xff.")
    (tmp_path / "picture.png").write_text("No text.")
    documents = [sentence for document in Haystack.of_folder(tmp_path).sentences() for sentence in document]
    assert documents == ["First.", "Second.", "Third \ufffd."]


def test_what_is_no_folder_of_text_is_refused(tmp_path):
    with pytest.raises(InvalidRequest, match="is not a folder; --haystack takes"):
        Haystack.of_folder(tmp_path / "missing")
    with pytest.raises(InvalidRequest, match="holds no text; name a folder"):
        Haystack.of_folder(tmp_path)


@pytest.mark.parametrize("split", ["train", "exam"])
def test_a_split_without_a_haystack_is_refused(split):
    with pytest.raises(
        InvalidRequest, match=rf"no haystack ships for the split '{split}'; choose dev, test or hidden"
    ):
        Haystack.of_split(split)


def test_a_passage_is_consecutive_and_within_its_tokens():
    sentences = [f"Number {number} of them." for number in range(10)]
    haystack = Haystack([" ".join(sentences)])
    for seed in range(20):
        passage = haystack.passage(random.Random(seed), 17, lambda text: len(text.split()))
        at = sentences.index(passage[0])
        assert passage == [sentences[(at + offset) % 10] for offset in range(4)]


def test_no_sentence_that_fits_gives_an_empty_passage():
    assert (
        Haystack(["Far too long for it."]).passage(random.Random(0), 2, lambda text: len(text.split())) == []
    )
