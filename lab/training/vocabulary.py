"""The tokenizers: byte-level BPE trained on the training texts and on generated documents of the train split.

The reference tokenizer adds a space before every text, so a word has the same tokens at the start of a chunk as inside
it. Digits are separate tokens, so a number is copied digit by digit.
"""

import random
from collections.abc import Iterator

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from kvweave.models.prompt import ANSWER_LEAD, DEFAULT_SYSTEM, QUESTION_LEAD, SEPARATOR
from training.documents import Writer, training_haystack
from training.shape import Shape

DOCUMENTS = 3000  # generated documents that a tokenizer is trained on
SHAPE = Shape(context=0, questions=0, chunks=(6, 6), chunk_tokens=(48, 128), sparse=0.3)
SPECIAL = ("<pad>", "<bos>", "<eos>")
SPLIT = r" ?\p{N}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def learn_tokenizer(size: int, seed: int) -> PreTrainedTokenizerFast:
    """Return the reference model's tokenizer, of `size` tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Prepend(" ")
    split = pre_tokenizers.Split(Regex(SPLIT), "isolated")
    by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, by_bytes])
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    return train_bpe(tokenizer, size, seed)


def train_bpe(tokenizer: Tokenizer, size: int, seed: int) -> PreTrainedTokenizerFast:
    """Train the merges of a byte-level BPE, and return it as a tokenizer of transformers."""
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
    """Yield the texts for training a tokenizer: the training texts, and generated documents with their questions."""
    yield from (*training_haystack().texts,) * 4
    yield from (DEFAULT_SYSTEM + SEPARATOR, SEPARATOR, QUESTION_LEAD, ANSWER_LEAD) * 200
    writer = Writer(random.Random(seed), count=lambda text: len(text) // 4)
    for _ in range(DOCUMENTS):
        document = writer.document(6, SHAPE)
        yield from document.chunks
        for question in document.questions:
            yield question.text
            yield question.reply
