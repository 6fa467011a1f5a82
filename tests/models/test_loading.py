"""Loading models by name, and clear errors when that fails."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import kvweave
from kvweave.errors import InvalidRequest, ModelError, ModelNotFound, UnsupportedModel
from kvweave.models.loading import load_without_weights
from kvweave.testing import tiny_model, tiny_tokenizer


@pytest.fixture
def folder(tmp_path):
    tiny_model().save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_a_model_loaded_from_a_folder_computes_the_same(folder):
    adapter = kvweave.load_model(str(folder))
    assert adapter.fingerprint.name == str(folder)
    assert adapter.fingerprint.digest == kvweave.load_model(str(folder)).fingerprint.digest


def test_the_reference_model_is_the_default():
    assert kvweave.load_model().fingerprint.name == "reference"


def test_the_longer_model_comes_from_a_plugin():
    longer, reference = kvweave.load_model("longer"), kvweave.load_model()
    assert longer.geometry.context_tokens == 8704
    text = "The password of Glorric is walnut."
    assert longer.template.tokenize(text) == reference.template.tokenize(text)


def test_a_folder_without_weights(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelNotFound, match="no weights"):
        kvweave.load_model(str(folder))


def test_a_folder_without_a_model(tmp_path):
    with pytest.raises(ModelNotFound, match=r"config\.json"):
        kvweave.load_model(str(tmp_path))


def test_a_folder_without_tokenizer(folder):
    for file in folder.glob("token*"):
        file.unlink()
    with pytest.raises(ModelNotFound, match="cannot load"):
        kvweave.load_model(str(folder))


def test_a_damaged_weight_file(folder):
    (folder / "model.safetensors").write_bytes(b"\x00" * 100)
    with pytest.raises(ModelNotFound, match="cannot load"):
        kvweave.load_model(str(folder))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", "[]"),
        ("config.json", '{"model_type": "llama", "hidden_size": "x"}'),
        ("config.json", '{"model_type": ["llama"]}'),
        ("tokenizer.json", "{}"),
        ("tokenizer.json", "[" * 100_000),
        ("tokenizer_config.json", '{"eos_token": 3}'),
        ("tokenizer_config.json", '{"model_max_length": "512"}'),
        ("generation_config.json", "[]"),
    ],
)
def test_a_damaged_file_of_a_model_ends_in_one_line(folder, name, content):
    (folder / name).write_text(content)
    for load in (kvweave.load_model, lambda name: load_without_weights(name, folder / "home")):
        with pytest.raises(ModelError) as caught:
            load(str(folder))
        assert len(str(caught.value).splitlines()) == 1


def test_a_tokenizer_that_stops_its_library_ends_in_one_line(folder):
    rules = json.loads((folder / "tokenizer.json").read_text())
    rules["model"]["continuing_subword_prefix"] = "longer than a merge"
    (folder / "tokenizer.json").write_text(json.dumps(rules))
    for load in (kvweave.load_model, lambda name: load_without_weights(name, folder / "home")):
        with pytest.raises(ModelError, match="out of range"):
            load(str(folder))


def test_a_token_with_a_huge_number_is_refused(folder):
    """The tokenizers library would end the process when it cannot list the billions that are missing."""
    rules = json.loads((folder / "tokenizer.json").read_text())
    rules["model"]["vocab"]["!"] = 2**31
    (folder / "tokenizer.json").write_text(json.dumps(rules))
    for load in (kvweave.load_model, lambda name: load_without_weights(name, folder / "home")):
        with pytest.raises(UnsupportedModel, match="2,147,483,648"):
            load(str(folder))


def test_pickled_weights_of_the_old_format_are_not_read(folder):
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    assert kvweave.load_model(str(folder)).fingerprint
    torch.save(weights, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    with pytest.raises(ModelError, match=r"pytorch_model.bin is not a zip file.*safetensors"):
        kvweave.load_model(str(folder))


def test_a_configuration_with_billions_of_layers_is_refused_before_they_are_made(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2**31 - 1}))
    for load in (kvweave.load_model, lambda name: load_without_weights(name, folder / "home")):
        with pytest.raises(UnsupportedModel, match="2,147,483,647 layers"):
            load(str(folder))


def test_code_that_comes_with_a_model_is_not_run_and_not_asked_about(folder, monkeypatch):
    """transformers would ask at the terminal whether to run it."""
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked"))
    (folder / "code.py").write_text("raise SystemExit('the code was run')")
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "model_type": "own",
        "auto_map": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelNotFound, match="custom code"):
        kvweave.load_model(str(folder))


@pytest.mark.parametrize("name", ["../outside.safetensors", "/outside.safetensors"])
def test_weights_outside_of_the_folder_are_not_read(folder, name):
    (folder / "model.safetensors").rename(folder.parent / "outside.safetensors")
    with safe_open(folder.parent / "outside.safetensors", "pt") as weights:
        index = {"metadata": {}, "weight_map": dict.fromkeys(weights.keys(), name)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "other.safetensors").touch()
    with pytest.raises(UnsupportedModel, match="outside of the model's folder"):
        kvweave.load_model(str(folder))


def test_a_missing_path_and_an_unreachable_hub_id(tmp_path):
    with pytest.raises(ModelNotFound, match="not a folder"):
        kvweave.load_model(str(tmp_path / "nothing"))
    with pytest.raises(ModelNotFound, match="nobody/nothing"):
        kvweave.load_model("nobody/nothing")


def test_a_name_that_is_nearly_that_of_a_model_is_not_sought_in_the_hub():
    with pytest.raises(ModelNotFound, match=r"no model 'referense'; did you mean reference\?"):
        kvweave.load_model("referense")


def test_unknown_dtype_and_device():
    with pytest.raises(InvalidRequest, match="float8"):
        kvweave.load_model(dtype="float8")
    with pytest.raises(InvalidRequest, match="abacus"):
        kvweave.load_model(device="abacus")
