"""Tokenizers that are trained on a few lines of text."""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CORPUS = [
    "The harbour opens at six and closes at noon. Ships wait outside.",
    "def run(value):\n    return value + 1\n",
    "# Heading\n\nA paragraph with a list:\n\n- one\n- two\n",
] * 20


def byte_level() -> PreTrainedTokenizerFast:
    """A small byte-level BPE with special tokens, and with markers that are not listed as special."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=["<|im_end|>", "<|im_start|>", "<bos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(CORPUS, trainer)
    made.add_tokens(
        [AddedToken(text, normalized=False, special=False) for text in ("<think>", "<|user|>", "    ")]
    )
    return PreTrainedTokenizerFast(tokenizer_object=made)
