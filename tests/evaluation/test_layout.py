import random

import pytest

from kvweave.errors import InvalidRequest
from kvweave.evaluation.draft import AcrossCut, Anywhere, InOrder, Together
from kvweave.evaluation.haystack import Haystack
from kvweave.evaluation.layout import Layout, lay_out

HAY = Haystack(["Grass grows. Birds sing in the old trees! Is it late? The river runs on."])


def words(text: str) -> int:
    return len(text.split())


def place(pieces, budgets=(20, 20, 20, 20), *, seed=0, haystack=HAY):
    return lay_out(random.Random(seed), pieces, budgets, words, haystack)


@pytest.mark.parametrize("seed", range(20))
class TestWherePiecesStand:
    def test_every_piece_stands_once_and_no_chunk_is_over_its_budget(self, seed):
        chunks = place(
            [Anywhere("Needle one."), Together(("A b c.", "D e.")), InOrder(("F.", "G."))], seed=seed
        )
        text = " ".join(chunks)
        assert [text.count(piece) for piece in ("Needle one.", "A b c. D e.", "F.", "G.")] == [1, 1, 1, 1]
        assert all(words(chunk) <= 20 for chunk in chunks)

    def test_an_order_is_kept_each_in_a_chunk_of_its_own(self, seed):
        texts = ("One.", "Two.", "Three.")
        chunks = place([InOrder(texts)], seed=seed)
        at = [next(number for number, chunk in enumerate(chunks) if text in chunk) for text in texts]
        assert at == sorted(set(at))

    def test_an_order_is_kept_where_chunks_are_fewer(self, seed):
        text = " ".join(place([InOrder(("One.", "Two.", "Three."))], (20, 20), seed=seed))
        assert text.index("One.") < text.index("Two.") < text.index("Three.")

    def test_a_cut_lies_between_the_two_sentences(self, seed):
        chunks = place([AcrossCut("She came.", "Her dog too.")], seed=seed)
        (before,) = (number for number, chunk in enumerate(chunks) if "She came." in chunk)
        assert "Her dog too." in chunks[before + 1]
        assert chunks[before].endswith("She came.") or chunks[before + 1].startswith("Her dog too.")

    def test_the_sentences_between_are_the_haystacks_in_a_row(self, seed):
        (chunk,) = place([Anywhere("Needle.")], (40,), seed=seed)
        natural = chunk.replace("Needle.", "").split()
        sentences = HAY.sentences()[0]
        rotations = [" ".join([*sentences[k:], *sentences[:k]]).split() for k in range(len(sentences))]
        assert natural in rotations


def test_without_a_haystack_chunks_hold_the_pieces_alone():
    assert sorted(place([Anywhere("One."), Anywhere("Two.")], (1, 1), haystack=None)) == ["One.", "Two."]


def test_a_piece_without_room_changes_nothing():
    layout = Layout(random.Random(0), [3], words, None)
    assert layout.place(Anywhere("One two."))
    assert not layout.place(InOrder(("Three four.", "Five.")))
    assert layout.chunks() == ["One two."]


@pytest.mark.parametrize("seed", range(20))
def test_an_unlucky_arrangement_is_tried_again(seed):
    # Two words fit beside the long piece or take its place.
    chunks = place([Anywhere("One two."), Anywhere("Three four five six.")], (4, 2), seed=seed, haystack=None)
    assert chunks == ["Three four five six.", "One two."]


def test_too_little_room_is_an_error_that_says_what_to_do():
    with pytest.raises(
        InvalidRequest, match=r"1 chunks of about 2 tokens .* take a longer context or chunks of another"
    ):
        place([Anywhere("One two three.")], (2,))


def test_one_chunk_has_no_end_between_two_sentences():
    with pytest.raises(InvalidRequest, match="too few ends between them"):
        place([AcrossCut("One.", "Two.")], (100,))
