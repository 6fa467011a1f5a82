"""A new model attends to earlier tokens and looks up repeated ones."""

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
    """Different tokens, repeated once, (ROWS, 2 * LENGTH)."""
    generator = torch.Generator().manual_seed(0)
    once = torch.stack([torch.randperm(500, generator=generator)[:LENGTH] + 3 for _ in range(ROWS)])
    return torch.cat([once, once], 1)


@pytest.fixture(scope="module")
def read(model, blocks):
    with torch.no_grad():
        return model(blocks, output_attentions=True)


def weight_after_earlier(weights: torch.Tensor, distance: int) -> float:
    """Return the mean weight on the token `distance` positions after the earlier occurrence.

    `weights` are (B, 2 * LENGTH, 2 * LENGTH).
    """
    rows = torch.arange(LENGTH + 2, 2 * LENGTH - 2)
    return float(weights[:, rows, rows - LENGTH + distance].mean())


@pytest.mark.parametrize("head", [0, 1, 2])
def test_the_first_layers_heads_attend_one_two_and_three_tokens_back(read, head):
    back = {
        distance: float(read.attentions[0][:, head].diagonal(-distance, 1, 2)[:, 8:].mean())
        for distance in range(6)
    }
    assert max(back, key=back.get) == head + 1
    assert back[head + 1] > 0.5


def test_the_next_layers_heads_attend_to_the_token_after_an_earlier_occurrence(read):
    by_token, again, by_previous, _ = read.attentions[1].unbind(1)
    for weights, least in ((by_token, 0.1), (again, 0.1), (by_previous, 0.3)):
        found = {distance: weight_after_earlier(weights, distance) for distance in range(-2, 4)}
        assert max(found, key=found.get) == 1
        assert found[1] > least > 4 / LENGTH / 2


def test_they_match_and_copy_in_every_layer(model, read):
    assert all(weight_after_earlier(layer[:, 2], 1) > 1.2 / LENGTH / 2 for layer in read.attentions[1:])


def test_the_found_token_is_predicted_next(read, blocks):
    chosen = read.logits.log_softmax(-1)[:, :-1].gather(-1, blocks[:, 1:, None])[..., 0]
    first, second = chosen[:, 4 : LENGTH - 1], chosen[:, LENGTH + 4 :]
    assert second.mean() > first.mean() + 0.05


def test_initial_weights_depend_on_the_seed_only(model, vocabulary):
    again, other = new_model(vocabulary, 0).state_dict(), new_model(vocabulary, 1).state_dict()
    matches = [
        all(torch.equal(kept, one[name]) for name, kept in model.state_dict().items())
        for one in (again, other)
    ]
    assert sorted(matches) == [False, True]
