"""What `kvweave idle --install` writes on each system, and what takes it away again. No service is started."""

import plistlib
import shlex
import shutil
import subprocess
from pathlib import Path
from xml.etree import ElementTree

import pytest

from kvweave.background.service import idle_service, run_command
from kvweave.errors import InvalidRequest

COMMAND = ("/opt/my python/bin/python", "-m", "kvweave", "idle", "--low-load", "--home", '/data/50% "$x"\\y')
SYSTEMS = ("linux", "darwin", "win32")


@pytest.fixture(autouse=True)
def own_config(monkeypatch):
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)


def made(system, folder, **options):
    return idle_service(system, "notes", COMMAND, folder / "user", folder / "home", **options)


def contents(service):
    return {path.name: content for path, content in service.files.items()}


def test_systemd_gets_a_service_and_its_timer(tmp_path):
    service = made("linux", tmp_path)
    assert {path.parent for path in service.files} == {tmp_path / "user/.config/systemd/user"}
    unit, timer = (contents(service)[f"kvweave-idle-notes.{kind}"].decode() for kind in ("service", "timer"))
    (line,) = [line for line in unit.splitlines() if line.startswith("ExecStart=")]
    read = [
        word.replace("%%", "%").replace("$$", "$") for word in shlex.split(line.removeprefix("ExecStart="))
    ]
    assert tuple(read) == COMMAND
    assert "Type=oneshot" in unit
    assert "OnUnitInactiveSec=15min" in timer
    assert "WantedBy=timers.target" in timer


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_finds_no_fault_in_them(tmp_path):
    command = ("/bin/true", *COMMAND[1:])
    service = idle_service("linux", "notes", command, tmp_path, tmp_path)
    service.install(lambda command: "")
    done = subprocess.run(
        ["systemd-analyze", "verify", "--user", *map(str, service.files)],
        capture_output=True, text=True, check=False, timeout=30,
        env={"XDG_RUNTIME_DIR": str(tmp_path), "HOME": str(tmp_path), "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    complaints = [line for line in done.stderr.splitlines() if "kvweave-idle" in line]
    assert complaints == []


def test_launchd_gets_a_property_list(tmp_path):
    service = made("darwin", tmp_path)
    ((path, content),) = service.files.items()
    assert path == tmp_path / "user/Library/LaunchAgents/kvweave.idle.notes.plist"
    read = plistlib.loads(content)
    assert tuple(read["ProgramArguments"]) == COMMAND
    assert (read["Label"], read["StartInterval"], read["ProcessType"]) == (
        "kvweave.idle.notes",
        900,
        "Background",
    )
    assert service.start[0][:2] == ("launchctl", "bootstrap")
    assert service.stop[0][1] == "bootout"


@pytest.mark.parametrize("on_battery", [False, True])
def test_task_scheduler_gets_a_task(tmp_path, on_battery):
    service = made("win32", tmp_path, on_battery=on_battery)
    ((path, content),) = service.files.items()
    assert path == tmp_path / "home/idle-notes.xml"
    task = ElementTree.fromstring(content)
    space = {"t": "http://schemas.microsoft.com/windows/2004/02/mit/task"}
    text = {tag: task.findtext(f".//t:{tag}", namespaces=space) for tag in (
        "Command", "Arguments", "Interval", "DisallowStartIfOnBatteries", "MultipleInstancesPolicy")}  # fmt: skip
    assert text["Command"] == COMMAND[0]
    assert text["Arguments"] == subprocess.list2cmdline(COMMAND[1:])
    assert text["Interval"] == "PT15M"
    assert text["DisallowStartIfOnBatteries"] == str(not on_battery).lower()
    assert [child.tag.partition("}")[2] for child in task] == [
        "RegistrationInfo", "Triggers", "Settings", "Actions",
    ]  # fmt: skip
    assert service.start == (("schtasks", "/Create", "/TN", "kvweave idle notes", "/XML", str(path), "/F"),)


@pytest.mark.parametrize("system", SYSTEMS)
def test_installing_writes_and_uninstalling_takes_away(tmp_path, system):
    service, ran = made(system, tmp_path), []

    def run(command):
        ran.append(tuple(command))
        return ""

    assert service.uninstall(run) == ([], [])
    assert ran == []
    assert service.install(run) == []
    assert service.installed
    assert {path: path.read_bytes() for path in service.files} == service.files
    assert ran == [*service.start]
    assert service.install(run) == [], "a second time replaces it"
    assert service.uninstall(run) == (list(service.files), [])
    assert not service.installed
    assert [path for path in Path(tmp_path).rglob("*") if path.is_file()] == []
    assert ran[-len(service.stop + service.after) :] == [*service.stop, *service.after]


def test_what_could_not_be_started_is_told_and_the_files_stay(tmp_path):
    service = made("linux", tmp_path)
    failed = service.install(lambda command: "no bus")
    assert failed == [
        "systemctl --user daemon-reload  (no bus)",
        "systemctl --user enable --now kvweave-idle-notes.timer",
    ]
    assert service.installed
    removed, failed = service.uninstall(lambda command: "no bus")
    assert removed == list(service.files)
    assert len(failed) == 2


def test_a_missing_program_is_a_reason():
    assert "no-such-program" in run_command(["/no-such-program"])
    assert run_command(["/bin/sh", "-c", "echo broken >&2; exit 3"]) == "broken"
    assert run_command(["/bin/sh", "-c", ":"]) == ""


def test_another_system_is_refused(tmp_path):
    with pytest.raises(InvalidRequest, match=r"'plan9'; let its scheduler run `kvweave idle --low-load`"):
        made("plan9", tmp_path)
