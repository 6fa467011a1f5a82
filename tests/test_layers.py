"""The layers that `lint-imports` checks: a module in none of them may import anything."""

import tomllib
from pathlib import Path

import kvweave

ROOT = Path(__file__).parent.parent


def test_every_module_of_the_package_is_in_a_layer():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = (each["layers"] for each in contracts if each["name"] == "imports point down only")
    listed = {name for layer in layers for name in layer.split(" | ")}
    package = Path(kvweave.__file__).parent
    modules = {
        path.stem for path in package.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    assert {f"kvweave.{name}" for name in modules - {"__init__"}} == listed - {"kvweave_lab"}
