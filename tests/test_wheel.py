"""What `pip install kvweave` brings."""

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (path,) = folder.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        yield archive


def test_holds_the_product_and_nothing_of_the_lab(wheel):
    names = wheel.namelist()
    assert {name.partition("/")[0] for name in names if ".dist-info/" not in name} == {"kvweave"}
    weights = {name.rpartition("/")[0] for name in names if name.endswith(".safetensors")}
    assert weights == {"kvweave/models/reference", "kvweave/models/auxiliary"}


def test_requires_no_library_that_draws_or_evaluates(wheel):
    (metadata,) = (name for name in wheel.namelist() if name.endswith("/METADATA"))
    required = re.findall(r"^Requires-Dist: ([\w.-]+)(?!.*extra ==)", wheel.read(metadata).decode(), re.M)
    assert "transformers" in required
    assert not {"matplotlib", "sacrebleu", "kvweave-lab"} & set(required)


def test_holds_every_file_of_the_page(wheel):
    page = ROOT / "src" / "kvweave" / "server" / "page"
    expected = {f"kvweave/server/page/{path.name}" for path in page.iterdir()}
    assert "kvweave/server/page/index.html" in expected
    assert expected <= set(wheel.namelist())
