"""The tokenizers: byte-level BPE learned from the training text and from generated documents of the train split.

Every text gets a leading space, so a word has the same tokens at the start of a chunk as inside it; digits stand
alone, so a number is copied digit by digit.
"""

import argparse
import random
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from kvweave.models.template import ANSWER_LEAD, DEFAULT_SYSTEM, QUESTION_LEAD, SEPARATOR
from training.documents import Writer, training_haystack

SPECIAL = ("<pad>", "<bos>", "<eos>")
SPLIT = r" ?\p{N}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def learn(size: int, seed: int = 0) -> PreTrainedTokenizerFast:
    """A tokenizer of `size` tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Prepend(" ")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    return learned(tokenizer, size, seed)


def learned(tokenizer: Tokenizer, size: int, seed: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE, its pre-tokenizer and decoder given, with its merges learned and its special tokens named."""
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(training_texts(seed), trainer)
    pad, bos, eos = SPECIAL
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=pad, bos_token=bos, eos_token=eos)


def training_texts(seed: int) -> Iterator[str]:
    """What vocabularies are learned from: the training texts and generated documents with their questions."""
    yield from (*training_haystack().texts,) * 4
    yield from (DEFAULT_SYSTEM + SEPARATOR, SEPARATOR, QUESTION_LEAD, ANSWER_LEAD) * 200
    writer = Writer(random.Random(seed), count=lambda text: len(text) // 4)
    for _ in range(3000):
        document = writer.document(chunks=6)
        yield from document.chunks
        for question in document.questions:
            yield question.text
            yield question.reply


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--size", type=int, default=4096)
    given = parser.parse_args()
    learn(given.size).save_pretrained(given.folder)
