import random
import re

import pytest

from kvweave.errors import InvalidRequest
from kvweave_lab.eval.documents import AcrossCut, Anywhere, InOrder, Together
from kvweave_lab.eval.layout import Layout, lay_out

HAY = ("Grass grows.", "Birds sing in the old trees!", "Is it late?", "The river runs on.")
LONG = tuple(
    f"Number{number} is one of the sentences that stand here." for number in range(40)
)  # 9 words each


def words(text: str) -> int:
    return len(text.split())


def place(pieces, context=80, chunk=23, *, seed=0, haystack=HAY):
    return [chunk.text for chunk in lay_out(random.Random(seed), pieces, context, chunk, words, haystack)]


def bare(pieces, budgets, *, seed=0):
    """Pieces alone."""
    layout = Layout(random.Random(seed), budgets, words)
    assert layout.place_all(pieces)
    return layout.chunks([()] * len(budgets))


@pytest.mark.parametrize("seed", range(20))
class TestWherePiecesStand:
    def test_every_piece_occurs_once_and_no_chunk_is_too_large(self, seed):
        chunks = place(
            [Anywhere("Needle one."), Together(("A b c.", "D e.")), InOrder(("F.", "G."))], seed=seed
        )
        text = " ".join(chunks)
        assert [text.count(piece) for piece in ("Needle one.", "A b c. D e.", "F.", "G.")] == [1, 1, 1, 1]
        assert all(words(chunk) <= 23 for chunk in chunks)

    def test_an_order_is_kept_with_each_piece_in_a_separate_chunk(self, seed):
        texts = ("One.", "Two.", "Three.")
        chunks = place([InOrder(texts)], seed=seed)
        at = [next(number for number, chunk in enumerate(chunks) if text in chunk) for text in texts]
        assert at == sorted(set(at))

    def test_an_order_is_kept_where_chunks_are_fewer(self, seed):
        text = " ".join(bare([InOrder(("One.", "Two.", "Three."))], (20, 20), seed=seed))
        assert text.index("One.") < text.index("Two.") < text.index("Three.")

    def test_a_cut_is_between_the_two_sentences_and_nothing_else(self, seed):
        cuts = [AcrossCut(f"She{number} came.", f"Her dog{number} too.") for number in range(3)]
        chunks = place(cuts, seed=seed)
        for cut in cuts:
            (before,) = (number for number, chunk in enumerate(chunks) if chunk.endswith(cut.first))
            assert chunks[before + 1].startswith(cut.then)

    def test_a_chunk_after_a_cut_continues_and_every_other_begins(self, seed):
        cuts = [AcrossCut(f"She{number} came.", f"Her dog{number} too.") for number in range(2)]
        laid = lay_out(random.Random(seed), [*cuts, Anywhere("Needle one.")], 80, 23, words, HAY)
        behind = [any(chunk.text.startswith(cut.then) for cut in cuts) for chunk in laid]
        assert [chunk.continues for chunk in laid] == behind
        assert sum(behind) == 2

    def test_the_text_around_a_cut_may_be_longer(self, seed):
        layout = Layout(random.Random(seed), (5, 5, 6), words, lambda first, then: ([first], ["Well.", then]))
        assert layout.place(AcrossCut("One two three four five.", "Six seven eight nine ten."))
        assert layout.chunks([()] * 3) == ["", "One two three four five.", "Well. Six seven eight nine ten."]

    def test_natural_sentences_keep_their_order_around_pieces(self, seed):
        layout = Layout(random.Random(seed), (40,), words)
        assert layout.place_all([Anywhere("Needle."), Anywhere("Pin.")])
        assert layout.room == [38]
        (chunk,) = layout.chunks([HAY])
        assert re.sub(r"(Needle|Pin)\. ?", "", chunk).strip() == " ".join(HAY)
        assert "Needle." in chunk
        assert "Pin." in chunk


@pytest.mark.parametrize("seed", range(20))
class TestLength:
    @pytest.mark.parametrize(("context", "chunk"), [(90, 90), (200, 100), (200, 31), (340, 20)])
    def test_a_context_has_its_length_in_chunks_of_their_size(self, seed, context, chunk):
        chunks = place([Anywhere("A needle in it."), InOrder(("One.", "Two."))], context, chunk, seed=seed)
        sizes = [words(text) for text in chunks]
        assert 0.95 * context <= sum(sizes) <= context
        assert 0 < min(sizes) <= max(sizes) <= chunk

    def test_chunks_that_whole_sentences_cannot_fill_are_more(self, seed):
        chunks = place([], 340, 17, seed=seed, haystack=LONG)  # one piece of 9 words each, where 17 words fit
        assert len(chunks) > 1.5 * 340 / 17
        assert 0.95 * 340 <= sum(map(words, chunks)) <= 340

    def test_a_chunk_that_no_sentence_fits_into_is_left_out(self, seed):
        chunks = place([], 100, 10, seed=seed, haystack=LONG)  # 11 for the length, and no more than 100 words
        assert [words(text) for text in chunks] == [9] * 11

    def test_cuts_and_orders_have_chunks_enough(self, seed):
        assert len(place([AcrossCut("A.", "B."), AcrossCut("C.", "D.")], 60, 60, seed=seed)) >= 3
        chunks = place([InOrder(("A.", "B.", "C.", "D."))], 60, 60, seed=seed)
        assert [sum(text in chunk for text in ("A.", "B.", "C.", "D.")) for chunk in chunks] == [1, 1, 1, 1]

    def test_no_sentence_comes_again_before_all_have_come(self, seed):
        for context in (300, 700):  # the haystack has 360
            numbers = re.findall(r"Number\d+", " ".join(place([], context, 50, seed=seed, haystack=LONG)))
            assert len(set(numbers)) == min(len(numbers), len(LONG))
            assert len(set(numbers[:40])) == min(len(numbers), 40)


def test_a_piece_that_does_not_fit_changes_nothing():
    layout = Layout(random.Random(0), [3], words)
    assert layout.place(Anywhere("One two."))
    assert not layout.place(InOrder(("Three four.", "Five.")))
    assert layout.chunks([()]) == ["One two."]


@pytest.mark.parametrize("seed", range(20))
def test_an_unlucky_arrangement_is_tried_again(seed):
    # Neither of the two long pieces fits where the short ones are apart.
    short = [Anywhere("One."), Anywhere("Two.")]
    long = [Anywhere("Three four five."), Anywhere("Six seven eight nine.")]
    assert " ".join(place([*short, *long], 9, 5, seed=seed)).count(".") == 4


@pytest.mark.parametrize(("context", "chunk"), [(2, 2), (20, 2), (2, 20)])
def test_too_short_contexts_are_an_error_with_advice(context, chunk):
    with pytest.raises(
        InvalidRequest,
        match=rf"of at most {chunk} tokens, {context} in all, .* take a longer context or chunks of another size",
    ):
        place([Anywhere("One two three.")], context, chunk, haystack=("Well.",))


@pytest.mark.parametrize("haystack", [(), LONG])
def test_a_haystack_that_fills_no_chunk_is_refused(haystack):
    with pytest.raises(InvalidRequest, match=r"too long for .* take larger chunks or another haystack"):
        place([], 80, 8, haystack=haystack)
