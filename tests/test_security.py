"""Nothing in the code runs what comes from outside: no pickles, no code that comes with a model, no text as a program."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CODE = sorted(
    path
    for folder in ("src", "lab", "integrations")
    for path in (ROOT / folder).rglob("*.py")
    if "tests" not in path.relative_to(ROOT).parts
)
PICKLES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "jsonpickle"}
SAFE = {"allow_pickle": False, "trust_remote_code": False, "weights_only": True, "shell": False}
"""Arguments that may have this constant alone."""


def refused(code: str) -> Iterator[str]:
    """Yield what a module must not do."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            names = {each.name.partition(".")[0] for each in node.names}
        else:
            names = {(node.module or "").partition(".")[0]} if isinstance(node, ast.ImportFrom) else set()
        yield from sorted(names & PICKLES)
        if isinstance(node, ast.Call):
            yield from refused_call(ast.unparse(node.func), node.keywords)


def refused_call(name: str, keywords: list[ast.keyword]) -> Iterator[str]:
    given = {each.arg: getattr(each.value, "value", None) for each in keywords if each.arg}
    yield from (
        f"{key}={given[key]}" for key, safe in SAFE.items() if key in given and given[key] is not safe
    )
    if name in ("eval", "exec", "__import__", "os.system", "os.popen", "builtins.eval", "builtins.exec"):
        yield name
    if name == "torch.load" and "weights_only" not in given:
        yield "torch.load without weights_only"
    if name.startswith("yaml.") and name.endswith("load") and name != "yaml.safe_load":
        yield name
    loads = name.startswith("Auto") and name.endswith(".from_pretrained")
    if (
        loads and "trust_remote_code" not in given
    ):  # transformers asks at the terminal whether to run the code
        yield f"{name} without trust_remote_code"


OWN_MODELS = ("lab/training/", "integrations/vllm/throughput.py", "integrations/vllm/examples/")
"""Scripts that load models which they have made, or that their caller runs in vLLM too."""


def test_no_code_comes_from_data():
    found = {}
    for path in CODE:
        name = path.relative_to(ROOT).as_posix()
        here = set(refused(path.read_text(encoding="utf-8")))
        if name.startswith(OWN_MODELS):
            here = {each for each in here if not each.endswith("without trust_remote_code")}
        if here:
            found[name] = here
    assert not found


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from dill import loads",
        "import torch; torch.load(path)",
        "import torch; torch.load(path, weights_only=False)",
        "np.load(path, allow_pickle=True)",
        "np.load(path, allow_pickle=chosen)",
        "yaml.load(text)",
        "yaml.unsafe_load(text)",
        "eval(text)",
        "exec(compile(text, name, 'exec'))",
        "AutoModel.from_pretrained(name)",
        "AutoConfig.from_pretrained(name, trust_remote_code=True)",
        "SentenceTransformer(name, trust_remote_code=True)",
        "subprocess.run(text, shell=True)",
        "os.system(text)",
    ],
)
def test_what_must_not_be_there_would_be_found(code):
    assert list(refused(code))


def test_all_packages_are_read():
    read = {path.relative_to(ROOT).parts[:3] for path in CODE}
    assert {("src", "kvweave", "models"), ("lab", "src", "kvweave_lab")} <= read
    assert ("integrations", "vllm", "kvweave_vllm") in read
    assert len(CODE) > 300
