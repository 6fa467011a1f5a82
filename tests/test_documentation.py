"""What the documentation says is generated is up to date, and its first example runs as it stands."""

import os
import re
import subprocess
import sys
from pathlib import Path

import kvweave
from kvweave.recipes.methods import METHODS

ROOT = Path(__file__).parent.parent


def test_generated_parts_are_up_to_date():
    done = subprocess.run(
        [sys.executable, ROOT / "docs" / "build.py", "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_first_example_of_the_readme_runs(tmp_path):
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)[:1]
    done = subprocess.run(
        [sys.executable, "-c", example],
        capture_output=True,
        text=True,
        env={
            **os.environ,
            "KVWEAVE_HOME": str(tmp_path),
            "HOME": str(tmp_path),
            "XDG_DATA_HOME": str(tmp_path),
        },
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("walnut\n")


def test_every_exported_name_is_there():
    for name in kvweave.__all__:
        assert getattr(kvweave, name) is not None


def test_every_method_has_the_fixed_headings():
    for name, make in METHODS.items():
        for heading in ("Paper", "Idea", "Parameters", "Differs from the paper", "Relations", "Measured"):
            assert re.search(rf"^\s+{heading}: \S", make.__doc__ or "", re.M), (name, heading)


def test_python_files_named_in_the_architecture_exist():
    text = (ROOT / "ARCHITECTURE.md").read_text()
    for path in re.findall(r"`([a-z_]+/[a-z_/]+\.py)`", text):
        assert (ROOT / "src" / "kvweave" / path).exists(), path
