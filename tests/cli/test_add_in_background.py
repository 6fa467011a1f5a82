"""`kvweave add` returns once documents can be asked about; a process of its own prepares their chunks."""

import os
import signal
import subprocess
from pathlib import Path
from subprocess import DEVNULL, Popen

import pytest

from kvweave.cli.preparation import sentence
from kvweave.files import try_lock
from kvweave.server.chunk_worker import start_detached
from kvweave.state.preparation import PreparationStatus
from support.processes import python_program

GLORRIC = "What is the password of Glorric?"


@pytest.fixture
def detach(monkeypatch):
    """Replaces how detached processes are started; the one that reads files starts as ever."""

    def replace(start):
        class Popen(subprocess.Popen):
            def __new__(cls, words, **given):
                return start(words, given) if given.pop("start_new_session", False) else super().__new__(cls)

        monkeypatch.setattr(subprocess, "Popen", Popen)

    return replace


@pytest.fixture
def started(detach):
    """The background processes that commands have started, forked instead of new interpreters."""
    programs = []

    def start(words, given):
        programs.append(python_program(words, **given))
        return programs[-1]

    detach(start)
    yield programs
    for program in programs:
        program.kill()


@pytest.fixture
def command(command):
    command.environment["KVWEAVE_WAIT"] = "no"
    return command


def test_add_returns_and_a_process_prepares_the_chunks(command, documents, started, tmp_path):
    added = command.json("add", documents)
    assert added["chunk_kv_waiting"] == added["chunks"] > 3
    assert (added["chunk_kv_computed"], added["preparation"]["by"]) == (0, "process")
    left = added["preparation"]["status"]
    assert left["most_left_s"] is None  # nothing was measured yet
    (process,) = started
    assert added["preparation"]["process"] == process.pid
    assert command.json("ask", GLORRIC)["text"] == "walnut"
    assert process.wait(timeout=120) == 0
    log = (tmp_path / "home" / "kb" / "default" / "prepare.log").read_text()
    assert f"process {process.pid} prepares chunks" in log
    assert "Traceback" not in log
    assert f"{added['chunks']} chunks prepared in" in log
    listed = command.json("ls")
    assert all(document["chunks_with_kv"] == document["chunks"] for document in listed)
    stats = command.json("cache", "stats")
    assert stats["preparation"]["left"] == 0
    assert stats["by_kind"]["woven-5-1-int8"]["entries"] == added["chunks"]
    assert "preparation" not in command.json("add", documents)  # nothing is left to do
    assert started == [process]


@pytest.mark.parametrize(
    ("least_s", "most_s", "said"),
    [(30.0, 32.0, ", about 31 s"), (100.0, 400.0, ", 2 min to 7 min"), (None, None, "")],
)
def test_the_time_that_is_left_is_told_if_it_was_measured(least_s, most_s, said):
    status = PreparationStatus(9, 1, 1, least_s, most_s, 4711)
    assert sentence(status).startswith(f"1 chunk is still to be prepared{said} (1 have no KV yet); ")


def test_what_is_left_and_who_works_on_it_is_told(command, documents, detach, tmp_path, monkeypatch):
    def refuse(words, given):
        raise OSError("no more processes")

    detach(refuse)
    with monkeypatch.context() as few:
        few.setattr("kvweave.documents.indexing.BATCH_CHUNKS", 1)
        added = command("add", documents).stdout
    assert "chunks are found by their words alone until their vectors are there" in added
    told = command("ls").stderr
    assert "have no vector yet and are found by their words alone" in told
    found = command("search", GLORRIC).stdout
    assert "vectors: none yet" in found
    explained = command("ask", GLORRIC, "--explain").stdout
    assert "chunks have no vector yet: words alone could find them" in explained
    assert "asked about now: kvweave ask 'QUESTION'\n" in added
    assert "chunks are still to be prepared; no process" in added  # no time before it was measured
    assert "no process is preparing them (no process could be started: no more processes)" in added
    lock = tmp_path / "home" / "kb" / "default" / "prepare.lock"
    for words, pipe in ((("ls",), "stderr"), (("cache", "stats"), "stdout"), (("doctor",), "stdout")):
        told = getattr(command(*words), pipe)
        assert "have no KV yet); no process works on it now; kvweave idle --chunks-only does" in told
    with try_lock(lock):
        lock.write_text("4711 auto None auto None")
        assert "process 4711 works on it" in command("ls").stderr
        assert "process 4711 does it," in command("add", documents).stdout  # none is started beside it
        assert (
            "no process is preparing them" in command("add", documents, "--recipe", "reuse").stdout
        )  # it prepares for another
    assert "KV computed for 0" not in command("add", documents, "--wait").stdout
    (documents / "new.txt").write_text("The bell rings at noon in the north.")
    added = command("add", documents).stdout  # what an earlier run has measured is no estimate
    assert "still to be prepared; no process" in added
    assert "vectors: none yet" not in command("search", GLORRIC).stdout
    assert "no process works on it now" in command("ls").stderr  # the other recipe's
    command("add", documents, "--wait")
    command("add", documents, "--wait", "--recipe", "reuse")
    assert command("ls").stderr == ""


def test_a_process_that_has_just_started_is_told_and_takes_the_work_of_every_add(
    command, documents, detach, tmp_path
):
    began = []

    def start(words, given):
        began.append((words, given, Popen(["sleep", "60"])))
        return began[-1][2]

    detach(start)
    command("add", documents)
    ((words, given, process),) = began
    assert f"process {process.pid} works on it" in command("ls").stderr
    other = command.json("add", documents, "--recipe", "reuse", "--storage", "exact")
    assert (other["preparation"]["by"], other["preparation"]["process"]) == ("process", process.pid)
    assert len(began) == 1  # none is started that would only wait
    process.kill()
    process.wait()
    assert "no process works on it now" in command("ls").stderr
    worker = python_program(
        words, given["env"], cwd=given["cwd"], stdout=DEVNULL, stderr=DEVNULL, stdin=DEVNULL
    )
    assert worker.wait(timeout=120) == 0
    assert command("ls").stderr == ""  # it has prepared for both recipes
    kinds = command.json("cache", "stats")["by_kind"]
    assert kinds["isolated"]["entries"] == kinds["woven-5-1-int8"]["entries"] == other["chunk_kv_waiting"] > 3


def test_a_process_that_finds_nothing_to_do_ends(command, documents):
    command("add", documents, "--wait")
    told = command("idle", "--chunks-only").stderr
    assert "0 chunks prepared" in told
    refused = command("idle", "--chunks-only", "--watch", code=1).stderr
    assert "--watch and --chunks-only do not go together" in refused


def test_watch_reports_each_change_until_ctrl_c(command, documents, monkeypatch):
    def follow(base, *folders, allow_empty):
        yield base.add(*folders, wait=False)
        (documents / "ferry.txt").write_text("The ferry leaves at nine.")
        yield base.add(*folders, wait=False)
        yield base.add(*folders, wait=False)  # nothing has changed: nothing is printed
        raise KeyboardInterrupt

    monkeypatch.setattr("kvweave.knowledge_base.KnowledgeBase.follow", follow)
    told = command("add", documents, "--watch", "--wait", KVWEAVE_RECIPE="reuse")
    first, change = told.stdout.splitlines()
    assert first.startswith("3 added; ")
    assert change.startswith("1 added, 3 unchanged; 1 chunk indexed, KV computed for 1")
    assert told.stderr.splitlines()[-1] == "no longer watching"


def test_the_process_finds_no_module_in_the_users_folder_and_shows_no_password(
    command, documents, detach, tmp_path
):
    seen = []

    def refuse(words, given):
        seen.append((words, given["env"], given["cwd"]))
        raise OSError("no more processes")

    detach(refuse)
    command.environment["KVWEAVE_SHARED"] = "redis://:walnut@127.0.0.1:9/0"
    command("add", documents)
    ((words, environment, folder),) = seen
    assert words[1:4] == ["-P", "-m", "kvweave"]
    assert folder == tmp_path / "home"
    assert "walnut" not in " ".join(words)
    assert environment["KVWEAVE_SHARED"] == command.environment["KVWEAVE_SHARED"]


@pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning")
def test_a_background_process_gives_way_to_other_sessions(tmp_path):
    process = start_detached(["sleep", "60"], tmp_path / "log", tmp_path, dict(os.environ))
    try:
        assert os.getpriority(os.PRIO_PROCESS, process) == 10
        group = Path(f"/proc/{process}/autogroup")
        if not group.exists():
            pytest.skip("the kernel does not schedule sessions as groups")
        assert group.read_text().split()[-1] == "10"
    finally:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
