"""A user without a home folder, and a home that cannot be written to: one clear line, or what can be done is done."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from kvweave.config import default_home, without_tilde
from kvweave.database import Database
from kvweave.errors import InvalidRequest, StoreReadOnly
from support import tiny_kb
from support.processes import run_program

ROOT = Path(__file__).parent.parent.parent
NOBODY = 65534
UNKNOWN = 54321
IS_ROOT = os.getuid() == 0


def as_other_user(user):
    """The beginning of a command line that runs a program as another user; skips where that cannot be done."""
    only = "-all,+dac_read_search"
    begin = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"]
    begin += [f"--inh-caps={only}", f"--ambient-caps={only}", f"--bounding-set={only}"]
    if (
        shutil.which("setpriv") is None
        or subprocess.run([*begin, sys.executable, "-c", ""], check=False).returncode
    ):
        pytest.skip("setpriv cannot run a program as another user here")
    return begin


BECOME = """
import ctypes, os
libc, read_every_file = ctypes.CDLL(None), 1 << 2
libc.prctl(8, 1, 0, 0, 0)  # keeps what is permitted
os.setgroups([])
os.setresgid(USER, USER, USER)
os.setresuid(USER, USER, USER)
libc.prctl(4, 1, 0, 0, 0)  # its files in /proc are its own
rights = (ctypes.c_uint32 * 6)(read_every_file, read_every_file)
assert libc.capset((ctypes.c_uint32 * 2)(0x20080522, 0), rights) == 0
assert os.getuid() == USER and not os.access("/", os.W_OK)
"""


def run(words, *, user=None, forked=False, **environment):
    """Run the interpreter as another user where the tests run as root; the environment has no HOME of its own.

    That user may read every file, since the interpreter may be in a folder of root's, and write only what the permissions allow.
    A `forked` one runs code, and has imported libraries as root.
    """
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "HF_HUB_OFFLINE") if name in os.environ}
    paths = os.pathsep.join(
        [
            str(ROOT / "src"),
            str(ROOT / "tests"),
            str(ROOT / "tests" / "engine"),
            os.environ.get("PYTHONPATH", ""),
        ]
    )
    as_user = as_other_user(user) if user is not None and IS_ROOT else []
    if forked:
        begin = BECOME.replace("USER", str(user)) if as_user else ""
        return run_program(
            ["-c", begin + words[1], *words[2:]], {**kept, "PYTHONPATH": paths, **environment}, "/"
        )
    return subprocess.run(
        [*as_user, sys.executable, *map(str, words)],
        env={**kept, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1", **environment},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.fixture
def no_home(monkeypatch):
    """This process as one of a user that the system does not know."""
    import pwd

    def unknown(user):
        raise KeyError(user)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for name in ("HOME", "XDG_DATA_HOME", "KVWEAVE_HOME"):
        monkeypatch.delenv(name, raising=False)


def test_without_a_home_folder_the_error_names_what_to_set(no_home):
    for call in (default_home, lambda: default_home({}), lambda: without_tilde("~/x")):
        with pytest.raises(InvalidRequest, match="--home or KVWEAVE_HOME"):
            call()
    assert default_home({"KVWEAVE_HOME": "/data"}) == Path("/data")


@pytest.mark.skipif(not IS_ROOT, reason="needs root, to run as an unknown user")
@pytest.mark.parametrize(
    "words", [(), ("ls",), ("ask", "Who?"), ("search", "Who?"), ("rm", "--all"), ("doctor",)]
)
def test_commands_of_an_unknown_user(words):
    if words == ("doctor",):
        code = "import sys; sys.argv = ['kvweave', 'doctor']\nfrom kvweave.__main__ import main; main()"
        done = run(["-c", code], user=UNKNOWN, forked=True)
    else:
        done = run(["-m", "kvweave", *words], user=UNKNOWN)
    said = done.stdout + done.stderr
    assert "Traceback" not in said
    (line,) = [line for line in said.splitlines() if "--home or KVWEAVE_HOME" in line]
    assert "HOME is not set" in line
    assert done.returncode == 1
    assert len(said.splitlines()) == 1 or words == ("doctor",)


@pytest.mark.skipif(not IS_ROOT, reason="needs root, to run as an unknown user")
def test_an_unknown_user_who_names_a_home_can_work(tmp_path):
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)
        home = Path(folder, "home")
        done = run(["-m", "kvweave", "doctor", "--home", home], user=UNKNOWN)
        assert "Traceback" not in done.stderr
        assert "there is no knowledge base" in done.stdout
        assert "bad" not in done.stdout, done.stdout
        assert done.returncode == 0
        shown = run(["-m", "kvweave"], user=UNKNOWN, KVWEAVE_HOME=str(home))
        assert shown.returncode == 0


# A home that cannot be written to

READING = """
import sys
from support import tiny_kb
tiny_kb.load()
from pathlib import Path
from typer.testing import CliRunner
from kvweave.cli.app import app
from kvweave.cli.doctor import _knowledge_base
from kvweave.errors import KvweaveError
home, note = Path(sys.argv[1]), Path(sys.argv[2])

def state():
    return {str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in home.rglob("*")}

before = state()
for time in range(2):
    with tiny_kb.open_tiny(home) as base:
        assert base.store.read_only
        assert [Path(each.source).name for each in base.documents()] == ["note.txt"]
        answer = base.ask("Where is the river?")
        assert answer.sources and answer.plan.cache_hit is None and answer.plan.reused_share > 0.3, answer.plan
        assert base.ask("Asked before?").plan.cache_hit is not None
        assert "read-only" in _knowledge_base(base)[0].detail
        for change in (lambda: base.add(note), lambda: base.remove(note), base.remove_all, lambda: base.store.clear("disk"),
                       lambda: base.store.set_limit(0, "disk")):
            try:
                change()
            except KvweaveError as error:
                assert "read-only" in str(error), error
            else:
                raise AssertionError("nothing was refused")
words = ["--home", str(home), "--kb", "notes"]
listed = CliRunner().invoke(app, ["ls", *words])
assert listed.exit_code == 0 and "note.txt" in listed.output, listed.output
found = CliRunner().invoke(app, ["search", "river", *words])
assert found.exit_code == 0 and "river" in found.output, (found.output, found.exception)
assert state() == before
print("read")
"""


def read_only(folder):
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)


def writable(folder):
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)


@pytest.fixture
def prepared(tiny):
    """A home in which everything is prepared, readable by every user and writable by none."""
    folder = Path(tempfile.mkdtemp())
    try:
        folder.chmod(0o777)
        note = folder / "note.txt"
        note.write_text(tiny_kb.text(0))
        with tiny_kb.open_tiny(folder / "home") as base:
            base.add(note)
            base.ask("Asked before?")
        read_only(folder / "home")
        yield folder
    finally:
        writable(folder / "home")
        shutil.rmtree(folder)


def test_a_read_only_home_is_asked_and_remembers_nothing(prepared):
    words = ["-c", READING, prepared / "home", prepared / "note.txt"]
    done = run(words, user=NOBODY, forked=True, HOME=str(prepared))
    assert done.stdout == "read\n", done.stderr
    assert "WARNING" not in done.stderr, done.stderr


def test_what_a_log_holds_is_read_too(tmp_path, monkeypatch):
    """A killed writer leaves its last commits in the log beside the file."""
    writer = Database(tmp_path / "catalog.sqlite")
    writer.script(["CREATE TABLE things (name TEXT)"])
    writer.execute("INSERT INTO things VALUES ('one')")
    real = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK and real(path, mode))
    reader = Database(tmp_path / "catalog.sqlite")
    assert reader.read_only
    assert reader.query("SELECT name FROM things") == [("one",)]
    reader.execute("INSERT INTO things VALUES ('two')")
    assert reader.query("SELECT count(*) FROM things") == [(2,)]
    with pytest.raises(StoreReadOnly, match="read-only"):
        reader.check_writable()
    copy = Path(reader._copy.name)
    reader.close()
    assert not copy.exists()
    assert writer.query("SELECT count(*) FROM things") == [(1,)]
    writer.close()


# Without a command

OVERVIEW = "import sys; sys.argv = ['kvweave']\nfrom kvweave.__main__ import main\ntry: main()\nexcept SystemExit as end: assert not end.code\n"
LIGHT = (
    "print([name for name in ('torch', 'lancedb', 'numpy', 'transformers', 'rich') if name in sys.modules])"
)


def test_without_a_command_it_shows_three_and_what_is_there(tmp_path, tiny):
    empty = run(["-c", OVERVIEW + LIGHT], KVWEAVE_HOME=str(tmp_path / "home"))
    assert empty.stdout.endswith("[]\n"), (empty.stdout, empty.stderr)
    assert all(f"kvweave {name} " in empty.stdout for name in ("add", "ask", "serve"))
    assert "Nothing is in" in empty.stdout
    assert not (tmp_path / "home").exists()
    (tmp_path / "note.txt").write_text(tiny_kb.text(0))
    with tiny_kb.open_tiny(tmp_path / "home") as base:
        base.add(tmp_path / "note.txt")
        held = sum(each.chunks for each in base.documents())
        shown = run(["-c", OVERVIEW + LIGHT], KVWEAVE_HOME=str(tmp_path / "home"))
    assert f"1 document, {held} chunk" in shown.stdout
    assert "(--kb notes)" in shown.stdout
    (tmp_path / "home" / "kb" / "notes" / "catalog.sqlite").write_bytes(b"no database" * 100)
    broken = run(["-c", OVERVIEW + LIGHT], KVWEAVE_HOME=str(tmp_path / "home"))
    assert "cannot be read" in broken.stdout
    assert broken.stdout.endswith("[]\n")
