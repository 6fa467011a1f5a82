"""Drafts of a reply, and what the prompt tells of it: what comes out is what decoding token by token gives, in fewer passes."""

import warnings

import pytest
import torch
from test_decoding import plainly, prompt

from kvweave.config import GenerationConfig
from kvweave.engine.generation import Decoded, generate
from kvweave.engine.speculative import PromptLookupDrafter
from kvweave.errors import InvalidRequest
from kvweave.testing import FAMILIES, tiny_adapter

COUNT = 8
DRAFTS_ALONE = GenerationConfig(prompt_lookup_tokens=0)


@pytest.fixture(params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture
def adapter(family):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapter = tiny_adapter(family)
    adapter.model.generation_config.eos_token_id = []
    return adapter


def drafted(adapter, ids, drafts, settings=None, most=COUNT):
    """The reply, and how many calls of the model there were behind the prompt's."""
    kv_cache = adapter.new_cache(len(ids))
    logits = adapter.compute(kv_cache, ids, adapter.rows(torch.arange(len(ids))))
    decoded, passes = Decoded(), []
    handle = adapter.model.register_forward_pre_hook(lambda *given: passes.append(1))
    try:
        for _ in generate(
            adapter, kv_cache, ids, logits, settings or DRAFTS_ALONE, most, decoded, drafts=drafts
        ):
            pass
    finally:
        handle.remove()
    return decoded, len(passes)


def other(token):
    return token + 1 if token < 200 else token - 1


def test_whatever_the_draft_the_reply_is_the_same(adapter, family):
    ids = prompt(40)
    true = plainly(family, ids, COUNT)
    for right in range(COUNT + 1):  # so many tokens of the draft are right
        draft = [*true[:right], *(other(token) for token in true[right:])]
        decoded, passes = drafted(adapter, ids, [draft])
        assert list(decoded.ids) == true, right
        # The first token is decoded before any draft is run, and the last one is not fed back.
        assert decoded.accepted_draft_tokens == max(0, min(right, COUNT - 1) - 1), right
        assert passes == COUNT - 1 - decoded.accepted_draft_tokens, right


@pytest.mark.parametrize("family", ["llama-dynamic", "phi3-longrope"], indirect=True)
def test_where_decoding_changes_frequencies_on_the_way_no_draft_is_run_across(adapter, family):
    ids = prompt(60)  # of the 64 that the frequencies are for
    true = plainly(family, ids, COUNT)
    decoded, _ = drafted(adapter, ids, [true])
    assert list(decoded.ids) == true
    assert decoded.accepted_draft_tokens <= COUNT - 1 - (64 - 60 + 1)  # behind the change at most


def test_the_draft_that_begins_as_the_reply_does_is_checked():
    adapter = tiny_adapter()
    adapter.model.generation_config.eos_token_id = []
    ids = prompt(30)
    true = plainly("llama", ids, COUNT)
    wrong = [other(true[0]), *true[1:]]
    decoded, passes = drafted(adapter, ids, [wrong, true])
    assert (list(decoded.ids), passes) == (true, 1)


@pytest.mark.parametrize("end", [1, 3])
def test_a_reply_that_ends_within_the_draft_or_goes_on_behind_it(end):
    adapter = tiny_adapter()
    ids = prompt(40)
    adapter.model.generation_config.eos_token_id = []
    true = plainly("llama", ids, COUNT)
    longer, _ = drafted(adapter, ids, [true[:end]])
    assert list(longer.ids) == true
    adapter.model.generation_config.eos_token_id = [true[end]]
    shorter, passes = drafted(adapter, ids, [true])
    assert list(shorter.ids) == true[: true.index(true[end])]
    assert passes == 1


def test_only_greedy_decoding_takes_a_draft():
    adapter = tiny_adapter()
    adapter.model.generation_config.eos_token_id = []
    ids = prompt(40)
    true = plainly("llama", ids, COUNT)
    sampled = GenerationConfig(temperature=1.0, seed=3)
    plain, _ = drafted(adapter, ids, [], sampled)
    decoded, passes = drafted(adapter, ids, [true], sampled)
    assert (decoded.ids, decoded.accepted_draft_tokens, passes) == (plain.ids, 0, COUNT - 1)


def test_a_draft_is_cut_to_the_room_there_is():
    adapter = tiny_adapter()
    adapter.model.generation_config.eos_token_id = []
    ids = prompt(40)
    true = plainly("llama", ids, COUNT)
    decoded, passes = drafted(adapter, ids, [true], most=3)
    assert (list(decoded.ids), passes) == (true[:3], 1)
    decoded, passes = drafted(adapter, ids, [true], most=1)
    assert (list(decoded.ids), passes) == (true[:1], 0)


def test_what_the_prompt_tells_changes_no_reply(adapter, family):
    for seed in range(4):
        ids = prompt(40, seed)
        true = plainly(family, ids, COUNT)
        ids = [
            *ids[:5],
            *true,
            *ids[5 + COUNT :],
        ]  # now the model says something else, part of it perhaps from there
        true = plainly(family, ids, COUNT)
        decoded, passes = drafted(adapter, ids, [true[:3]], GenerationConfig())
        assert list(decoded.ids) == true
        assert passes == COUNT - 1 - decoded.accepted_draft_tokens


def test_a_reply_that_repeats_itself_in_the_prompt_comes_in_few_passes():
    """A model that says one token for ever, and a prompt that holds many of it."""
    adapter = tiny_adapter()
    adapter.model.generation_config.eos_token_id = []
    token = plainly("llama", prompt(40), 1)[0]
    with torch.no_grad():
        adapter.model.lm_head.weight.zero_()  # every logit is the same, and the first token wins
    ids = [*prompt(20), *[0] * 20, token]
    decoded, passes = drafted(adapter, ids, [], GenerationConfig(), most=19)
    assert list(decoded.ids) == [0] * 19
    assert decoded.accepted_draft_tokens + passes == 18
    assert passes <= 4


@pytest.mark.parametrize("end", [2, None])
def test_the_kv_cache_holds_the_reply_and_nothing_else_in_the_end(end):
    """However it ends: by itself within what was told, at its limit, or since nobody wants more."""
    ids, adapter = prompt(40), tiny_adapter()
    adapter.model.generation_config.eos_token_id = []
    true = plainly("llama", ids, COUNT)
    if end is not None:
        adapter.model.generation_config.eos_token_id = [true[end]]
    for taken in (1, 2, COUNT):
        lengths = []
        for drafts in ([], [true]):
            kv_cache = adapter.new_cache(len(ids))
            logits = adapter.compute(kv_cache, ids, adapter.rows(torch.arange(len(ids))))
            pieces = generate(adapter, kv_cache, ids, logits, DRAFTS_ALONE, COUNT, Decoded(), drafts=drafts)
            for _ in zip(range(taken), pieces, strict=False):
                pass
            pieces.close()
            lengths.append(kv_cache.get_seq_length())
        assert lengths[0] == lengths[1], taken


@pytest.mark.parametrize("shift", [-20, 20])
def test_a_prompt_with_positions_of_its_own_is_never_made_another_one(shift):
    """Where frequencies change, by its positions, it is refused; a prompt behind others is not moved to its front."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapter = tiny_adapter("phi3-longrope")
    adapter.model.generation_config.eos_token_id = []
    ids = prompt(60)
    positions = (torch.arange(60) + shift).clamp(min=0)

    def reply(drafts, most):
        kv_cache = adapter.new_cache(len(ids), positions=positions)
        logits = adapter.compute(kv_cache, ids, adapter.rows(torch.arange(len(ids))))
        decoded = Decoded()
        list(generate(adapter, kv_cache, ids, logits, DRAFTS_ALONE, most, decoded, drafts=drafts))
        return list(decoded.ids)

    plain = reply([], 10)
    assert reply([plain], 10) == plain
    if shift < 0:  # 40 … 49 stand below the change at 64, though there are more than 64 tokens
        with pytest.raises(InvalidRequest, match="long frequencies"):
            reply([], 40)


class TestForetelling:
    def test_the_prompt_tells_what_followed_where_it_agrees_longest(self):
        prompt_ids = [1, 2, 3, 4, 9, 2, 3, 5, 3, 6, *[0] * 20, 7]
        assert PromptLookupDrafter(prompt_ids).next([2, 3])[:1] == [5]  # the last of two such places
        assert PromptLookupDrafter(prompt_ids).next([1, 2, 3])[:1] == [4]
        assert PromptLookupDrafter(prompt_ids).next([8, 3])[:1] == [6]
        assert PromptLookupDrafter(prompt_ids).next([8]) == []
        assert PromptLookupDrafter(prompt_ids).next([7]) == []  # nothing stands behind the last one

    def test_a_draft_comes_first_as_long_as_it_is_the_reply(self):
        telling = PromptLookupDrafter([5, 6, 7], [(5, 8, 9), (5, 6, 1)])
        assert telling.next([5]) == [8, 9]
        assert telling.next([5, 6]) == [1]
        assert telling.next([5, 6, 2]) == []

    def test_a_draft_that_has_come_to_its_end_leaves_the_rest_to_the_prompt(self):
        assert PromptLookupDrafter([5, 6, 7], [(5,)]).next([5]) == [6, 7]

    def test_the_more_stands_the_more_is_told(self):
        telling, said = PromptLookupDrafter([1] * 100), [1] * 20
        first = len(telling.next(said))
        telling.held(first)
        assert len(telling.next(said)) > first
        for _ in range(10):
            telling.next(said)
            telling.held(0)
        assert len(telling.next(said)) == 1
        for _ in range(10):
            telling.held(len(telling.next(said)))
        assert first < len(telling.next(said)) == 31
        assert len(PromptLookupDrafter([1] * 100, most_quoted=3).next(said)) == 3
        assert len(telling.next(said, room=4)) == 4
        assert telling.next(said, room=0) == []

    def test_a_long_draft_is_told_piece_by_piece(self):
        telling, draft = PromptLookupDrafter([], [range(100)]), list(range(100))
        assert telling.next([0]) == draft[1:8]
        telling.held(7)
        assert telling.next(draft[:9]) == draft[9:24]

    def test_after_guesses_that_began_wrong_a_place_has_to_agree_with_more(self):
        telling = PromptLookupDrafter([5, 1, 2, 9, 4, 2, *[0] * 10])
        assert telling.next([2]) != []
        telling.held(0)
        assert telling.next([7, 2]) == []
        assert telling.next([1, 2])[:1] == [9]
        telling.held(0)
        assert telling.next([1, 2]) == []
        assert telling.next([5, 1, 2])[:1] == [9]
        telling.held(len(telling.next([5, 1, 2])))
        assert telling.next([7, 2]) != []

    def test_nothing_is_told_from_nothing(self):
        assert PromptLookupDrafter([]).next([3]) == PromptLookupDrafter([3, 4], most_quoted=0).next([3]) == []
