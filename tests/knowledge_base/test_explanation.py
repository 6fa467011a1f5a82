"""The origin of every token of a prompt, as explained after the answer."""

from collections import Counter

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kvweave.answering.answer_stream import Answered, explain
from kvweave.errors import InvalidRequest
from kvweave.results import Answer, Plan, PlanSpan, Timing
from kvweave.testing import tiny_adapter
from kvweave.types import Prompt, Span, TokenizedPrompt


def answered(ids, tokenizer, selected=()):
    """Return an answer whose prompt has three spans: exact, reused, fresh."""
    a, b, end = len(ids) // 3, 2 * len(ids) // 3, len(ids)
    spans = [("system", 0, a, "exact"), ("chunk", a, b, "reused"), ("question", b, end, "fresh")]
    plan = Plan(
        "some",
        0.5,
        tuple(
            PlanSpan(kind, start, stop, origin, sum(start <= row < stop for row in selected), "")
            for kind, start, stop, origin in spans
        ),
    )
    prompt = TokenizedPrompt(tuple(ids), tuple(Span(*span[:3]) for span in spans), (b, end))
    whole = Answer("", (), plan, Timing())
    return Answered(whole, prompt, torch.tensor(selected, dtype=torch.long), tokenizer=tokenizer)


def metaspace_tokenizer():
    """A tokenizer as of SentencePiece models: the space belongs to the word, and decoding drops the first one."""
    words = ["<unk>", "▁The", "▁inn", "▁is", "▁north", "ern", "."]
    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def test_origins_of_tokens_agree_with_the_plan():
    one = answered(range(10, 22), tiny_adapter().tokenizer, selected=[0, 5, 7])
    origins = [token.origin for token in explain(one)]
    assert origins == [
        *("recomputed", "exact", "exact", "exact"),
        *("reused", "recomputed", "reused", "recomputed"),
        *("fresh",) * 4,
    ]
    plan, counts = one.answer.plan, Counter(origins)
    assert counts == {
        "exact": plan.exact_tokens,
        "reused": plan.reused_tokens,
        "recomputed": plan.recomputed_tokens,
        "fresh": plan.fresh_tokens,
    }


@pytest.mark.parametrize(
    "text", ["The inn is here.\n\n  Two.", "Zoë 世界 \U0001f469\u200d\U0001f52c ends", "x" * 60]
)
def test_the_texts_of_all_tokens_make_the_prompt(text):
    adapter = tiny_adapter()
    ids = adapter.template.render(Prompt("Where?", (text, "More."))).token_ids
    tokens = explain(answered(ids, adapter.tokenizer))
    assert "".join(token.text for token in tokens) == adapter.tokenizer.decode(ids)
    assert [token.id for token in tokens] == list(ids)
    assert all("\ufffd" not in token.text for token in tokens)


def test_incomplete_bytes_are_shown_as_broken():
    adapter = tiny_adapter()
    ids = [*adapter.template.tokenize("世")[:1], *adapter.template.tokenize("abc")]
    tokens = explain(answered(ids, adapter.tokenizer))
    assert "".join(token.text for token in tokens) == "\ufffdabc"


def test_a_space_belongs_to_the_word_after_it():
    tokens = explain(answered([1, 2, 3, 4, 5, 6], metaspace_tokenizer()))
    assert [token.text for token in tokens] == ["The", " inn", " is", " north", "ern", "."]


def test_a_finished_stream_explains_its_tokens(open_kb, documents):
    base = open_kb()
    base.add(documents)
    stream = base.stream("What is the password of Glorric?", recipe="prophetkv", ratio=0.3)
    with pytest.raises(InvalidRequest, match="not finished"):
        stream.explain()
    for _ in stream:
        pass
    tokens, plan = stream.explain(), stream.answer.plan
    assert Counter(token.origin for token in tokens)["recomputed"] == plan.recomputed_tokens > 0
    text = "".join(token.text for token in tokens)
    assert all(source.text in text for source in stream.answer.sources)
