"""A training row computes what the ordinary model computes on each of its prompts, in the ids of the prompt template."""

import random
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from training.documents import Document
from training.network import hidden_states, rotation
from training.rows import COPY, RowMaker, Rows, Shape
from transformers import LlamaConfig, LlamaForCausalLM

from kvweave.core import Prompt
from kvweave.models.template import PromptTemplate
from kvweave.testing import VOCABULARY, tiny_tokenizer
from training import abilities

SHAPE = Shape(context=900, questions=500, chunks=(2, 4), chunk_tokens=(150, 220), sparse=0.2, easy=0.3)
THETA, WIDTH, ROWS = 100_000.0, 16, 3
TOLERANCE = 0.1  # matrix products in bfloat16 on normalised states of size about 1; a wrong mask is off by more than 1


@dataclass
class Batch:
    """Rows, and what they were made from."""

    rows: Rows
    documents: list[Document]
    questions: list[list]
    tasks: list[str]

    def segments(self, row: int) -> list[torch.Tensor]:
        """Places of each question of a row."""
        segments = self.rows.segments[row]
        return [(segments == number).nonzero().flatten() for number in range(1, int(segments.max()) + 1)]

    def length(self, row: int) -> int:
        """Tokens of a row's context."""
        return int((self.rows.segments[row] == 0).sum())


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


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


@pytest.fixture(scope="module")
def batch(tokenizer) -> Batch:
    """Rows of documents, with the documents they were made from."""
    documents, questions = [], []
    maker = RowMaker(tokenizer, random.Random(0))
    write, able = maker._writer.document, abilities.questions

    def writing(*args, **kwargs):
        documents.append(write(*args, **kwargs))
        questions.append(list(documents[-1].questions))
        return documents[-1]

    def also(rng, document):
        more = able(rng, document)
        questions[-1].extend(more)
        return more

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(maker._writer, "document", writing)
        patch.setattr(abilities, "questions", also)
        rows = maker.batch(SHAPE, [str(row) for row in range(ROWS)], copying=0.0)
    assert len(documents) == ROWS, "a document did not fit; take a larger context"
    return Batch(rows, documents, questions, maker.tasks)


def states(model: LlamaForCausalLM, rows: Rows, context: int) -> torch.Tensor:
    cos, sin = (part[rows.positions][:, None] for part in rotation(2048, WIDTH, THETA))
    with torch.no_grad():
        return hidden_states(model, rows.ids, cos, sin, rows.segments, context)[0]


def ordinary(model: LlamaForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model.model(ids[None]).last_hidden_state[0]


class TestTheForwardPass:
    def test_every_question_has_the_states_of_a_prompt_of_its_own(self, model, batch):
        computed = states(model, batch.rows, SHAPE.context)
        for row in range(ROWS):
            length = batch.length(row)
            assert len(batch.segments(row)) >= 2  # one at the start, others behind it
            for places in batch.segments(row):
                ids = torch.cat([batch.rows.ids[row, :length], batch.rows.ids[row, places]])
                expected = ordinary(model, ids)
                assert (computed[row, :length] - expected[:length]).abs().max() < TOLERANCE
                assert (computed[row, places] - expected[length:]).abs().max() < TOLERANCE

    def test_the_tolerance_would_show_a_question_that_sees_another(self, model, batch):
        together = Rows(**{name: getattr(batch.rows, name) for name in Rows.__slots__})
        together.segments = batch.rows.segments.clamp(max=1)
        computed = states(model, together, SHAPE.context)
        places = batch.segments(0)[-1]
        expected = states(model, batch.rows, SHAPE.context)
        assert (computed[0, places] - expected[0, places]).abs().max() > 5 * TOLERANCE

    def test_contexts_of_several_blocks_are_causal(self, model, monkeypatch):
        ids = torch.randint(3, VOCABULARY, (1, 70), generator=torch.Generator().manual_seed(1))
        rows = Rows(ids, torch.arange(70)[None], torch.zeros_like(ids), None, None, None, 70)
        rows.segments[:, 60:] = 1
        for block in (16, 25, 60):
            monkeypatch.setattr("training.network.BLOCK", block)
            assert (states(model, rows, 60)[0] - ordinary(model, ids[0])).abs().max() < TOLERANCE

    def test_a_row_that_only_repeats_is_causal(self, model, tokenizer):
        rows = RowMaker(tokenizer, random.Random(1)).batch(
            Shape(60, 60, (2, 2), (30, 40), 0, 0), ["one"], copying=1.0
        )
        assert (states(model, rows, 60)[0] - ordinary(model, rows.ids[0])).abs().max() < TOLERANCE


class TestRows:
    def test_ids_are_the_prompt_templates(self, batch, tokenizer):
        template = PromptTemplate(tokenizer)
        for row, (document, questions) in enumerate(zip(batch.documents, batch.questions, strict=True)):
            context = batch.rows.ids[row, : batch.length(row)].tolist()
            prompts = {
                (
                    *template.render(Prompt(q.text, tuple(document.chunks))).token_ids,
                    *replied(tokenizer, q.reply),
                )
                for q in questions
            }
            made = [(*context, *batch.rows.ids[row, places].tolist()) for places in batch.segments(row)]
            assert set(made) <= prompts
            assert len(set(made)) == len(made) > 0

    def test_positions_go_on_behind_the_context(self, batch):
        for row in range(ROWS):
            length = batch.length(row)
            assert batch.rows.positions[row, :length].tolist() == list(range(length))
            for places in batch.segments(row):
                assert batch.rows.positions[row, places].tolist() == list(range(length, length + len(places)))

    def test_only_replies_and_some_of_the_context_are_targets(self, batch, tokenizer):
        template = PromptTemplate(tokenizer)
        for row, questions in enumerate(batch.questions):
            weights = batch.rows.weights[row]
            assert weights[0] == 0
            share = float((weights[: batch.length(row)] > 0).float().mean())
            assert 0.15 < share < 0.35
            assert weights[: batch.length(row)].max() < 0.3 <= weights[weights >= 0.3].min()
            for places in batch.segments(row):
                ids = tuple(batch.rows.ids[row, places].tolist())
                replies = {asked(template, q.text): replied(tokenizer, q.reply) for q in questions}
                (lead,) = (lead for lead, reply in replies.items() if (*lead, *reply) == ids)
                assert weights[places[: len(lead)]].max() == 0
                assert weights[places[len(lead) :]].min() > 0
                tasks = batch.rows.tasks[row, places]
                assert tasks[: len(lead)].max() == -1
                named = {batch.tasks[number] for number in tasks[len(lead) : -1].tolist()}
                assert named <= {q.task for q in questions if asked(template, q.text) == lead}
                assert len(named) == 1

    def test_padding_is_no_target_and_is_not_counted(self, batch):
        padding = batch.rows.segments == -1
        assert batch.rows.weights[padding].max() == 0
        assert batch.rows.tasks[padding].max() == -1
        assert batch.rows.tokens == int((~padding).sum())

    def test_equal_generators_make_equal_rows(self, tokenizer):
        one, two = (
            RowMaker(tokenizer, random.Random(3)).batch(SHAPE, ["one"], copying=0.5) for _ in range(2)
        )
        assert torch.equal(one.ids, two.ids)
        assert torch.equal(one.weights, two.weights)

    def test_repetition_rows_ask_only_for_what_stood_there_before(self, tokenizer):
        maker = RowMaker(tokenizer, random.Random(2))
        rows = maker.batch(SHAPE, [str(row) for row in range(12)], copying=1.0)
        assert maker.tasks[0] == COPY
        assert rows.tokens == rows.ids.numel()
        for ids, weights, tasks in zip(
            rows.ids.tolist(), rows.weights.tolist(), rows.tasks.tolist(), strict=True
        ):
            wanted = [place for place, weight in enumerate(weights) if weight > 0]
            assert wanted == [place for place, task in enumerate(tasks) if task == 0]
            assert len(wanted) > len(ids) / 3
            seen: set[tuple[int, int]] = set()
            repeated = set()
            for place, pair in enumerate(pairwise(ids), 1):
                if pair in seen:
                    repeated.add(place)
                seen.add(pair)
            assert set(wanted) <= repeated


def asked(template: PromptTemplate, question: str) -> tuple[int, ...]:
    rendered = template.render(Prompt(question, ()))
    return rendered.token_ids[rendered.spans[-1].start :]


def replied(tokenizer, reply: str) -> tuple[int, ...]:
    return (*tokenizer(reply, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id)
