"""Knowledge bases with a model from a GGUF file, through the command line."""

import contextlib

import pytest

import kvweave
from kvweave.cli import output
from kvweave.cli.options import SharedOptions
from kvweave.errors import EmptyKnowledgeBase
from kvweave.models.gguf.conversions import Conversions, current_report, reporting
from support.gguf_files import write_gguf


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "models" / "tiny.gguf"
    path.parent.mkdir()
    write_gguf(path, kind="Q8_0")
    return path


ASK = ("ask", "What is the password of Glorric?", "--max-new-tokens", 3)


def test_a_knowledge_base_reopens_without_naming_its_model(command, documents, model, tmp_path, monkeypatch):
    monkeypatch.chdir(model.parent)
    command("add", documents, "--model", "tiny.gguf", "--recipe", "reuse", "--quiet")
    monkeypatch.chdir(tmp_path)
    first = command.json(*ASK, "--recipe", "reuse")
    assert first["plan"]["reused_tokens"] > 0
    model.rename(tmp_path / "moved.gguf")
    done = command(*ASK, "--recipe", "reuse", "--fresh")
    assert "does not exist any more; using what it was converted into" in done.stderr
    moved = command.json(*ASK, "--recipe", "reuse", "--fresh", "--model", tmp_path / "moved.gguf")
    assert moved["text"] == first["text"]
    command("cache", "clear")
    (tmp_path / "moved.gguf").unlink()
    failed = command(*ASK, "--recipe", "reuse", "--fresh", code=1)
    assert "tiny.gguf does not exist; name the GGUF file where it is now" in failed.stderr


def test_conversions_are_counted_and_cleared_for_all_knowledge_bases(command, documents, model, tmp_path):
    command("add", documents, "--model", model, "--recipe", "reuse")
    command("add", documents, "--kb", "other", "--model", model, "--recipe", "reuse")
    (converted,) = command.json("cache", "stats")["converted_models"]
    assert converted["names"] == [str(model)]
    shown = command("cache", "stats").stdout
    assert "converted GGUF models, for all knowledge bases of this home: 1" in shown
    assert str(model) in shown
    assert "deleted" not in command("cache", "clear", "--tier", "host").stdout
    assert "deleted 1 converted GGUF model" in command("cache", "clear", "--kb", "other").stdout
    assert not Conversions(tmp_path / "home").all()
    assert command.json(*ASK, "--recipe", "reuse")["text"]  # converted again
    model.unlink()
    assert (
        f"{model} has changed or gone, so it could not be converted again" in command("cache", "clear").stdout
    )
    assert len(Conversions(tmp_path / "home").all()) == 1


def test_add_reports_the_conversion_to_its_caller(documents, model, tmp_path):
    stages = dict[str, int]()
    with kvweave.open("notes", home=tmp_path / "home", model=str(model), recipe="reuse") as base:
        base.add(documents, progress=lambda stage, done, total: stages.update({stage: done}))
    assert {"reading the GGUF file (MB)", "converting the GGUF file (MB)", "reading"} <= stages.keys()


@pytest.mark.parametrize(("quiet", "shown"), [("", ["converting", "converting"]), ("1", [])])
def test_other_commands_show_a_bar_unless_they_are_quiet(quiet, shown, monkeypatch, tmp_path):
    bars = []

    @contextlib.contextmanager
    def progress_bar(quiet):
        yield lambda stage, done, total: bars.append(stage)

    monkeypatch.setattr(output, "progress_bar", progress_bar)
    monkeypatch.setenv("KVWEAVE_QUIET", quiet)
    with reporting(lambda stage, done, total: None):
        with pytest.raises(EmptyKnowledgeBase):
            SharedOptions(home=tmp_path).open_kb()
        current_report()("converting", 1, 2)
        current_report()("converting", 2, 2)
    assert bars == shown


def test_doctor_converts_into_the_home_that_it_checks(command, model, tmp_path):
    findings = command.json("doctor", "--home", tmp_path / "elsewhere", "--model", model)
    assert all(finding["ok"] for finding in findings)
    assert len(Conversions(tmp_path / "elsewhere").all()) == 1


def test_one_line_says_what_is_wrong_with_a_file(command, documents, model):
    model.write_bytes(model.read_bytes()[:5000])
    done = command("add", documents, "--model", model, code=1)
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("error: ")
    assert "tiny.gguf is cut off: it has 5,000 bytes" in line
