"""A training row gives the results of the unmodified model on each of its prompts."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvweave.testing import VOCABULARY
from training import attention, network
from training.network import FUSED_FROM, hidden_states, question_attention, rotation
from training.rows import RowMaker, Rows
from training.shape import Shape

THETA, WIDTH = 100_000.0, 16
TOLERANCES = {"bfloat16": 0.1, "float32": 1e-3}
"""By dtype of matrix products, for normalised states of size about 1; a wrong mask differs by more than 1."""


@pytest.fixture(params=TOLERANCES, autouse=True)
def tolerance(request, monkeypatch) -> float:
    """The tolerance on a CPU with bfloat16 units, and on one without."""
    monkeypatch.setattr("training.network.BFLOAT16_ON_CPU", request.param == "bfloat16")
    return TOLERANCES[request.param]


@pytest.fixture(params=[FUSED_FROM, 1], ids=["blocks", "fused"])
def fused_from(request, monkeypatch):
    """Attention in blocks, or by PyTorch's kernel."""
    monkeypatch.setattr("training.network.FUSED_FROM", request.param)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=WIDTH,
        tie_word_embeddings=True,
        initializer_range=0.15,
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
    )
    return LlamaForCausalLM(config).eval()


def states(model: LlamaForCausalLM, rows: Rows, context: int) -> torch.Tensor:
    cos, sin = (part[rows.positions][:, None] for part in rotation(2048, WIDTH, THETA))
    with torch.no_grad():
        return hidden_states(model, rows.ids, cos, sin, rows.segments, context)[0]


def unmodified(model: LlamaForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model.model(ids[None]).last_hidden_state[0]


@pytest.mark.usefixtures("fused_from")
def test_every_question_has_the_hidden_states_of_its_prompt(model, batch, tolerance):
    computed = states(model, batch.rows, batch.shape.context)
    for row in range(len(batch.documents)):
        length = batch.length(row)
        assert len(batch.segments(row)) >= 2  # at least one question is not the first
        for places in batch.segments(row):
            ids = torch.cat([batch.rows.ids[row, :length], batch.rows.ids[row, places]])
            expected = unmodified(model, ids)
            assert (computed[row, :length] - expected[:length]).abs().max() < tolerance
            assert (computed[row, places] - expected[length:]).abs().max() < tolerance


def test_the_tolerance_detects_a_question_that_attends_to_another(model, batch):
    together = Rows(**{name: getattr(batch.rows, name) for name in Rows.__slots__})
    together.segments = batch.rows.segments.clamp(max=1)
    computed = states(model, together, batch.shape.context)
    places = batch.segments(0)[-1]
    expected = states(model, batch.rows, batch.shape.context)
    assert (computed[0, places] - expected[0, places]).abs().max() > 0.5


def test_contexts_of_several_blocks_are_causal(model, monkeypatch, tolerance):
    rows = Rows.empty(1, 70)
    rows.ids = torch.randint(3, VOCABULARY, (1, 70), generator=torch.Generator().manual_seed(1))
    rows.segments[:, :60], rows.segments[:, 60:] = 0, 1
    for block in (16, 25, 60):
        monkeypatch.setattr("training.attention.BLOCK", block)
        assert (states(model, rows, 60)[0] - unmodified(model, rows.ids[0])).abs().max() < tolerance


@pytest.mark.parametrize(("block", "asked"), [(7, 13), (16, 32), (100, 20), (16, 0)])
def test_attention_in_blocks_and_its_gradients_are_those_of_the_fused_kernel(
    monkeypatch, tolerance, block, asked
):
    monkeypatch.setattr("training.attention.BLOCK", block)
    torch.manual_seed(0)
    segments = torch.zeros(2, 40 + asked, dtype=torch.long)
    segments[0, 35:40] = -1
    segments[:, 40:] = torch.arange(asked) // 5 + 1
    mask = network.mask_of(segments, 40)
    parts = [torch.randn(2, heads, 40 + asked, WIDTH) for heads in (4, 2, 2, 4)]
    *inputs, grad = (part.to(mask.dtype).requires_grad_() for part in parts)
    computed, expected = (
        [out := attend(*inputs, mask), *torch.autograd.grad(out, inputs, grad.detach())]
        for attend in (attention.blockwise_attention, attention.fused_attention)
    )
    for own, fused in zip(computed, expected, strict=True):
        assert (own - fused).abs().max() < tolerance * fused.abs().max() / 2


@pytest.mark.usefixtures("fused_from")
def test_a_repetition_row_is_causal(model, tokenizer, tolerance):
    rows = RowMaker(tokenizer).batch(Shape(60, 60, (2, 2), (30, 40), 0, 0), ["one"], copying=1.0)
    assert (states(model, rows, 60)[0] - unmodified(model, rows.ids[0])).abs().max() < tolerance


@pytest.mark.usefixtures("fused_from")
def test_attention_to_the_chunks_is_that_of_the_unmodified_models_last_layer(model, batch):
    context, length = batch.shape.context, batch.length(0)
    chunks = torch.zeros(len(batch.documents), context, dtype=torch.bool)
    chunks[:, 20:length] = True
    cos, sin = (part[batch.rows.positions][:, None] for part in rotation(2048, WIDTH, THETA))
    model.set_attn_implementation("eager")
    with torch.no_grad():
        attended = question_attention(model, batch.rows.ids, cos, sin, batch.rows.segments, chunks, context)[
            0
        ]
        for places in batch.segments(0):
            ids = torch.cat([batch.rows.ids[0, :length], batch.rows.ids[0, places]])
            by_head = model(ids[None], output_attentions=True).attentions[-1][0, :, length:, 20:length]
            expected = (by_head / by_head.sum(-1, keepdim=True)).mean(0)
            off = (attended[places - context, 20:length] - expected).abs().sum(-1)
            uneven = (expected - 1 / (length - 20)).abs().sum(-1)
            assert off.max() < 0.03 < 0.2 < uneven.min()
    assert attended[:, :20].max() == 0
