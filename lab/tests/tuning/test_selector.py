"""An auxiliary model learns to attend as another model does: tiny models, few steps."""

import json

import pytest
import torch

import kvweave
from kvweave.errors import InvalidRequest, ModelNotFound
from kvweave.models.loading import load_model
from kvweave.recipes.methods import recipe_named
from kvweave.recipes.methods.cacheclip import AuxiliaryModel
from kvweave.testing import tiny_adapter, tiny_model, tiny_tokenizer
from kvweave.types import Prompt
from kvweave_lab.tuning import selector
from kvweave_lab.tuning.distillation import (
    differentiable,
    measure_agreement,
    observe_teacher,
    predicted_attention,
    student_example,
)
from kvweave_lab.tuning.selector import Settings, tune

WORDS = (
    "the river in the north and the größe inn of 1984 were there on the road when rain began again".split()
)
FEW = Settings(steps=8, rate=1e-2)


def text(number: int, words: int = 6) -> str:
    picks = torch.randint(len(WORDS), (words,), generator=torch.Generator().manual_seed(number)).tolist()
    return f"{number} " + " ".join(WORDS[i] for i in picks)


PROMPTS = [
    Prompt(f"Where is {WORDS[n]}?", tuple(text(3 * n + m, 4 + m) for m in range(3)), system="Answer.")
    for n in range(10)
]


@pytest.fixture(scope="module")
def primary():
    return tiny_adapter("qwen3", seed=3)


@pytest.fixture(scope="module")
def auxiliary(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("models") / "auxiliary")
    tiny_model("llama", seed=7).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def run(primary, auxiliary, tmp_path_factory):
    """One whole run: its result and its folder."""
    folder = tmp_path_factory.mktemp("tuned") / "model"
    return tune(primary, auxiliary, PROMPTS, folder, FEW), folder


def weights(folder):
    return load_model(str(folder)).model.state_dict()


def test_the_target_is_the_last_layers_attention_under_full_attention(primary):
    example = observe_teacher(primary, PROMPTS[0])
    rendered = primary.template.render(PROMPTS[0])
    primary.model.set_attn_implementation("eager")
    with torch.no_grad():
        plain = primary.model(torch.tensor([rendered.token_ids]), output_attentions=True).attentions[-1][0]
    primary.model.set_attn_implementation("kvweave")
    first, end = rendered.spans[1].start, rendered.spans[-2].end
    rows = plain[:, slice(*rendered.user_rows), first:end]
    expected = (rows / rows.sum(-1, keepdim=True)).mean(dim=(0, 1))
    torch.testing.assert_close(torch.cat(example.attended), expected, atol=1e-5, rtol=1e-4)
    offsets = [primary.template.chunk_offsets(chunk) for chunk in PROMPTS[0].chunks]
    assert example.wanted(offsets).sum().item() == pytest.approx(1, abs=1e-5)


def test_training_uses_the_scores_of_the_recipes(primary, auxiliary):
    adapter = load_model(auxiliary, dtype="float32")
    reader = AuxiliaryModel(adapter)
    example = observe_teacher(primary, PROMPTS[1])
    used = torch.cat(
        reader.attention([reader.encode(chunk)[0] for chunk in example.chunks], example.question)
    )
    with differentiable(adapter), torch.no_grad():
        trained = predicted_attention(adapter, student_example(reader, example))
    torch.testing.assert_close(trained, used / used.sum(), atol=1e-5, rtol=1e-4)


def test_the_loss_falls_and_held_out_prompts_come_closer(run, primary, auxiliary):
    tuned, folder = run
    assert len(tuned.losses) == FEW.steps
    assert sum(tuned.losses[-3:]) < 0.8 * sum(tuned.losses[:3])
    assert tuned.after.kl < tuned.before.kl
    assert (tuned.trained_on, tuned.held_out, tuned.left_out) == (8, 2, 0)
    examples = [observe_teacher(primary, PROMPTS[number]) for number in (4, 9)]
    assert measure_agreement(load_model(auxiliary), examples) == tuned.before
    assert measure_agreement(load_model(str(folder)), examples).kl == pytest.approx(tuned.after.kl, rel=1e-4)
    facts = json.loads((folder / "tuning.json").read_text())
    assert facts["after"]["kl"] == tuned.after.kl
    assert not (folder / "checkpoint.pt").exists()


def test_recipes_take_the_tuned_model_by_its_folder(run, primary, tmp_path):
    recipe = recipe_named("cacheclip", auxiliary=str(run[1]))
    with kvweave.ChunkStore(tmp_path) as store:
        kvweave.prepare(primary, store, PROMPTS[0].chunks, recipe=recipe, system="Answer.")
        result = kvweave.prefill(primary, store, PROMPTS[0], recipe=recipe, ratio=0.5)
    assert len(result.selected)


def test_an_interrupted_run_resumes_with_the_same_result(run, primary, auxiliary, tmp_path, monkeypatch):
    monkeypatch.setattr(selector, "SAVE_STEPS", 3)

    class Stopped(Exception):
        pass

    def stop(stage, done, total):
        if (stage, done) == ("training", 5):
            raise Stopped

    folder = tmp_path / "model"
    with pytest.raises(Stopped):
        tune(primary, auxiliary, PROMPTS, folder, FEW, stop)
    with pytest.raises(ModelNotFound):
        load_model(str(folder))
    with pytest.raises(InvalidRequest, match="interrupted run with other"):
        tune(primary, auxiliary, PROMPTS[:-1], folder, FEW)
    done = []
    tuned = tune(primary, auxiliary, PROMPTS, folder, FEW, lambda *event: done.append(event))
    assert next(event for event in done if event[0] == "training") == ("training", 4, 8)
    assert tuned == run[0]
    ours, whole = weights(folder), weights(run[1])
    assert all(torch.equal(ours[name], whole[name]) for name in whole)


def test_a_folder_with_a_model_is_not_overwritten(run, primary, auxiliary):
    with pytest.raises(InvalidRequest, match="holds a model already"):
        tune(primary, auxiliary, PROMPTS, run[1], FEW)


def test_a_file_is_no_folder_and_refused_before_any_prompt_is_read(primary, auxiliary, tmp_path):
    taken = tmp_path / "notes.txt"
    taken.write_text("mine")
    with pytest.raises(InvalidRequest, match="is a file; name a new folder"):
        tune(primary, auxiliary, PROMPTS, taken, FEW, lambda *_: pytest.fail("a prompt is read"))
    assert taken.read_text() == "mine"


def test_prompts_that_do_not_fit_are_left_out_and_too_few_refused(primary, auxiliary, tmp_path):
    long = Prompt("Where?", ("the inn " * 300,))
    with pytest.raises(InvalidRequest, match="4 of 6 prompts"):
        tune(primary, auxiliary, [*PROMPTS[:4], long, Prompt("Where?")], tmp_path / "few", FEW)
    some = tune(primary, auxiliary, [*PROMPTS[:5], long], tmp_path / "some", Settings(steps=1))
    assert (some.trained_on, some.held_out, some.left_out) == (4, 1, 1)


@pytest.mark.parametrize("given", [{"steps": 0}, {"rate": 0.0}, {"rate": 2.0}])
def test_impossible_settings_are_refused(given):
    with pytest.raises(InvalidRequest, match="give 1 step or more"):
        Settings(**given)
