"""kvweave demo: with the shipped model and its toy documents, and with a tiny model and natural ones."""

import hashlib
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from kvweave import samples
from kvweave.cli.demo import holds
from kvweave.models import local_model
from kvweave.models.local_model import QWEN_CODER_05B
from kvweave.samples import NATURAL_DOCUMENTS, natural_questions, sample_questions
from support.gguf_files import write_gguf


@pytest.fixture
def packaged(monkeypatch):
    """The packages of the real model, as they are on a machine without them; and no hub's cache."""
    model = replace(QWEN_CODER_05B, distributions=("carrier_part1",), requirements=("carrier-part1==1",))
    monkeypatch.setattr(local_model, "cached_folder", lambda name: None)
    monkeypatch.setattr(local_model, "QWEN_CODER_05B", model)
    return model


@pytest.fixture
def installed(packaged, monkeypatch, tmp_path):
    """The same with a package that carries a tiny model, and one document with two questions."""
    data = tmp_path / "packages" / "carrier_part1" / "data"
    data.mkdir(parents=True)
    write_gguf(data / "part", "qwen2")
    monkeypatch.syspath_prepend(tmp_path / "packages")
    whole = (data / "part").read_bytes()
    model = replace(packaged, sha256=hashlib.sha256(whole).hexdigest(), bytes=len(whole))
    monkeypatch.setattr(local_model, "QWEN_CODER_05B", model)
    folder = tmp_path / "natural"
    folder.mkdir()
    (folder / "minutes.txt").write_text((NATURAL_DOCUMENTS / "allotment-minutes.md").read_text()[:400])
    asked = natural_questions()[:2]
    monkeypatch.setattr(samples, "NATURAL_DOCUMENTS", folder)
    monkeypatch.setattr(samples, "NATURAL_CHUNK_TOKENS", 60)
    monkeypatch.setattr(samples, "natural_questions", lambda: asked)
    return model


@pytest.fixture
def few(monkeypatch, tmp_path):
    """Two toy questions, and four documents, among them those that answer them."""
    folder = tmp_path / "toys"
    folder.mkdir()
    for name in ("access-codes.md", "badges.txt", "passwords.md", "supper.md"):
        shutil.copy(samples.DOCUMENTS / name, folder)
    monkeypatch.setattr(samples, "DOCUMENTS", folder)
    asked = sample_questions()[:2]
    monkeypatch.setattr(samples, "sample_questions", lambda: asked)
    return asked


def test_every_answer_stands_in_a_natural_document():
    texts = [path.read_text() for path in sorted(NATURAL_DOCUMENTS.iterdir())]
    assert 8 <= len(texts) <= 12
    assert sum(map(len, texts)) < 60_000
    assert all(any(holds(text, each.answer) for text in texts) for each in natural_questions())


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("It costs 54 pounds a year.", True),
        ("54 Pounds", True),
        ("154 pounds", False),
        ("54 euros and 60 pounds", False),
        ("", False),
    ],
)
def test_an_answer_is_right_if_it_holds_the_expected_words(text, right):
    assert holds(text, "54 pounds") is right


def test_without_a_real_model_the_shipped_one_answers_all_toy_questions(command, packaged):
    done = command("demo", "--quiet")
    first, model, prepared, *table, last = done.stdout.rstrip().splitlines()
    assert "the shipped 10 MB model answers about toy documents" in first
    assert packaged.pip_command in first
    assert model.startswith("model: the reference model")
    assert "16 documents, 29 chunks" in prepared
    count = len(sample_questions())
    assert sum(line.count("✓") for line in table) == 2 * count
    assert f"{count} of {count} answers are right (✓), {count} by full prefill" in last
    assert max(map(len, table)) <= 100
    assert done.stderr == ""


def test_json_has_answers_and_times(command, packaged, few):
    found = command.json("demo")
    assert (found["name"], found["natural"]) == ("reference", False)
    assert found["prepared_s"] > 0
    assert [row["question"] for row in found["questions"]] == [question.text for question in few]
    for row in found["questions"]:
        assert row["full_answer"] == row["answer"] == row["expected"]
        assert row["full_right"]
        assert row["right"]
        assert 0 < row["reused_share"] < 1
        assert row["full_ttft_s"] > 0
        assert row["ttft_s"] > 0
        assert row["sources"]


def test_packages_are_put_together_once_and_their_model_answers_about_natural_documents(
    command, installed, tmp_path
):
    home = tmp_path / "home"
    told = command("demo", "--quiet").stdout
    assert "model: Qwen2.5-Coder 0.5B Instruct, from the Python packages carrier-part1==1" in told
    assert "Apache License 2.0" in told
    assert "1 documents" in told
    assert len(re.findall(r"[✓✗]", told.split("The first token comes")[0])) == 4
    whole = home / "models" / "packaged" / installed.file_name
    assert whole.is_file()
    assert [path.name for path in home.iterdir()] == ["models"]  # the documents were elsewhere
    (tmp_path / "packages" / "carrier_part1" / "data" / "part").unlink()
    found = command.json("demo")
    assert (found["name"], found["natural"]) == (str(whole), True)
    assert f"kept in {whole.parent}" in command("demo", "--quiet").stdout


def test_a_packaged_file_that_is_another_one_is_not_used(command, installed, few, monkeypatch):
    monkeypatch.setattr(local_model, "QWEN_CODER_05B", replace(installed, sha256="0" * 64))
    told = command("demo", "--quiet").stdout
    assert told.startswith("no real model can be used (")
    assert "model: the reference model" in told


def test_the_hub_cache_comes_before_packages(installed, tmp_path, monkeypatch):
    fetched = tmp_path / "fetched"
    fetched.mkdir()
    monkeypatch.setattr(
        local_model, "cached_folder", lambda name: fetched if name == local_model.HUB_IDS[1] else None
    )
    home = tmp_path / "home"
    assert local_model.find_local_model(home).path == home / "models" / "packaged" / installed.file_name
    (home / "models" / "packaged" / installed.file_name).unlink()
    (fetched / "model.safetensors").write_bytes(b"12345")
    (fetched / "tokenizer.json").write_text("{}")
    found = local_model.find_local_model(home)
    assert (found.path, found.title, found.bytes) == (fetched, local_model.HUB_IDS[1], 5)
    assert local_model.requirements(home) == ()


def test_what_has_to_be_installed_is_known_without_loading_anything(packaged, tmp_path):
    assert local_model.requirements(tmp_path) == ("carrier-part1==1",)
    assert local_model.find_local_model(tmp_path) is None


def test_the_model_that_is_named_answers(command, installed, tmp_path):
    path = tmp_path / "mine.gguf"
    write_gguf(path, "llama")
    told = command("demo", "--quiet", "--model", path).stdout
    assert f"model: {path}, as given, " in told
    assert not (tmp_path / "home" / "models" / "packaged").exists()


@pytest.mark.parametrize("name", ["no/such-model", "missing.gguf", "missing-folder"])
def test_a_model_that_does_not_exist_is_an_error(name, command):
    done = command("demo", "--model", name, code=1)
    assert done.stderr.startswith("error: ")
    assert Path(name).stem in done.stderr
