"""The tokenizers: text round-trips, digits are separate tokens, and a word has the same tokens everywhere."""

import json
import re

import pytest
from transformers import PreTrainedTokenizerBase

from training import vocabulary as module
from training.vocabulary import SPECIAL, learn_tokenizer, training_texts


def ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def test_it_has_the_requested_size_and_starts_with_the_special_tokens(vocabulary):
    assert len(vocabulary) == 512
    assert vocabulary.convert_ids_to_tokens([0, 1, 2]) == list(SPECIAL)
    assert (vocabulary.pad_token_id, vocabulary.bos_token_id, vocabulary.eos_token_id) == (0, 1, 2)


def test_digits_are_separate_tokens(vocabulary):
    pieces = vocabulary.backend_tokenizer.pre_tokenizer.pre_tokenize_str("room 90210, b7b22")
    cut = "room|Ġ9|0|2|1|0|,|Ġb|7|b|2|2".split("|")
    assert [piece for piece, _ in pieces] == cut  # no merge crosses a piece's end
    digits = [piece for piece in vocabulary.get_vocab() if re.search("[0-9]", piece)]
    assert len(digits) >= 10
    assert all(re.fullmatch("Ġ?[0-9]", piece) for piece in digits)


@pytest.mark.parametrize(
    "text",
    [
        "".join(map(chr, range(0x800))),  # every ASCII character, and every lead and trail byte of two
        "".join(
            map(chr, [*range(0x800, 0xD800, 0x3F), *range(0xE000, 0x110000, 0xFFF)])
        ),  # of three and four
        "  two spaces, a\ttab,\n\na blank line and an end  \n",
        "It's 12% — “naïve” 東京 🙂 <0x41>",
    ],
    ids=["two-bytes", "four-bytes", "white-space", "signs"],
)
def test_every_text_round_trips(vocabulary, text):
    assert vocabulary.decode(ids(vocabulary, text)) == text


def test_a_word_has_the_same_tokens_at_the_start_of_a_text_as_inside_it(vocabulary):
    for word in ("lantern", "Brenek", "the"):
        alone = ids(vocabulary, word)
        assert ids(vocabulary, f"Here is {word}")[-len(alone) :] == alone


def test_equal_seeds_learn_equal_vocabularies(monkeypatch):
    monkeypatch.setattr(module, "DOCUMENTS", 40)
    one, again, other = (
        json.loads(learn_tokenizer(400, seed).backend_tokenizer.to_str()) for seed in (1, 1, 2)
    )
    assert one == again
    assert list(training_texts(1)) == list(training_texts(1)) != list(training_texts(2))
    assert len(one["model"]["vocab"]) == len(other["model"]["vocab"]) == 400
