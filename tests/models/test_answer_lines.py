"""A base model's answer ends with its line, on every way of decoding; its tokens are plain transformers'."""

import itertools

import pytest
import torch

from kvweave.answering.generation import Decoded, generate
from kvweave.config import GenerationConfig
from kvweave.decode.settings import ClusterSettings, OffloadSettings
from kvweave.testing import end_only_at, tiny_adapter
from kvweave.types import ReplyFormat
from support.plain_generation import plain_generation, prompt
from support.spelled import ENDINGS, Spelled, new_place

COUNT = 12
LINE = ReplyFormat(one_line=True)
NO_LOOKUP = GenerationConfig(prompt_lookup_tokens=0)


def spelled_adapter(family, true, texts):
    """Return an adapter that spells the reply `true` so: each text replaces that of the token at its place."""
    adapter = tiny_adapter(family)
    end_only_at(adapter)
    table = {}
    for place, text in texts.items():
        assert true[place] not in true[:place], "the token is new at its place"
        table[true[place]] = text
    adapter.tokenizer = Spelled(table)
    return adapter


def replied(adapter, ids, *, form=LINE, drafts=(), settings=NO_LOOKUP, kv=None):
    kv_cache = adapter.new_cache(len(ids))
    logits = adapter.compute(kv_cache, ids, adapter.rows(torch.arange(len(ids))))
    decoded = Decoded()
    pieces = list(
        generate(adapter, kv_cache, ids, logits, settings, COUNT, decoded, drafts=drafts, form=form, kv=kv)
    )
    assert "".join(pieces) == decoded.text
    return decoded, kv_cache


@pytest.mark.parametrize("family", ["llama", "qwen2-sliding", "phi3-longrope"])
@pytest.mark.parametrize(("texts", "kept"), ENDINGS)
def test_a_line_ends_the_answer_on_every_way_of_decoding(family, texts, kept):
    """The tokens are plain transformers' up to the end, with and without drafts, one at a time and together, and on disk."""
    ids = prompt(59)  # phi3-longrope changes its frequencies at 64
    true = plain_generation(family, ids, COUNT)
    place = new_place(true)
    adapter = spelled_adapter(family, true, {place + at: text for at, text in texts.items()})
    expected = true[: place + kept]
    text = "".join(f" w{token}" for token in true[:place]) + (texts[0].split("\n")[0] if kept else "")
    for drafts, settings in itertools.product(([], [true], [true[:place]]), (NO_LOOKUP, GenerationConfig())):
        decoded, kv_cache = replied(adapter, ids, drafts=drafts, settings=settings)
        assert (decoded.text, list(decoded.ids), decoded.finish_reason) == (text, expected, "stop")
        assert kv_cache.get_seq_length() <= len(ids) + len(expected)
    offload = OffloadSettings(1.0, window=8, clusters=ClusterSettings(8, 16))
    on_disk, _ = replied(adapter, ids, kv=offload)
    assert (on_disk.text, list(on_disk.ids)) == (text, expected)
    free, _ = replied(adapter, ids, form=ReplyFormat())
    assert (list(free.ids), free.finish_reason) == (true, "length")  # nothing else ends at a line


def test_lines_before_the_first_text_end_nothing():
    ids = prompt(40)
    true = plain_generation("llama", ids, COUNT)
    assert true[0] not in true[1:]
    adapter = spelled_adapter("llama", true, {0: "\n\n"})
    decoded, _ = replied(adapter, ids)
    assert list(decoded.ids) == true
    assert decoded.text == "\n\n" + "".join(f" w{token}" for token in true[1:])
