"""A fresh model looks back and looks up."""

import pytest
import torch

from training.plan import new_model

LENGTH, ROWS = 40, 8


@pytest.fixture(scope="module", params=[0, 1])
def model(request, vocabulary):
    fresh = new_model(vocabulary, request.param).eval()
    fresh.set_attn_implementation("eager")
    return fresh


@pytest.fixture(scope="module")
def blocks() -> torch.Tensor:
    """(ROWS, 2 * LENGTH): different tokens, and then the same ones once more."""
    generator = torch.Generator().manual_seed(0)
    once = torch.stack([torch.randperm(500, generator=generator)[:LENGTH] + 3 for _ in range(ROWS)])
    return torch.cat([once, once], 1)


@pytest.fixture(scope="module")
def read(model, blocks):
    with torch.no_grad():
        return model(blocks, output_attentions=True)


def behind_earlier(weights: torch.Tensor, distance: int) -> float:
    """Mean weight (B, 2 * LENGTH, 2 * LENGTH) on the token so many places behind the earlier one of the same kind."""
    rows = torch.arange(LENGTH + 2, 2 * LENGTH - 2)
    return float(weights[:, rows, rows - LENGTH + distance].mean())


@pytest.mark.parametrize("head", [0, 1, 2])
def test_the_first_layers_heads_look_one_two_and_three_tokens_back(read, head):
    back = {
        distance: float(read.attentions[0][:, head].diagonal(-distance, 1, 2)[:, 8:].mean())
        for distance in range(6)
    }
    assert max(back, key=back.get) == head + 1
    assert back[head + 1] > 0.5


def test_the_next_layers_heads_find_what_came_after_an_earlier_occurrence(read):
    by_token, again, by_previous, _ = read.attentions[1].unbind(1)
    for weights, least in ((by_token, 0.1), (again, 0.1), (by_previous, 0.3)):
        found = {distance: behind_earlier(weights, distance) for distance in range(-2, 4)}
        assert max(found, key=found.get) == 1
        assert found[1] > least > 4 / LENGTH / 2


def test_they_match_and_copy_in_every_layer(model, read):
    assert all(behind_earlier(layer[:, 2], 1) > 1.2 / LENGTH / 2 for layer in read.attentions[1:])


def test_what_was_found_is_expected_next(read, blocks):
    chosen = read.logits.log_softmax(-1)[:, :-1].gather(-1, blocks[:, 1:, None])[..., 0]
    first, second = chosen[:, 4 : LENGTH - 1], chosen[:, LENGTH + 4 :]
    assert second.mean() > first.mean() + 0.05


def test_the_start_is_a_function_of_the_seed(model, vocabulary):
    again, other = new_model(vocabulary, 0).state_dict(), new_model(vocabulary, 1).state_dict()
    matches = [
        all(torch.equal(kept, one[name]) for name, kept in model.state_dict().items())
        for one in (again, other)
    ]
    assert sorted(matches) == [False, True]
