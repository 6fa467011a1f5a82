"""The way of a question, as ARCHITECTURE.md's first page tells it: short, and through the files named there."""

import re
import sys
import threading
from pathlib import Path

import pytest

import kvweave
from kvweave.samples import CHUNK_TOKENS, DOCUMENTS, TOP_K

ROOT = Path(__file__).parent.parent
PACKAGE = Path(kvweave.__file__).parent
QUESTION = "What is the password of Glorric?"
ASKED_BEFORE = "What is the password of Fribble?"


class Trace:
    """Records the files of ours that run while it is active, in order, and our frames when the model's forward runs."""

    def __init__(self, forward):
        self.files = {}  # path below the package -> None, in order of first use
        self.calls = []  # (path, function) in order of first use
        self.stack = []
        self._forward = forward
        self._seen = set()

    def __enter__(self):
        threading.setprofile_all_threads(self._profile) if sys.version_info >= (
            3,
            12,
        ) else threading.setprofile(self._profile)
        sys.setprofile(self._profile)
        return self

    def __exit__(self, *error):
        sys.setprofile(None)
        threading.setprofile(None)

    def _profile(self, frame, event, argument):
        if event != "call":
            return
        if frame.f_code is self._forward and not self.stack:
            self.stack = list(reversed(list(self._own_frames(frame))))
        path = self._own(frame)
        if path:
            self.files.setdefault(path)
            call = (path, frame.f_code.co_qualname)
            if call not in self._seen:
                self._seen.add(call)
                self.calls.append(call)

    def first_use(self, path, function=""):
        """Position of the first call of a file, or of a function or method in it."""
        return next(
            number
            for number, (where, name) in enumerate(self.calls)
            if where == path and (not function or name.rpartition(".")[2] == function)
        )

    def _own_frames(self, frame):
        while frame is not None:
            path = self._own(frame)
            if path:
                yield path, frame.f_code.co_qualname
            frame = frame.f_back

    @staticmethod
    def _own(frame):
        name = frame.f_code.co_filename
        return str(Path(name).relative_to(PACKAGE)) if name.startswith(str(PACKAGE)) else ""


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    """Traces of a question whose chunks' KV, model and code are in memory.

    "default" is `ask(question)`, a question that was not asked before; the others go by the answer cache and name a recipe.
    """
    home = tmp_path_factory.mktemp("home")
    found = {}
    with kvweave.open(home=home, chunk_tokens=CHUNK_TOKENS, top_k=TOP_K) as base:
        base.add(DOCUMENTS)
        base.ask(ASKED_BEFORE)
        found["default"] = _traced(base)
        for recipe in ("reuse", "weave"):
            for _ in range(2):
                base.ask(QUESTION, recipe=recipe, cache="refresh")
            found[recipe] = _traced(base, recipe=recipe, cache="refresh")
    return found


def _traced(base, **call):
    with Trace(type(base.adapter.model).forward.__wrapped__.__code__) as trace:
        answer = base.ask(QUESTION, **call)
    assert answer.plan.reused_share > 0.5
    assert answer.plan.cache_hit is None
    return trace


@pytest.mark.parametrize(
    ("recipe", "functions", "files"),
    # A recipe that selects runs the model first for its scores.
    [("reuse", 6, 5), ("weave", 8, 5), ("default", 8, 5)],
)
def test_few_functions_in_few_files_are_between_a_question_and_the_model(traces, recipe, functions, files):
    stack = traces[recipe].stack
    assert stack[0] == ("knowledge_base.py", "KnowledgeBase.ask")
    assert len(stack) <= functions, stack
    assert len({path for path, _ in stack}) <= files, stack


def test_a_warm_question_touches_few_files(traces):
    assert len(traces["weave"].files) <= 61, sorted(traces["weave"].files)
    assert len(traces["default"].files) <= 68, sorted(
        traces["default"].files
    )  # the answer cache reads the question


def test_the_architecture_page_tells_the_files_of_a_question_in_order(traces):
    page = (ROOT / "ARCHITECTURE.md").read_text()
    story = page.partition("## The life of a question")[2].partition("\n## ")[0]
    told = re.findall(r"\*\*`([a-z_/]+\.py)`\*\*(?:, `(\w+)`)?", story)
    assert len(told) >= 10
    assert told[0][0] == "cli/ask.py"  # the command line is not in the trace
    walked = [traces["weave"].first_use(*each) for each in told[1:]]
    assert walked == sorted(walked), dict(zip(told[1:], walked, strict=True))
