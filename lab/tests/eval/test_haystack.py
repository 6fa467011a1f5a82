import random

import pytest

from kvweave.errors import InvalidRequest
from kvweave_lab.eval.haystack import Haystack, Passages


def words(text: str) -> int:
    return len(text.split())


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


def test_sentences_with_a_word_of_the_document_are_left_out():
    haystack = Haystack(
        [
            "The Lantern was lit. It rained. A lantern's light. Lanterns glow. It rained.",
            "Room 44 17. 4417 men.",
        ]
    )
    assert haystack.without(["lantern", "4417"]) == ["It rained.", "Lanterns glow.", "Room 44 17."]
    assert haystack.without(["550e8400-e29b", "It"])[:2] == ["The Lantern was lit.", "A lantern's light."]
    assert len(haystack.without([])) == 6  # what is there twice counts once


class TestPassages:
    SENTENCES = tuple(f"Number {number} of them." for number in range(10))

    def passages(self, seed, sentences=SENTENCES):
        return Passages(random.Random(seed), sentences, words)

    @pytest.mark.parametrize("seed", range(20))
    def test_sentences_of_one_length_follow_each_other(self, seed):
        texts, tokens = self.passages(seed).draw(17)
        at = self.SENTENCES.index(texts[0])
        assert texts == [self.SENTENCES[(at + offset) % 10] for offset in range(4)]
        assert tokens == 16

    @pytest.mark.parametrize("seed", range(20))
    def test_behind_one_that_does_not_fit_others_are_tried(self, seed):
        texts, tokens = self.passages(seed, ("One two three four.", "Five six seven.", "Eight.")).draw(5)
        assert tokens == 5 or texts == ["Five six seven.", "Eight."] or texts == ["Eight.", "Five six seven."]

    @pytest.mark.parametrize("seed", range(20))
    def test_nothing_comes_again_before_everything_has_come(self, seed):
        passages = self.passages(seed)
        drawn = [text for tokens in (9, 13, 8, 4, 4, 44) for text in passages.draw(tokens)[0]]
        assert sorted(drawn[:10]) == sorted(drawn[10:]) == sorted(self.SENTENCES)

    def test_a_small_place_stays_empty_rather_than_have_something_again(self):
        passages = self.passages(0, ("One.", "Two three four five six.", "Seven eight nine ten eleven."))
        assert passages.draw(1) == (["One."], 1)
        assert passages.draw(1) == ([], 0)

    @pytest.mark.parametrize(
        ("sentences", "tokens"), [((), 9), (SENTENCES, 3), (SENTENCES, 0), (SENTENCES, -2)]
    )
    def test_where_nothing_fits_nothing_comes(self, sentences, tokens):
        assert self.passages(0, sentences).draw(tokens) == ([], 0)
