"""Ctrl-C ends every command with one sentence, which says whether the same command resumes or starts over."""

import pytest

from kvweave.cli import app as command_line
from kvweave.cli import options
from kvweave.cli.terminal import interrupt_behind
from kvweave.errors import ModelNotFound

KEPT = "finished work is kept; run the same command again to continue"
NOTHING = "nothing is kept; the same command starts over"
WITHOUT = "nothing is kept without --output; the same command starts over"

ENDS = {
    "add .": KEPT,
    "idle": KEPT,
    "train-selector --output tuned": KEPT,
    **{
        f"{command}{output}": KEPT if output else WITHOUT
        for command in ("eval", "eval decode", "eval personas", "bench steady")
        for output in ("", " --output out")
    },
    **{
        f"{command}{output}": NOTHING
        for command in ("bench ttft", "eval lookalikes", "eval selection")
        for output in ("", " --output out")
    },
    **dict.fromkeys(("bench store", "bench decode", "bench reuse", "profile-layers", "demo"), NOTHING),
}


def wrapped() -> ModelNotFound:
    """Ctrl-C as transformers' lazy imports and our loading leave it."""
    error = ModelNotFound("cannot load the model")
    error.__cause__ = RuntimeError("could not import")
    error.__cause__.__context__ = KeyboardInterrupt()
    return error


@pytest.mark.parametrize("how", [KeyboardInterrupt, wrapped])
@pytest.mark.parametrize(("words", "said"), ENDS.items())
def test_ctrl_c_reports_whether_work_is_kept(how, words, said, tmp_path, monkeypatch, capsys):
    def interrupted(*args, **options):
        raise how()

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KVWEAVE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(options, "quiet_libraries", interrupted)  # before any work
    monkeypatch.setattr("sys.argv", ["kvweave", *words.split()])
    with pytest.raises(SystemExit) as stopped:
        command_line.main()
    assert stopped.value.code == 130
    assert capsys.readouterr().err.strip() == f"interrupted: {said}"


def test_an_error_that_ctrl_c_did_not_cause_is_no_interrupt():
    assert interrupt_behind(RuntimeError("plain")) is None
