"""Models that stored KV cannot be placed in: exact prefixes work from end to end, everything else is refused in one line."""

import pytest
import torch

import kvweave
from kvweave.errors import UnsupportedModel
from kvweave.recipes.snapshots import STATE
from kvweave.testing import tiny_tokenizer
from support import tiny_kb
from support.refused_models import refused_model

QUESTION = "Where is the river?"


@pytest.fixture(scope="module", params=["qwen3_next", "falcon_h1", "gpt_oss"])
def folder(request, tmp_path_factory):
    """The folder of a tiny model, as users name it."""
    folder = tmp_path_factory.mktemp(request.param)
    refused_model(request.param).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def notes(tmp_path):
    folder = tmp_path / "notes"
    folder.mkdir()
    for number in range(3):
        (folder / f"{number}.txt").write_text(tiny_kb.text(number, parts=1))
    return folder


@pytest.fixture
def open_kb(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("kvweave.embedding.TextEncoder", tiny_kb.Letters)

    def make(**settings):
        settings = {"recipe": "prefix", "answer_limit_bytes": 0, **settings}
        return tiny_kb.open_tiny(tmp_path / "home", model=str(folder), device="cpu", **settings)

    return make


def plain_answer(base, answer, most):
    """Return what plain transformers generates after the prompt that an answer was given from."""
    model = base.model.model
    prompt = base.prompt(QUESTION)
    ids = torch.tensor([base.model.template.render(prompt).token_ids])
    assert ids.shape[1] == answer.plan.prompt_tokens
    with torch.no_grad():
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=most, do_sample=False, pad_token_id=0
        )
    return base.model.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True).strip()


def test_a_second_question_continues_from_the_stored_state_and_gives_the_same_answer(open_kb, notes):
    with open_kb(max_new_tokens=8) as base:
        report = base.add(notes)
        assert len(report.added) == 3
        assert report.chunk_kv_computed == report.chunk_kv_left_out == base.missing_kv() == 0
        cold = base.ask(QUESTION)
        assert cold.plan.exact_tokens == 0
        assert cold.text == plain_answer(base, cold, 8)
        stats = base.store.stats()
        assert stats.by_kind[STATE].entries == 4  # after the system prefix and after each of three chunks
        assert stats.bytes <= stats.limit_bytes
    with open_kb(max_new_tokens=8) as base:  # from the files alone
        warm = base.ask(QUESTION)
        assert warm.text == cold.text
        *before, question = warm.plan.spans
        assert [span.origin for span in before] == ["exact"] * 4
        assert question.origin == "fresh"
        assert base.store.verify().sound
        assert base.store.stats().by_kind[STATE].entries == 4
        other = base.ask("Which note is in the north, and which part?", top_k=2)
        assert other.plan.spans[0].origin == "exact"  # the system prefix at least


def test_a_removed_document_takes_its_states_along(open_kb, notes):
    with open_kb() as base:
        base.add(notes)
        base.ask(QUESTION)
        base.remove(notes)
        kinds = base.store.stats().by_kind
        assert (
            STATE not in kinds or kinds[STATE].entries == 1
        )  # that of the system prefix, which no document owns
        base.store.clear()
        assert base.store.stats().entries == 0


def test_a_damaged_state_is_not_used(open_kb, notes):
    with open_kb() as base:
        base.add(notes)
        cold = base.ask(QUESTION)
        files = sorted((base.folder / "kv").rglob("*.safetensors"), key=lambda file: file.stat().st_size)
        assert len(files) == 4
        whole = files[-1].read_bytes()
        files[-1].write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with open_kb() as base:
        warm = base.ask(QUESTION)
        assert warm.text == cold.text
        assert [span.origin for span in warm.plan.spans] == ["exact"] * 3 + ["fresh"] * 2
        assert base.store.stats().damaged == 1


def test_other_recipes_are_refused_in_one_line_that_says_what_works(open_kb, notes):
    with open_kb(recipe="weave") as base:
        base.add(notes)  # documents can be added whatever the recipe
        with pytest.raises(UnsupportedModel, match="KVWEAVE_RECIPE=prefix") as refused:
            base.ask(QUESTION)
        assert "\n" not in str(refused.value)
        assert "recipe weave does not work" in str(refused.value)
        assert base.ask(QUESTION, recipe="prefix").plan.prompt_tokens


@pytest.mark.parametrize("settings", [{"kv_budget": 0.5}, {"resident_bytes": 10**7}])
def test_offloading_is_refused(open_kb, notes, settings):
    with open_kb(**settings) as base:
        base.add(notes)
        with pytest.raises(UnsupportedModel, match="KV in a file"):
            base.ask(QUESTION)


def test_conversations_and_background_work_are_refused(open_kb, notes):
    with open_kb(answer_limit_bytes=10**6) as base:
        base.add(notes)
        with pytest.raises(UnsupportedModel, match="single questions"):
            base.conversation()
        with pytest.raises(UnsupportedModel, match="single questions"):
            base.idle()


def test_a_loaded_model_for_other_uses_is_refused(folder):
    with pytest.raises(UnsupportedModel, match="recipe prefix alone"):
        kvweave.load_model(str(folder), device="cpu")


def test_a_store_without_room_answers_all_the_same(open_kb, notes):
    with open_kb(limit_bytes=1000) as base:
        base.add(notes)
        first, second = base.ask(QUESTION), base.ask(QUESTION)
        assert first.text == second.text
        assert base.store.stats().entries == 0
