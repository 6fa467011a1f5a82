"""A model's file is put together from packages whole, with the expected digest, or not at all; no package's code runs."""

import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvweave.errors import MissingExtra, ModelNotFound
from kvweave.models.local_model import QWEN_CODER_05B, PackagedModel

ROOT = Path(__file__).parents[2]
WHOLE = b"GGUF, the first half and the second half"


@pytest.fixture
def model(tmp_path, monkeypatch):
    """A model in two packages that must not be imported; names keep the parts' order, not that of the alphabet."""
    packages = tmp_path / "site-packages"
    for name, part in {"carrier_part2": WHOLE[:11], "carrier_part10": WHOLE[11:]}.items():
        (packages / name / "data").mkdir(parents=True)
        (packages / name / "__init__.py").write_text("raise RuntimeError('imported')")
        (packages / name / "data" / "part.bin").write_bytes(part)
    monkeypatch.syspath_prepend(packages)
    return PackagedModel(
        name="tiny",
        title="Tiny",
        file_name="tiny.gguf",
        sha256=hashlib.sha256(WHOLE).hexdigest(),
        bytes=len(WHOLE),
        licence="none",
        distributions=("carrier_part2", "carrier_part10"),
        requirements=("carrier-part2==1", "carrier-part10==1"),
    )


def test_the_parts_are_put_together_in_order_once(model, tmp_path):
    assert model.installed()
    path = model.assemble(tmp_path / "models")
    assert path == tmp_path / "models" / "tiny.gguf"
    assert path.read_bytes() == WHOLE
    (tmp_path / "site-packages" / "carrier_part2" / "data" / "part.bin").unlink()
    assert model.assemble(tmp_path / "models") == path


def test_another_file_than_expected_is_refused_and_leaves_nothing(model, tmp_path):
    (tmp_path / "site-packages" / "carrier_part10" / "data" / "part.bin").write_bytes(b"something else")
    with pytest.raises(
        ModelNotFound, match=r"tiny\.gguf from its packages has the SHA-256 .* --force-reinstall"
    ):
        model.assemble(tmp_path / "models")
    assert list((tmp_path / "models").iterdir()) == []


def test_a_missing_package_is_named_with_the_command_that_installs_all(model, tmp_path):
    (tmp_path / "site-packages" / "carrier_part10").rename(tmp_path / "elsewhere")
    assert not model.installed()
    with pytest.raises(MissingExtra, match=r"carrier_part10: pip install carrier-part2==1 carrier-part10==1"):
        model.assemble(tmp_path / "models")
    assert not (tmp_path / "models").exists()


def test_looking_for_packages_imports_no_torch():
    code = (
        "import sys; from kvweave.models.local_model import QWEN_CODER_05B; QWEN_CODER_05B.installed(); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_what_make_demo_runs_names_the_packages_of_its_model(tmp_path):
    (line,) = re.findall("^DEMO_PACKAGES := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    environment = {**os.environ, "KVWEAVE_HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", line], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() in ([], list(QWEN_CODER_05B.requirements))  # none where they are installed
