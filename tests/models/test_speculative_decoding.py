"""Speculative decoding: the reply is that of decoding token by token, in fewer passes."""

import warnings

import pytest
import torch

from kvweave.answering.generation import Decoded, generate
from kvweave.answering.speculative import PromptLookupDrafter
from kvweave.config import GenerationConfig
from kvweave.errors import InvalidRequest
from kvweave.testing import FAMILIES, end_only_at, tiny_adapter
from support.plain_generation import plain_generation, prompt

COUNT = 8
NO_LOOKUP = GenerationConfig(prompt_lookup_tokens=0)


@pytest.fixture(params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture
def adapter(family):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapter = tiny_adapter(family)
    end_only_at(adapter)
    return adapter


def drafted(adapter, ids, drafts, settings=None, most=COUNT):
    """Return the reply, and the number of model calls after the prompt's."""
    kv_cache = adapter.new_cache(len(ids))
    logits = adapter.compute(kv_cache, ids, adapter.rows(torch.arange(len(ids))))
    decoded, passes = Decoded(), []
    handle = adapter.model.register_forward_pre_hook(lambda *given: passes.append(1))
    try:
        for _ in generate(
            adapter, kv_cache, ids, logits, settings or NO_LOOKUP, most, decoded, drafts=drafts
        ):
            pass
    finally:
        handle.remove()
    return decoded, len(passes)


def other(token):
    return token + 1 if token < 200 else token - 1


def test_no_draft_changes_the_reply(adapter, family):
    ids = prompt(40)
    true = plain_generation(family, ids, COUNT)
    for right in (0, 1, 2, 5, COUNT - 1, COUNT):  # the number of right tokens in the draft
        draft = [*true[:right], *(other(token) for token in true[right:])]
        decoded, passes = drafted(adapter, ids, [draft])
        assert list(decoded.ids) == true, right
        # The first token is decoded before any draft is run, and the last one is not fed back.
        assert decoded.accepted_draft_tokens == max(0, min(right, COUNT - 1) - 1), right
        assert passes == COUNT - 1 - decoded.accepted_draft_tokens, right


@pytest.mark.parametrize("family", ["llama-dynamic", "phi3-longrope"], indirect=True)
def test_no_draft_is_verified_across_a_change_of_frequencies(adapter, family):
    ids = prompt(60)  # of the 64 that the frequencies are trained to
    true = plain_generation(family, ids, COUNT)
    decoded, _ = drafted(adapter, ids, [true])
    assert list(decoded.ids) == true
    assert decoded.accepted_draft_tokens <= COUNT - 1 - (64 - 60 + 1)  # at most those after the change


def test_the_draft_that_starts_like_the_reply_is_verified():
    adapter = tiny_adapter()
    end_only_at(adapter)
    ids = prompt(30)
    true = plain_generation("llama", ids, COUNT)
    wrong = [other(true[0]), *true[1:]]
    decoded, passes = drafted(adapter, ids, [wrong, true])
    assert (list(decoded.ids), passes) == (true, 1)


@pytest.mark.parametrize("end", [1, 3])
def test_a_reply_may_end_within_the_draft_or_continue_after_it(end):
    adapter = tiny_adapter()
    ids = prompt(40)
    end_only_at(adapter)
    true = plain_generation("llama", ids, COUNT)
    longer, _ = drafted(adapter, ids, [true[:end]])
    assert list(longer.ids) == true
    end_only_at(adapter, true[end])
    shorter, passes = drafted(adapter, ids, [true])
    assert list(shorter.ids) == true[: true.index(true[end])]
    assert passes == 1


def test_only_greedy_decoding_uses_drafts():
    adapter = tiny_adapter()
    end_only_at(adapter)
    ids = prompt(40)
    true = plain_generation("llama", ids, COUNT)
    sampled = GenerationConfig(temperature=1.0, seed=3)
    plain, _ = drafted(adapter, ids, [], sampled)
    decoded, passes = drafted(adapter, ids, [true], sampled)
    assert (decoded.ids, decoded.accepted_draft_tokens, passes) == (plain.ids, 0, COUNT - 1)


def test_a_draft_is_cut_to_the_reply_limit():
    adapter = tiny_adapter()
    end_only_at(adapter)
    ids = prompt(40)
    true = plain_generation("llama", ids, COUNT)
    decoded, passes = drafted(adapter, ids, [true], most=3)
    assert (list(decoded.ids), passes) == (true[:3], 1)
    decoded, passes = drafted(adapter, ids, [true], most=1)
    assert (list(decoded.ids), passes) == (true[:1], 0)


def test_prompt_lookup_changes_no_reply(adapter, family):
    for seed in range(2):
        ids = prompt(40, seed)
        true = plain_generation(family, ids, COUNT)
        ids = [
            *ids[:5],
            *true,
            *ids[5 + COUNT :],
        ]  # now the reply is another one, perhaps a quote in part
        true = plain_generation(family, ids, COUNT)
        decoded, passes = drafted(adapter, ids, [true[:3]], GenerationConfig())
        assert list(decoded.ids) == true
        assert passes == COUNT - 1 - decoded.accepted_draft_tokens


def test_a_reply_that_quotes_the_prompt_takes_few_passes():
    """The model repeats one token, and the prompt contains many of them."""
    adapter = tiny_adapter()
    end_only_at(adapter)
    token = plain_generation("llama", prompt(40), 1)[0]
    with torch.no_grad():
        adapter.model.lm_head.weight.zero_()  # every logit is the same, and the first token wins
    ids = [*prompt(20), *[0] * 20, token]
    decoded, passes = drafted(adapter, ids, [], GenerationConfig(), most=19)
    assert list(decoded.ids) == [0] * 19
    assert decoded.accepted_draft_tokens + passes == 18
    assert passes <= 4


@pytest.mark.parametrize("end", [2, None])
def test_the_cache_holds_the_reply_and_no_rejected_tokens_in_the_end(end):
    """Whether the reply ends within a draft, at its limit, or because the caller stops reading."""
    ids, adapter = prompt(40), tiny_adapter()
    end_only_at(adapter)
    true = plain_generation("llama", ids, COUNT)
    if end is not None:
        end_only_at(adapter, true[end])
    for taken in (1, 2, COUNT):
        lengths = []
        for drafts in ([], [true]):
            kv_cache = adapter.new_cache(len(ids))
            logits = adapter.compute(kv_cache, ids, adapter.rows(torch.arange(len(ids))))
            pieces = generate(adapter, kv_cache, ids, logits, NO_LOOKUP, COUNT, Decoded(), drafts=drafts)
            for _ in zip(range(taken), pieces, strict=False):
                pass
            pieces.close()
            lengths.append(kv_cache.get_seq_length())
        assert lengths[0] == lengths[1], taken


@pytest.mark.parametrize("shift", [-20, 20])
def test_a_prompt_with_its_own_positions_is_never_computed_again(shift):
    """A change of frequencies, by its positions, is refused; a prompt after a prefix is not moved to position 0."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapter = tiny_adapter("phi3-longrope")
    end_only_at(adapter)
    ids = prompt(60)
    positions = (torch.arange(60) + shift).clamp(min=0)

    def reply(drafts, most):
        kv_cache = adapter.new_cache(len(ids), positions=positions)
        logits = adapter.compute(kv_cache, ids, adapter.rows(torch.arange(len(ids))))
        decoded = Decoded()
        list(generate(adapter, kv_cache, ids, logits, NO_LOOKUP, most, decoded, drafts=drafts))
        return list(decoded.ids)

    plain = reply([], 10)
    assert reply([plain], 10) == plain
    if shift < 0:  # positions 40 … 49 are below the change at 64, though there are more than 64 tokens
        with pytest.raises(InvalidRequest, match="long RoPE frequencies"):
            reply([], 40)


class TestPromptLookupDrafter:
    def test_the_longest_match_in_the_prompt_is_quoted(self):
        prompt_ids = [1, 2, 3, 4, 9, 2, 3, 5, 3, 6, *[0] * 20, 7]
        assert PromptLookupDrafter(prompt_ids).propose([2, 3])[:1] == [5]  # the last of two matches
        assert PromptLookupDrafter(prompt_ids).propose([1, 2, 3])[:1] == [4]
        assert PromptLookupDrafter(prompt_ids).propose([8, 3])[:1] == [6]
        assert PromptLookupDrafter(prompt_ids).propose([8]) == []
        assert PromptLookupDrafter(prompt_ids).propose([7]) == []  # nothing follows the last token

    def test_an_earlier_reply_is_proposed_while_it_matches(self):
        drafter = PromptLookupDrafter([5, 6, 7], [(5, 8, 9), (5, 6, 1)])
        assert drafter.propose([5]) == [8, 9]
        assert drafter.propose([5, 6]) == [1]
        assert drafter.propose([5, 6, 2]) == []

    def test_the_prompt_is_quoted_after_the_end_of_an_earlier_reply(self):
        assert PromptLookupDrafter([5, 6, 7], [(5,)]).propose([5]) == [6, 7]

    def test_the_draft_length_follows_the_accepted_tokens(self):
        drafter, reply = PromptLookupDrafter([1] * 100), [1] * 20
        first = len(drafter.propose(reply))
        drafter.record(first)
        assert len(drafter.propose(reply)) > first
        for _ in range(10):
            drafter.propose(reply)
            drafter.record(0)
        assert len(drafter.propose(reply)) == 1
        for _ in range(10):
            drafter.record(len(drafter.propose(reply)))
        assert first < len(drafter.propose(reply)) == 31
        assert len(PromptLookupDrafter([1] * 100, max_quote=3).propose(reply)) == 3
        assert len(drafter.propose(reply, room=4)) == 4
        assert drafter.propose(reply, room=0) == []

    def test_a_long_earlier_reply_is_proposed_in_pieces(self):
        drafter, draft = PromptLookupDrafter([], [range(100)]), list(range(100))
        assert drafter.propose([0]) == draft[1:8]
        drafter.record(7)
        assert drafter.propose(draft[:9]) == draft[9:24]

    def test_after_rejected_quotes_a_match_must_be_longer(self):
        drafter = PromptLookupDrafter([5, 1, 2, 9, 4, 2, *[0] * 10])
        assert drafter.propose([2]) != []
        drafter.record(0)
        assert drafter.propose([7, 2]) == []
        assert drafter.propose([1, 2])[:1] == [9]
        drafter.record(0)
        assert drafter.propose([1, 2]) == []
        assert drafter.propose([5, 1, 2])[:1] == [9]
        drafter.record(len(drafter.propose([5, 1, 2])))
        assert drafter.propose([7, 2]) != []

    def test_without_a_source_nothing_is_proposed(self):
        assert (
            PromptLookupDrafter([]).propose([3])
            == PromptLookupDrafter([3, 4], max_quote=0).propose([3])
            == []
        )
