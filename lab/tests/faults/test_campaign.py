"""The short form of the campaign, as a user starts it; and what it says of a home that lies."""

import re
import shutil
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")


@pytest.mark.timeout(900)
def test_the_short_campaign_finds_nothing():
    command = [sys.executable, "-m", "kvweave_lab.faults.cli", "--short"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=850, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    homes = dict(re.findall(r"^(\w+) \d+: (\d+) homes, 0 broken", done.stdout, re.MULTILINE))
    assert homes.keys() == {"crash", "error", "damage", "entries", "shared"}
    assert all(int(number) > 0 for number in homes.values()), done.stdout


def test_an_unknown_kind_is_refused():
    command = [sys.executable, "-m", "kvweave_lab.faults.cli", "--kinds", "fire"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 2
    assert "'fire' is no kind of fault" in done.stderr
