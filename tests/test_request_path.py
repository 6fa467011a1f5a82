"""The way of a question, as ARCHITECTURE.md's first page tells it: short, and through the files named there."""

import dataclasses
import gc
import re
import sys
import threading
from pathlib import Path

import pytest

import kvweave
from kvweave.samples import CHUNK_TOKENS, TOP_K
from kvweave.samples import DOCUMENTS as FOLDER
from kvweave.types import TokenizedPrompt

ROOT = Path(__file__).parent.parent
PACKAGE = Path(kvweave.__file__).parent
DOCUMENTS = [FOLDER / name for name in ("passwords.md", "badges.txt", "supper.md")]
QUESTION = "What is the password of Glorric?"
ASKED_BEFORE = "What is the password of Fribble?"
RATIO = 0.1234567
"""A budget that no other object has by chance."""


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
        base.add(*DOCUMENTS)
        base.ask(ASKED_BEFORE)
        found["default"] = _traced(base)
        for recipe in ("reuse", "weave"):
            for _ in range(2):
                base.ask(QUESTION, recipe=recipe, cache="refresh")
            found[recipe] = _traced(base, recipe=recipe, cache="refresh")
    return found


class Carriers:
    """Records the classes that carry a question from `ask` to the model's forward, while it is active.

    A carrier is an object of ours that was made since, that a function of ours is given or returns before the forward, and that
    holds the question's words, the prompt's tokens, or the budget asked for, itself or in another such object.
    """

    def __init__(self, forward):
        self.classes = []  # in order of first use
        self._forward = forward
        self._done = False
        self._prompt = ()
        self._kept = []  # so that no id is used twice

    def __enter__(self):
        gc.unfreeze()  # Python would not tell of what `support/workers.py` has frozen
        self._before = gc.get_objects()
        gc.freeze()
        self._older = set(map(id, self._before))
        sys.setprofile(self._profile)
        return self

    def __exit__(self, *error):
        sys.setprofile(None)

    def _profile(self, frame, event, argument):
        code = frame.f_code
        self._done |= code is self._forward
        if self._done or event not in ("call", "return") or not Trace._own(frame):
            return
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        values = (
            [argument]
            if event == "return"
            else [frame.f_locals[each] for each in names if each in frame.f_locals]
        )
        for value in filter(self._ours, values):
            self._kept.append(value)
            if isinstance(value, TokenizedPrompt):
                self._prompt = value.token_ids
            if type(value).__name__ not in self.classes and self._holds(value):
                self.classes.append(type(value).__name__)

    def _ours(self, value):
        return type(value).__module__.startswith("kvweave.") and id(value) not in self._older

    def _holds(self, value):
        if isinstance(value, str | float):
            return value in (QUESTION, RATIO)
        if self._ours(value):
            return any(map(self._holds, _held(value)))
        return isinstance(value, tuple) and value == self._prompt != ()


def _held(value):
    """The objects that an object of ours holds."""
    if isinstance(value, tuple):
        return list(value)
    if dataclasses.is_dataclass(value):
        return [getattr(value, each.name, None) for each in dataclasses.fields(value)]
    return list(getattr(value, "__dict__", {}).values())


def _traced(base, **call):
    with Trace(type(base.adapter.model).forward.__wrapped__.__code__) as trace:
        answer = base.ask(QUESTION, **call)
    assert answer.plan.reused_share > 0.5
    assert answer.plan.cache_hit is None
    return trace


@pytest.fixture(scope="module")
def carriers(tmp_path_factory):
    """The classes that carry a question which the answer cache has looked up, with the default recipe."""
    with kvweave.open(home=tmp_path_factory.mktemp("home"), chunk_tokens=CHUNK_TOKENS, top_k=TOP_K) as base:
        base.add(*DOCUMENTS)
        base.ask(ASKED_BEFORE)
        with Carriers(type(base.adapter.model).forward.__wrapped__.__code__) as found:
            assert base.ask(QUESTION, ratio=RATIO).plan.cache_hit is None
    return found.classes


@pytest.mark.parametrize(
    ("recipe", "functions", "files"),
    # A recipe that selects runs the model first for its scores.
    [("reuse", 6, 4), ("weave", 8, 6), ("default", 8, 6)],
)
def test_few_functions_in_few_files_are_between_a_question_and_the_model(traces, recipe, functions, files):
    stack = traces[recipe].stack
    assert stack[0] == ("knowledge_base.py", "KnowledgeBase.ask")
    assert len(stack) <= functions, stack
    assert len({path for path, _ in stack}) <= files, stack


def test_a_question_changes_its_carrier_few_times(carriers):
    """Each carrier is one change, since the words come alone. In the pass, RowPlan and PassRows hold some of the tokens."""
    assert (carriers[0], carriers[-1]) == ("AskOptions", "PrefillState")
    assert len([*carriers, "RowPlan", "PassRows"]) <= 10, carriers


def test_a_warm_question_touches_few_files(traces):
    assert len(traces["weave"].files) <= 64, sorted(traces["weave"].files)
    assert len(traces["default"].files) <= 73, sorted(
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
