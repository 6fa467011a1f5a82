"""The Dockerfile, the systemd units and the property list of launchd: that they can be read, and that what they call exists."""

import configparser
import json
import os
import plistlib
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from typer.main import get_command

from kvweave.cli.app import OWN, app
from kvweave.config import all_settings, environment_variable

ROOT = Path(__file__).parents[2]
DOCKERFILE, UNIT = ROOT / "ops" / "Dockerfile", ROOT / "ops" / "kvweave.service"
IDLE, TIMER, PLIST = (
    ROOT / "ops" / name for name in ("kvweave-idle.service", "kvweave-idle.timer", "kvweave.idle.plist")
)
OTHER_VARIABLES = {"KVWEAVE_HOME"}


def instructions():
    """The Dockerfile's instructions: name and rest, without comments, lines joined."""
    text = re.sub(r"^#.*\n", "", DOCKERFILE.read_text(), flags=re.M).replace("\\\n", " ")
    return [tuple(line.split(None, 1)) for line in text.splitlines() if line.strip()]


def unit(path=UNIT):
    parser = configparser.RawConfigParser(strict=False, interpolation=None)
    parser.optionxform = str
    parser.read_string(path.read_text())
    return parser


def variables(text):
    return set(re.findall(r"\bKVWEAVE_[A-Z_]+\b", text)) - {"KVWEAVE_NAME"}


@pytest.mark.parametrize("path", [DOCKERFILE, UNIT])
def test_named_variables_are_settings(path):
    known = {environment_variable(name) for name in all_settings()} | OTHER_VARIABLES
    assert variables(path.read_text()) <= known


def test_the_image_runs_a_command_that_exists_and_not_as_root():
    last = dict(instructions())
    (program,), (command,) = json.loads(last["ENTRYPOINT"]), json.loads(last["CMD"])
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert program in scripts
    assert command in OWN
    assert last["USER"] == "10001"
    assert json.loads(last["VOLUME"]) == ["/data", "/models"]


def test_copied_files_exist_and_are_not_ignored():
    kept = {
        line.removeprefix("!")
        for line in (ROOT / "ops" / "Dockerfile.dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    copied = [rest.split()[:-1] for name, rest in instructions() if name == "COPY" and "--from" not in rest]
    assert copied
    for name in (name for names in copied for name in names):
        assert (ROOT / name).exists()
        assert name in kept


def test_installed_extras_exist():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (named,) = re.findall(r"'\.\[([\w,-]+)\]'", DOCKERFILE.read_text())
    assert set(named.split(",")) <= set(extras)
    assert named == "all"
    (everything,) = extras["all"]
    assert {"serve", "mcp"} <= set(re.findall(r"[\w-]+", everything.partition("[")[2]))


def health_check():
    (rest,) = (rest for name, rest in instructions() if name == "HEALTHCHECK")
    return json.loads(rest.partition("CMD")[2])


@pytest.mark.parametrize("proxy", [None, "http://127.0.0.1:9"])
@pytest.mark.parametrize(("status", "code"), [(200, 0), (503, 1)])
def test_the_health_check_follows_the_status_whatever_the_proxy(status, code, proxy):
    from support.scripted_server import reply, serving

    program, *words = health_check()
    assert program == "python"
    with serving({"GET /health": [reply({}, status)]}) as server:
        environment = {**os.environ, "KVWEAVE_PORT": server.url.rpartition(":")[2]}
        if proxy is not None:
            environment |= {"http_proxy": proxy, "HTTP_PROXY": proxy, "all_proxy": proxy}
        done = subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (code, "")


def test_the_unit_runs_a_command_that_exists():
    service = unit()["Service"]
    program, command = shlex.split(service["ExecStart"])
    assert Path(program).name in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert command in OWN
    assert service["Type"] == "notify"
    from kvweave.config import ServerConfig

    assert int(service["TimeoutStopSec"]) > ServerConfig().grace_s


def test_systemd_and_launchd_start_background_work_that_exists():
    program, *words = shlex.split(unit(IDLE)["Service"]["ExecStart"])
    assert (Path(program).name, words) == ("kvweave", ["idle", "--low-load", "--quiet"])
    assert (unit(TIMER)["Timer"]["OnUnitInactiveSec"], TIMER.stem) == ("15min", IDLE.stem)
    read = plistlib.loads(PLIST.read_bytes())
    assert (read["Label"], read["StartInterval"]) == (PLIST.stem, 900)
    assert shlex.split(read["ProgramArguments"][-1]) == ["exec", "kvweave", *words]
    group = get_command(app)
    command = group.get_command(group.make_context("kvweave", words), words[0])
    assert command.make_context(words[0], words[1:]).params["low_load"] is True


@pytest.mark.parametrize("path", [UNIT, IDLE, TIMER], ids=lambda path: path.name)
def test_systemd_accepts_the_units(tmp_path, path):
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    program = tmp_path / ".local" / "bin" / "kvweave"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    environment = {**os.environ, "HOME": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path)}

    def verify(path):
        done = subprocess.run(
            ["systemd-analyze", "--user", "verify", str(path)],
            env=environment, capture_output=True, text=True,
        )  # fmt: skip
        return [line for line in (done.stdout + done.stderr).splitlines() if path.name in line], done

    complaints, done = verify(path)
    if "Failed to initialize manager" in done.stderr:
        pytest.skip("systemd-analyze does not work here")
    assert complaints == []
    wrong = tmp_path / f"wrong{path.suffix}"
    wrong.write_text(path.read_text().replace("Description=", "Descriptions="))
    assert any("Descriptions" in line for line in verify(wrong)[0])


@pytest.mark.parametrize("abstract", [False, True])
def test_systemd_is_told_when_the_server_is_ready(tmp_path, monkeypatch, abstract):
    from kvweave.server.process.lifecycle import READY, tell_systemd

    tell_systemd(READY)  # without systemd: nothing happens
    name = f"@kvweave-{os.getpid()}" if abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind("\0" + name[1:] if abstract else name)
        receiver.settimeout(5)
        monkeypatch.setenv("NOTIFY_SOCKET", name)
        tell_systemd(READY)
        assert receiver.recv(100) == b"READY=1"
    tell_systemd(READY)  # systemd is gone: no error either
