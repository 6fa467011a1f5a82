"""Benchmarks as their users have them on disk, read as samples."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

from kvweave.index.chunking import Chunker
from kvweave_lab.eval.readers import longbench, ruler
from kvweave_lab.eval.samples import Sample

READERS: Mapping[str, Callable[[Path, Chunker, int | None], Iterator[Sample]]] = MappingProxyType(
    {"ruler": ruler.read, "longbench": longbench.read}
)
"""Readers by name: a file or folder, how contexts are cut, and how many samples of each file (None: all)."""

NAMED_BY_FILE = frozenset({"ruler"})
"""Those that name a task after its file. Files of one name are of different lengths, which nothing inside them says."""
