"""How one request is decoded: stop texts, log probabilities, temperature, seed, and why a reply ended."""

import pytest
import torch

from kvweave.answering.generation import Decoded, generate
from kvweave.answering.reply_reader import ReplyReader
from kvweave.errors import InvalidRequest
from kvweave.options import MAX_LOGPROBS, Sampling, check_sampling
from kvweave.testing import end_only_at, tiny_adapter, tiny_model
from kvweave.types import ReplyFormat

TEXT = "The inn is in the north. The inn is in the"
BROKEN = "\ufffd"  # what a part of a character decodes to
PLAIN = ReplyFormat(thoughts="none")


@pytest.fixture(scope="module")
def adapter():
    adapter = tiny_adapter()
    end_only_at(adapter)
    return adapter


def reply(adapter, drafts=(), most=24, **sampling):
    """Return the pieces, the tokens that came with each, and the outcome."""
    ids = list(adapter.template.text_ids(TEXT))
    kv_cache = adapter.new_cache(len(ids))
    logits = adapter.compute(kv_cache, ids, adapter.rows(torch.arange(len(ids))))
    decoded, pieces, tokens = Decoded(), [], []
    settings = Sampling(max_new_tokens=most, **sampling)
    for piece in generate(adapter, kv_cache, ids, logits, settings, most, decoded, drafts=drafts, form=PLAIN):
        pieces.append(piece)
        tokens += decoded.piece_tokens
    return pieces, tokens, decoded


@pytest.fixture(scope="module")
def whole(adapter):
    return reply(adapter)[2]


def test_text_before_the_first_stop_alone_is_shown(adapter, whole):
    for start in range(1, len(whole.text) - 3):
        for length in (1, 2, 3):
            stop = whole.text[start : start + length]
            if BROKEN in stop:
                continue
            pieces, _, decoded = reply(adapter, stop=(stop, "never in it"))
            at = whole.text.index(stop)
            assert decoded.text == "".join(pieces) == whole.text[:at], (start, length)
            assert decoded.finish_reason == "stop"
            shown = ""
            for piece in pieces:
                shown += piece
                assert whole.text[:at].startswith(shown)


def test_without_a_stop_in_it_all_is_shown_and_the_limit_is_the_reason(adapter, whole):
    half = whole.text[-1] + "more"  # begins as the text ends, and is held back until the end
    pieces, _, decoded = reply(adapter, stop=(half,))
    assert "".join(pieces) == decoded.text == whole.text
    assert decoded.finish_reason == "length"


def test_a_stop_may_lie_across_tokens(adapter, whole):
    ids = whole.ids
    first = adapter.tokenizer.decode(ids[:3])
    second = adapter.tokenizer.decode(ids[:5])
    across = second[len(first) - 1 : len(first) + 1]
    at = whole.text.index(across)
    pieces, tokens, decoded = reply(adapter, stop=(across,), logprobs=0)
    assert "".join(pieces) == whole.text[:at]
    assert [token.id for token in tokens] == list(decoded.ids)


@pytest.mark.parametrize("drafted", [False, True])
def test_log_probabilities_are_those_of_plain_transformers(adapter, whole, drafted):
    """The first token, tokens of single steps and tokens that were verified as a draft."""
    drafts = [tuple(whole.ids)] if drafted else ()
    lookup = {} if drafted else {"prompt_lookup_tokens": 0}
    pieces, tokens, decoded = reply(adapter, drafts, logprobs=4, **lookup)
    assert (decoded.accepted_draft_tokens > 0) == drafted
    assert [token.id for token in tokens] == list(whole.ids)
    ids = torch.tensor([[*adapter.template.text_ids(TEXT), *whole.ids]])
    with torch.inference_mode():
        logits = tiny_model()(ids).logits[0, -len(whole.ids) - 1 : -1].float()
    expected = logits.log_softmax(dim=-1)
    values, places = expected.topk(4, dim=-1)
    for row, token in enumerate(tokens):
        assert token.logprob == pytest.approx(float(expected[row, token.id]), abs=2e-5)
        assert [other.id for other in token.likeliest] == places[row].tolist()
        assert [other.logprob for other in token.likeliest] == pytest.approx(values[row].tolist(), abs=2e-5)
    assert "".join(pieces) == whole.text
    assert all(token.text in whole.text for token in tokens if BROKEN not in token.text)


def test_log_probabilities_are_the_models_own_whatever_the_temperature(adapter):
    _, cold, _ = reply(adapter, most=1, logprobs=1)
    _, hot, _ = reply(adapter, most=1, logprobs=1, temperature=5.0, top_p=0.5, seed=3)
    assert hot[0].likeliest[0] == cold[0].likeliest[0]


def test_a_seed_repeats_a_sampled_reply(adapter):
    first, again, other = (reply(adapter, temperature=2.0, seed=seed)[2].text for seed in (7, 7, 8))
    assert first == again != other


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"logprobs": MAX_LOGPROBS + 1}, "logprobs is 21"),
        ({"logprobs": -1}, "logprobs is -1"),
        ({"stop": ("",)}, "a stop text is empty"),
        ({"stop": ("x",) * 17}, "17 stop texts"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
    ],
)
def test_what_cannot_be_decoded_is_refused(given, message):
    with pytest.raises(InvalidRequest, match=message):
        check_sampling(Sampling(**given))


def test_a_text_reply_is_read_as_it_is():
    tokenizer = tiny_adapter().tokenizer
    text = "<think>so</think>\n\nIt is."
    read = ReplyReader(tokenizer, PLAIN).read(tokenizer(text)["input_ids"], stopped=True)
    assert (read.answer, read.thoughts) == (text, "")
