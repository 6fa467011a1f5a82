"""What each operation takes on this machine, measured when an evaluation begins: a small table to interpolate in.

A model with random weights in a real shape is timed: prefilling some rows behind stored ones, decoding a step,
projecting rows. Beside it the parts that a request passes through are timed as they are: the embedding model, the index,
the bank, the store on disk. Knows no systems.
"""

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from kvweave.answer_cache.cache import AnswerCache
from kvweave.answer_cache.records import AnswerSettings, Provenance
from kvweave.database import Database
from kvweave.embedding import TextEncoder
from kvweave.engine.state import Progress
from kvweave.index.vector_index import VectorIndex
from kvweave.kvstore.chunk_store import ChunkStore
from kvweave.models.adapter import Adapter
from kvweave.models.fused_cache import FusedCache, PlacedSpan
from kvweave.models.hooks import AttentionProbe
from kvweave.models.partial_layers import StopAtLayer
from kvweave.types import ChunkKV, KVProvenance
from kvweave_lab.eval.personas.notebook import Notebook
from kvweave_lab.eval.personas.shape import PROJECTIONS, projections_of
from kvweave_lab.eval.personas.systems import Projections

ROWS: Final = (8, 32, 96, 192, 384, 576)
STORED: Final = (0, 192, 384)
SELECTING: Final = (8, 32)
BEHIND: Final = (192, 384)
CONTEXTS: Final = (128, 384, 640)
CHECKED: Final = (2, 4, 8, 16, 32)
REPEATS: Final = 3
_BANKED: Final = 100  # questions in the bank that is timed
_CHUNK: Final = 128  # tokens of an entry that is loaded


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds, medians over repeats.

    Attributes:
        rows, stored: of `prefill_s` [rows][stored]: computing so many rows behind so many stored tokens, which are placed.
        selecting, behind: of `select_s` [selecting][behind]: running so many rows over so many stored tokens, which are placed
            already, for their attention alone.
        contexts: of `decode_s`: one token behind so many.
        checked: of `check_s` [checked][contexts]: so many tokens in one pass behind so many, with the logits behind each.
        projected_s: projecting `rows` rows through all layers, by what is projected.
        embed_s: a question's vector.
        match_s: looking a question up in a bank.
        retrieve_s: finding chunks, the vector given.
        find_kv_s: looking up the entries of a prompt, nothing loaded.
        load_s_per_byte: loading and verifying stored KV, from files that were read before.
        spread: largest over smallest of the repeats, median over what was timed.
    """

    rows: tuple[int, ...]
    stored: tuple[int, ...]
    prefill_s: tuple[tuple[float, ...], ...]
    selecting: tuple[int, ...]
    behind: tuple[int, ...]
    select_s: tuple[tuple[float, ...], ...]
    contexts: tuple[int, ...]
    decode_s: tuple[float, ...]
    checked: tuple[int, ...]
    check_s: tuple[tuple[float, ...], ...]
    projected_s: dict[Projections, tuple[float, ...]]
    embed_s: float
    match_s: float
    retrieve_s: float
    find_kv_s: float
    load_s_per_byte: float
    spread: float

    def prefill(self, rows: float, stored: float) -> float:
        """Seconds, by lines between what was measured, and on along the last one."""
        return _across(self.rows, self.stored, self.prefill_s, rows, stored)

    def select(self, rows: float, stored: float) -> float:
        """Seconds of a pass that only selects."""
        return _across(self.selecting, self.behind, self.select_s, rows, stored)

    def check(self, rows: float, context: float) -> float:
        """Seconds of a pass that checks what is told of a reply."""
        return _across(self.checked, self.contexts, self.check_s, rows, context)

    def decode(self, context: float, tokens: int) -> float:
        """Seconds for so many tokens behind a context."""
        return tokens * between(self.contexts, self.decode_s, context + tokens / 2)

    def projected(self, rows: float, what: Projections) -> float:
        """Seconds for projecting so many rows."""
        return between((0, *self.rows), (0.0, *self.projected_s[what]), rows)


def between(places: Sequence[float], values: Sequence[float], at: float) -> float:
    """The value at a place, on the line through the two nearest places around it, or through the two last ones."""
    number = int(np.clip(np.searchsorted(places, at), 1, len(places) - 1)) if len(places) > 1 else 0
    if not number:
        return values[0]
    low, high = places[number - 1], places[number]
    share = (at - low) / (high - low)
    return float(max(0.0, values[number - 1] + share * (values[number] - values[number - 1])))


def _across(
    lines: Sequence[int],
    columns: Sequence[int],
    values: Sequence[Sequence[float]],
    line: float,
    column: float,
) -> float:
    """The same in a table."""
    return between(lines, [between(columns, each, column) for each in values], line)


def measure_costs(
    adapter: Adapter,
    notebook: Notebook,
    questions: Sequence[str],
    *,
    repeats: int = REPEATS,
    progress: Progress = lambda stage, done, total: None,
) -> Costs:
    """Time everything.

    Args:
        adapter: a model in the shape that latency is replayed on.
        notebook: whose index is searched.
        questions: some to embed, search for and look up, each a few times.
        repeats: of every timing, after one that warms up.
        progress: told the number of timings.
    """
    timed = _Timed(repeats, progress)
    prefill = tuple(
        tuple(timed(partial(_prefill, adapter, rows, stored)) for stored in STORED) for rows in ROWS
    )
    select = tuple(tuple(_selecting(adapter, rows, stored, timed) for stored in BEHIND) for rows in SELECTING)
    decode = tuple(_decoded(adapter, context, timed) for context in CONTEXTS)
    check = tuple(tuple(_checked(adapter, rows, context, timed) for context in CONTEXTS) for rows in CHECKED)
    projected = {
        what: tuple(timed(partial(_project, adapter, rows, what)) for rows in ROWS) for what in PROJECTIONS
    }
    encoder = TextEncoder(None)
    encoder.load()
    vectors = encoder.encode(questions)
    visible, turns = notebook.shelf.visible(), iter(range(10**9))

    def search() -> None:
        number = next(turns) % len(questions)
        VectorIndex.search(notebook.bank, questions[number], vectors[number], notebook.top_k, visible)

    embed_s = timed(lambda: encoder.encode([f"{questions[next(turns) % len(questions)]} "]))
    retrieve_s = timed(search)
    with tempfile.TemporaryDirectory(prefix="kvweave-costs-") as folder:
        match_s = _matching(Path(folder), questions, vectors, timed)
        find_s, load_s = _storing(Path(folder), adapter, timed)
    return Costs(
        ROWS, STORED, prefill, SELECTING, BEHIND, select, CONTEXTS, decode, CHECKED, check, projected, embed_s, match_s, retrieve_s, find_s, load_s,
        statistics.median(timed.spreads),
    )  # fmt: skip


class _Timed:
    """Times an action: the median of some repeats, after one that does not count."""

    _ALL: Final = (
        len(ROWS) * (len(STORED) + len(PROJECTIONS))
        + len(SELECTING) * len(BEHIND)
        + len(CONTEXTS) * (1 + len(CHECKED))
        + 5
    )

    def __init__(self, repeats: int, progress: Progress) -> None:
        self._repeats, self._progress = repeats, progress
        self.spreads: list[float] = []

    def __call__(self, action: Callable[[], object]) -> float:
        self._progress("timing operations", len(self.spreads), self._ALL)
        seconds = []
        for number in range(self._repeats + 1):
            began = time.perf_counter()
            action()
            if number:
                seconds.append(time.perf_counter() - began)
        self.spreads.append(max(seconds) / max(min(seconds), 1e-9))
        return statistics.median(seconds)


def _ids(count: int) -> tuple[int, ...]:
    return tuple(7 + number % 100 for number in range(count))


def _stored_kv(adapter: Adapter, tokens: int) -> ChunkKV:
    g = adapter.geometry
    return ChunkKV(_ids(tokens), torch.zeros(g.layers, 2, g.kv_heads, tokens, g.head_width, dtype=g.dtype))


def _prefill(adapter: Adapter, rows: int, stored: int) -> None:
    """So many rows at the end of a prompt whose other tokens are stored."""
    tokens = rows + stored
    spans = [PlacedSpan(_stored_kv(adapter, stored), 0, 0)] if stored else []
    kv_cache = adapter.new_cache(tokens, spans)
    adapter.compute(kv_cache, _ids(tokens), adapter.rows(torch.arange(stored, tokens)))
    adapter.synchronize()


def _selecting(adapter: Adapter, count: int, stored: int, timed: "_Timed") -> float:
    """The question over stored tokens, up to the attention of the last layer (`recipes.scores.QuestionAttention`)."""
    ids, rows = _ids(stored + count), torch.arange(stored, stored + count)
    kv_cache = adapter.new_cache(len(ids), [PlacedSpan(_stored_kv(adapter, stored), 0, 0)])
    adapter.compute(kv_cache, ids, adapter.rows(rows))  # places what is stored

    def look() -> None:
        plan = adapter.rows(rows)
        plan.hooks += [AttentionProbe(rows, columns=(0, stored)), StopAtLayer(adapter.geometry.layers - 1)]
        adapter.look(kv_cache, ids, plan)
        adapter.synchronize()

    return timed(look)


def _decoded(adapter: Adapter, context: int, timed: _Timed) -> float:
    kv_cache = _prompted(adapter, context)

    def step() -> None:
        adapter.step(kv_cache, 7)
        adapter.synchronize()

    return timed(step)


def _checked(adapter: Adapter, rows: int, context: int, timed: _Timed) -> float:
    kv_cache = _prompted(adapter, context)

    def check() -> None:
        adapter.follow(kv_cache, _ids(rows))
        adapter.synchronize()
        kv_cache.shrink(context)

    return timed(check)


def _prompted(adapter: Adapter, context: int) -> FusedCache:
    """A prompt of so many tokens whose last one is computed."""
    kv_cache = adapter.new_cache(context, [PlacedSpan(_stored_kv(adapter, context - 1), 0, 0)])
    adapter.compute(kv_cache, _ids(context), adapter.rows(torch.arange(context - 1, context)))
    return kv_cache


def _project(adapter: Adapter, rows: int, what: Projections) -> None:
    states: dict[int, torch.Tensor] = {}
    with torch.no_grad():
        for part in projections_of(adapter, what):
            width = part.weight.shape[1]
            if width not in states:
                states[width] = torch.zeros(
                    1, rows, width, dtype=adapter.geometry.dtype, device=adapter.geometry.device
                )
            part(states[width])
    adapter.synchronize()


def _matching(
    folder: Path, questions: Sequence[str], vectors: npt.NDArray[np.float32], timed: _Timed
) -> float:
    """A look-up among many questions, by vectors and by reading."""
    database = Database(folder / "bank.sqlite")
    try:
        bank = AnswerCache(database, 10**9)
        settings = AnswerSettings("prefix", None, None, 3, None, False, None, None)
        nothing = Provenance(frozenset(), (), bank.epoch)
        for number in range(_BANKED):
            of = number % len(questions)
            bank.put(f"{questions[of]} {number}", vectors[of], settings, "an answer", (), nothing)
        turns = iter(range(10**9))

        def look_up() -> None:
            number = next(turns) % len(questions)
            bank.near(vectors[number], settings, 0.85)
            bank.find(questions[number], lambda: vectors[number], settings, 0.85)

        return timed(look_up)
    finally:
        database.close()


def _storing(folder: Path, adapter: Adapter, timed: _Timed) -> tuple[float, float]:
    """Looking up the entries of a prompt, and loading a byte of one."""
    with ChunkStore(folder / "kv", limit_bytes=10**10) as store:
        provenance, model = KVProvenance("observed", ("0" * 32,)), adapter.fingerprint
        kv = _stored_kv(adapter, _CHUNK)
        store.put(model, kv, provenance, ())
        asked = [(kv.token_ids, [provenance])]

        def load() -> None:
            found = store.get(model, kv.token_ids, provenance)
            assert found is not None
            found.kv.sum()

        find_s = timed(lambda: store.find(model, asked))
        return find_s, timed(load) / kv.bytes
