"""Runs one `kvweave` command and writes where its start spent processor time: `python -m kvweave_lab.bench.start_trace`.

The first argument is the file for the times, the second one with the modules that are not kvweave's doing, as JSON: part to list of
modules. The rest are the command's. Only the standard library is imported here, so that the command's own imports are all seen.

Times are exclusive: the clock always charges the innermost part. Every module's code is charged to its package while it is
imported. A few functions are charged to a part of their own, wherever they are called.
"""

import functools
import importlib.abc
import importlib.machinery
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

CONTROL, LOADER, PASSES = "import torch, transformers", "transformers' imports for a model", "passes"
WEIGHTS, TOKENIZER = "read weights", "read tokenizer"
OURS, PROBE = "kvweave's own steps", "probe the model"
DIGEST, PLAIN, OWN_IMPORTS = "digest model and tokenizer", "keep control text out", "import kvweave"
OWN_CODE = (OURS, PROBE, DIGEST, PLAIN, OWN_IMPORTS)
"""What runs in kvweave's own code; the rest of a start is in libraries."""

# Module, attribute, part. The outermost of nested calls counts.
_STEPS = (
    ("transformers.models.auto.modeling_auto", "AutoModelForCausalLM.from_pretrained", WEIGHTS),
    ("transformers.models.auto.tokenization_auto", "AutoTokenizer.from_pretrained", TOKENIZER),
    ("kvweave.models.loading", "_direct_tokenizer", TOKENIZER),
    ("transformers.modeling_utils", "PreTrainedModel.__call__", PASSES),
    ("kvweave.models.adapter", "probe", PROBE),
    ("kvweave.models.adapter", "fingerprint", DIGEST),
    ("kvweave.models.prompt", "PlainTokenizer.__init__", PLAIN),
    ("kvweave.embedding", "TextEncoder._load", "load the embedding model"),
    ("kvweave.index.vector_index", "VectorIndex.__init__", "open the index"),
    ("kvweave.index.vector_index", "VectorIndex.search", "search"),
)


class Clock:
    """Charges processor time to the innermost open part."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.seconds[OURS] = time.process_time()  # the interpreter's start
        self._open = [OURS]
        self._since = time.process_time()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Charge what runs inside to a part."""
        self.charge()
        self._open.append(name)
        try:
            yield
        finally:
            self.charge()
            self._open.pop()

    @property
    def probing(self) -> bool:
        """Whether the model is being probed."""
        return PROBE in self._open

    def charge(self) -> None:
        """Charge the time since the last charge."""
        now = time.process_time()
        self.seconds[self._open[-1]] += now - self._since
        self._since = now


class _TimedLoader(importlib.abc.Loader):
    """Charges a module's code to a part, then wraps the steps that the module defines."""

    def __init__(self, loader: Any, clock: Clock, part: str) -> None:
        self._loader, self._clock, self._part = loader, clock, part

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Create the module as its own loader does."""
        with self._clock.part(self._part):
            created: ModuleType | None = self._loader.create_module(spec)
            return created

    def exec_module(self, module: ModuleType) -> None:
        """Run the module's code."""
        with self._clock.part(self._part):
            self._loader.exec_module(module)
        for name, attribute, part in _STEPS:
            if name == module.__name__:
                wrap(module, attribute, self._clock, part)


class _TimedFinder(importlib.abc.MetaPathFinder):
    """Finds modules as Python does, and gives each a timed loader."""

    def __init__(self, clock: Clock, others: dict[str, list[str]]) -> None:
        self._clock = clock
        self._parts = {name: part for part, names in others.items() for name in names}

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec with a timed loader; None for what the path does not have."""
        part = self._parts.get(name, f"import {name.partition('.')[0]}")
        with self._clock.part(part):
            spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _TimedLoader(spec.loader, self._clock, part)
        return spec


def wrap(module: ModuleType, attribute: str, clock: Clock, part: str) -> None:
    """Replace a function, or a method named `Class.method`, by one whose time the clock counts under `part`."""
    *owners, name = attribute.split(".")
    owner = functools.reduce(getattr, owners, module)
    bound = isinstance(vars(owner).get(name), classmethod)
    step: Callable[..., Any] = getattr(owner, name)
    running = False

    @functools.wraps(step)
    def timed(*args: Any, **kwargs: Any) -> Any:
        nonlocal running
        if running or clock.probing:  # the probe's pass is not one that answers
            return step(*args, **kwargs)
        running = True
        try:
            with clock.part(part):
                return step(*args, **kwargs)
        finally:
            running = False

    setattr(owner, name, staticmethod(timed) if bound else timed)


def main() -> None:
    """Run the command of the arguments; its exit code is this program's."""
    output, others, *command = sys.argv[1:]
    clock, began = Clock(), time.perf_counter()
    sys.meta_path.insert(
        sys.meta_path.index(importlib.machinery.PathFinder),
        _TimedFinder(clock, json.loads(Path(others).read_text())),
    )
    sys.argv = ["kvweave", *command]
    try:
        from kvweave.__main__ import main as kvweave

        kvweave()
    finally:
        clock.charge()
        spent = {"wall_s": time.perf_counter() - began, "parts": dict(clock.seconds)}
        Path(output).write_text(json.dumps(spent))


if __name__ == "__main__":
    main()
