"""A row has the ids of the prompt template, and targets at the right positions."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from kvweave.models.prompt import PromptTemplate
from kvweave.types import Prompt
from training.rows import COPY, COUNTED, RowMaker, Rows
from training.shape import Shape

SHAPE = Shape(context=900, questions=300, chunks=(2, 4), chunk_tokens=(150, 220), sparse=0.2, easy=0.3)


@pytest.fixture(scope="module")
def maker(tokenizer) -> RowMaker:
    return RowMaker(tokenizer)


def lead_ids(template: PromptTemplate, question: str) -> tuple[int, ...]:
    rendered = template.render(Prompt(question, ()))
    return rendered.token_ids[rendered.spans[-1].start :]


def reply_ids(tokenizer: PreTrainedTokenizerBase, reply: str) -> tuple[int, ...]:
    return (*tokenizer(reply, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id)


def tensors_of(rows: Rows, row: int) -> list[torch.Tensor]:
    return [getattr(rows, name)[row] for name in Rows.__slots__ if name != "tokens"]


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, one, other))


def test_ids_are_the_prompt_templates(batch, tokenizer):
    template = PromptTemplate(tokenizer)
    for row, (document, questions) in enumerate(zip(batch.documents, batch.questions, strict=True)):
        context = batch.rows.ids[row, : batch.length(row)].tolist()
        prompts = {
            (
                *template.render(Prompt(q.text, tuple(document.chunks))).token_ids,
                *reply_ids(tokenizer, q.reply),
            )
            for q in questions
        }
        found = [(*context, *batch.rows.ids[row, places].tolist()) for places in batch.segments(row)]
        assert set(found) <= prompts
        assert len(set(found)) == len(found) > 0


def test_positions_continue_after_the_context(batch):
    for row in range(len(batch.documents)):
        length = batch.length(row)
        assert batch.rows.positions[row, :length].tolist() == list(range(length))
        for places in batch.segments(row):
            assert batch.rows.positions[row, places].tolist() == list(range(length, length + len(places)))


def test_only_replies_and_some_of_the_context_are_targets(batch, tokenizer):
    template = PromptTemplate(tokenizer)
    for row, questions in enumerate(batch.questions):
        weights = batch.rows.weights[row]
        assert weights[0] == 0
        share = float((weights[: batch.length(row)] > 0).float().mean())
        assert 0.15 < share < 0.35
        assert weights[: batch.length(row)].max() < 0.3 <= weights[weights >= 0.3].min()
        for places in batch.segments(row):
            ids = tuple(batch.rows.ids[row, places].tolist())
            replies = {lead_ids(template, q.text): reply_ids(tokenizer, q.reply) for q in questions}
            (lead,) = (lead for lead, reply in replies.items() if (*lead, *reply) == ids)
            assert weights[places[: len(lead)]].max() == 0
            assert weights[places[len(lead) :]].min() > 0
            assert not batch.tasks(row, places[: len(lead)])
            (task,) = batch.tasks(row, places[len(lead) : -1])
            assert task in {q.task for q in questions if lead_ids(template, q.text) == lead}


def test_padding_is_no_target_and_is_not_counted(batch):
    padding = batch.rows.segments == -1
    assert batch.rows.weights[padding].max() == 0
    assert batch.rows.tasks[padding].max() == -1
    assert batch.rows.tokens == int((~padding).sum())


def test_hints_are_at_the_last_two_tokens_of_every_referring_sentence(batch, tokenizer):
    hinted = 0
    for row, document in enumerate(batch.documents):
        hints = batch.rows.hints[row]
        leads = {
            text: tokenizer(word, add_special_tokens=False)["input_ids"][0]
            for text, word in document.refers.items()
            if any(text in chunk for chunk in document.chunks)
        }
        places = (hints >= 0).nonzero().flatten().tolist()
        assert len(places) == 2 * len(leads)
        for first, last in zip(places[::2], places[1::2], strict=True):
            read = tokenizer.decode(batch.rows.ids[row, : last + 1])
            (text,) = (text for text in leads if read.endswith(text))
            assert first == last - 1
            assert hints[first] == hints[last] == leads.pop(text)
            hinted += 1
    assert hinted > 5


def test_hints_may_name_the_owner_at_all_tokens_of_a_thing(owned, maker, tokenizer):
    first = {name: tokenizer(name, add_special_tokens=False)["input_ids"][0] for name in names(owned)}
    plain = maker.batch(
        replace(owned.shape, owned=False), [str(row) for row in range(len(owned.documents))], 0.0
    )
    assert torch.equal(owned.rows.ids, plain.ids)
    tasks = set()
    for row, document in enumerate(owned.documents):
        ids, hints, before = owned.rows.ids[row], owned.rows.hints[row], plain.hints[row]
        assert torch.equal(hints[before >= 0], before[before >= 0])
        wanted = {
            text: (thing, first[name])
            for text, (thing, name) in document.belongs.items()
            if any(text in chunk for chunk in document.chunks)
        }
        runs = list(hinted_runs(hints, before))
        read = [(tokenizer.decode(ids[places]), int(hints[places.start]), new) for places, new in runs]
        for thing, token in wanted.values():
            assert any(thing in text and token == hint for text, hint, _ in read)
        for text, hint, new in read:
            assert not new or any(thing in text and token == hint for thing, token in wanted.values())
        tasks |= {question.task for question in owned.questions[row]} if wanted else set()
    assert {"twohop", "coref", "contradiction"} <= tasks


def hinted_runs(hints: torch.Tensor, before: torch.Tensor) -> Iterator[tuple[slice, bool]]:
    """Yield adjacent positions with the same hint, and whether one of them had none before."""
    starts = [0, *(hints.diff().nonzero().flatten() + 1).tolist(), len(hints)]
    for start, end in pairwise(starts):
        if hints[start] >= 0:
            yield slice(start, end), bool((before[start:end] < 0).any())


def names(batch) -> set[str]:
    return {name for document in batch.documents for _, name in document.belongs.values()}


@pytest.mark.parametrize("copying", [0.0, 1.0])
def test_a_row_depends_on_its_seed_only(tokenizer, maker, copying):
    shared = maker.batch(SHAPE, ["one", "two", "three"], copying)
    (alone,) = RowMaker(tokenizer).batch(SHAPE, ["two"], copying).ids
    again = maker.batch(SHAPE, ["three", "two"], copying)
    assert torch.equal(shared.ids[1], alone)
    assert equal(tensors_of(shared, 1), tensors_of(again, 1))
    assert equal(tensors_of(shared, 2), tensors_of(again, 0))
    assert not torch.equal(shared.ids[0], shared.ids[1])


def test_every_task_has_an_accuracy(batch):
    assert {question.task for questions in batch.questions for question in questions} <= set(COUNTED)
    assert len(set(COUNTED)) == len(COUNTED)


def test_repetition_rows_have_only_predictable_targets(maker):
    rows = maker.batch(SHAPE, [str(row) for row in range(12)], copying=1.0)
    assert rows.tokens == rows.ids.numel()
    copy = COUNTED.index(COPY)
    for ids, weights, tasks in zip(
        rows.ids.tolist(), rows.weights.tolist(), rows.tasks.tolist(), strict=True
    ):
        wanted = [place for place, weight in enumerate(weights) if weight > 0]
        assert wanted == [place for place, task in enumerate(tasks) if task == copy]
        assert len(wanted) > len(ids) / 3
        seen: set[tuple[int, int]] = set()
        repeated = set()
        for place, pair in enumerate(pairwise(ids), 1):
            if pair in seen:
                repeated.add(place)
            seen.add(pair)
        assert set(wanted) <= repeated
