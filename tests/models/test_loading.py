"""Loading models by name, and clear errors when that fails."""

import pytest
import torch

import kvweave
from kvweave.errors import InvalidRequest, ModelNotFound
from kvweave.models import shapes
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


@pytest.mark.parametrize(("units", "dtype"), [({"amx_bf16": True}, torch.bfloat16), ({}, torch.float32)])
def test_a_model_of_a_shape_gets_a_dtype_that_is_fast_on_this_cpu(monkeypatch, units, dtype):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: units)
    monkeypatch.setattr(shapes, "shape_config", lambda name: tiny_model().config)
    assert shapes.random_model("any").geometry.dtype == dtype
    assert shapes.random_model("any", dtype="float16").geometry.dtype == torch.float16
