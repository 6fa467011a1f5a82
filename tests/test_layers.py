"""The import contract beyond what `lint-imports` checks: every module has a layer, and imports go round in no circle."""

import tomllib
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp
import pytest

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


@pytest.fixture(scope="module")
def imports():
    """Who imports whom among our modules; imports inside functions and those for type checkers are in it too."""
    graph = grimp.build_graph("kvweave", cache_dir=None)
    return {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}


def assert_no_circle(imports):
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


def test_the_graph_has_lazy_and_type_only_imports(imports):
    assert "kvweave.ops.paged_attention" in imports["kvweave.ops.row_attention"]  # inside a function
    assert "kvweave.server.services" in imports["kvweave.server.process.lifecycle"]  # for type checkers


def test_modules_import_each_other_in_no_circle(imports):
    assert_no_circle(imports)


def test_the_parts_of_a_package_import_each_other_in_no_circle(imports):
    """A part is a file or a package: what is in `server/openai` counts as one with all of it."""
    packages = {module.rpartition(".")[0] for module in imports if "." in module}
    assert "kvweave.server" in packages
    for package in sorted(packages):
        parts = {}
        for module, imported in imports.items():
            if (part := _part(module, package)) is not None:
                others = {_part(each, package) for each in imported}
                parts.setdefault(part, set()).update(others - {None, part})
        assert_no_circle(parts)


def _part(module, package):
    """Return the file or package right below `package` that a module is or belongs to, or None."""
    if not module.startswith(package + "."):
        return None
    return ".".join(module.split(".")[: package.count(".") + 2])
