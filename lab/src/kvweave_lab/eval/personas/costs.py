"""Times of all operations on this machine, measured at the start of an evaluation, in small tables to interpolate.

A model with random weights in a real shape is timer: prefilling rows after stored ones, decoding a step, projecting rows.
The other parts of a request are timer as they are: embedding model, index, answer cache, store on disk. Knows no systems.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from kvweave.answer_cache.cache import AnswerCache
from kvweave.answer_cache.records import AnswerProvenance
from kvweave.database import Database
from kvweave.embedding import TextEncoder
from kvweave.errors import InvalidRequest
from kvweave.index.vector_index import VectorIndex
from kvweave.kvstore.chunk_store import ChunkStore
from kvweave.models.adapter import Adapter
from kvweave.models.attention import attention_modules
from kvweave.models.fused_cache import FusedCache, PlacedSpan
from kvweave.models.hooks import AttentionProbe, StopAtLayer
from kvweave.options import AskOptions
from kvweave.state.knowledge_base_state import Progress, no_progress
from kvweave.types import ChunkKV, KVProvenance
from kvweave_lab.eval.personas.corpus import UserCorpus
from kvweave_lab.eval.personas.systems import Projections

PROJECTIONS: Final[dict[Projections, tuple[str, ...]]] = {
    "KV": ("k_proj", "v_proj"),
    "QKV": ("q_proj", "k_proj", "v_proj"),
}
"""Names of the projection modules."""

ROWS: Final = (8, 32, 96, 192, 384, 576)
STORED: Final = (0, 192, 384)
SELECTING: Final = (8, 32)
BEHIND: Final = (192, 384)
CONTEXTS: Final = (128, 384, 640)
CHECKED: Final = (2, 4, 8, 16, 32)
REPEATS: Final = 3
_CACHED: Final = 100  # questions in the answer cache that is timer
_CHUNK_TOKENS: Final = 128  # of an entry that is loaded


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds, medians over repeats.

    Attributes:
        rows, stored: axes of `prefill_s`: numbers of computed rows and of stored tokens before them.
        prefill_s: [rows][stored], placing the stored tokens and computing the rows.
        selecting, behind: axes of `select_s`: numbers of selection rows and of stored tokens before them.
        select_s: [selecting][behind], running rows over placed tokens for their attention alone.
        contexts: axis of `decode_s` and `check_s`: tokens before the decoded ones.
        decode_s: one decoded token.
        checked: axis of `check_s`: tokens of a draft's pass.
        check_s: [checked][contexts], verifying a draft in one pass, with the logits after each token.
        projected_s: projecting `rows` rows through all layers, by projections.
        embed_s: a question's vector.
        match_s: a look-up in the answer cache.
        retrieve_s: finding chunks, given the vector.
        find_kv_s: looking up a prompt's entries without loading them.
        load_s_per_byte: loading and verifying stored KV from files in the page cache.
        spread: largest over smallest of the repeats, median over everything timer.
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
        """Return the seconds of a prefill, interpolated linearly, and extrapolated from the last two points."""
        return _interpolate_table(self.rows, self.stored, self.prefill_s, rows, stored)

    def select(self, rows: float, stored: float) -> float:
        """Return the seconds of a pass that only selects."""
        return _interpolate_table(self.selecting, self.behind, self.select_s, rows, stored)

    def check(self, rows: float, context: float) -> float:
        """Return the seconds of a pass that verifies a draft."""
        return _interpolate_table(self.checked, self.contexts, self.check_s, rows, context)

    def decode(self, context: float, tokens: int) -> float:
        """Return the seconds of decoding tokens singly after a context."""
        return tokens * interpolate(self.contexts, self.decode_s, context + tokens / 2)

    def projected(self, rows: float, what: Projections) -> float:
        """Return the seconds of projecting rows."""
        return interpolate((0, *self.rows), (0.0, *self.projected_s[what]), rows)


def interpolate(places: Sequence[float], values: Sequence[float], at: float) -> float:
    """Interpolate linearly between the two neighbouring places; extrapolate from the last two. Never below 0."""
    number = int(np.clip(np.searchsorted(places, at), 1, len(places) - 1)) if len(places) > 1 else 0
    if not number:
        return values[0]
    low, high = places[number - 1], places[number]
    share = (at - low) / (high - low)
    return float(max(0.0, values[number - 1] + share * (values[number] - values[number - 1])))


def _interpolate_table(
    rows: Sequence[int],
    columns: Sequence[int],
    values: Sequence[Sequence[float]],
    row: float,
    column: float,
) -> float:
    """Interpolate in a table."""
    return interpolate(rows, [interpolate(columns, each, column) for each in values], row)


def measure_costs(
    adapter: Adapter,
    corpus: UserCorpus,
    questions: Sequence[str],
    *,
    repeats: int = REPEATS,
    progress: Progress = no_progress,
) -> Costs:
    """Time all operations.

    Args:
        adapter: a model in the shape that latency is computed for.
        corpus: the corpus to search.
        questions: questions to embed, search for and look up, each a few times.
        repeats: of every timing, after one that warms up.
        progress: receives the number of timings.
    """
    timer = _Timer(repeats, progress)
    prefill = tuple(
        tuple(timer(partial(_prefill, adapter, rows, stored)) for stored in STORED) for rows in ROWS
    )
    select = tuple(
        tuple(_time_selection(adapter, rows, stored, timer) for stored in BEHIND) for rows in SELECTING
    )
    decode = tuple(_time_decoding(adapter, context, timer) for context in CONTEXTS)
    check = tuple(
        tuple(_time_verification(adapter, rows, context, timer) for context in CONTEXTS) for rows in CHECKED
    )
    projected = {
        what: tuple(timer(partial(_project, adapter, rows, what)) for rows in ROWS) for what in PROJECTIONS
    }
    encoder = TextEncoder(None)
    encoder.load()
    vectors = encoder.encode(questions)
    visible, turns = corpus.documents.visible_versions(), iter(range(10**9))

    def search() -> None:
        number = next(turns) % len(questions)
        VectorIndex.search(corpus.index, questions[number], vectors[number], corpus.top_k, visible)

    embed_s = timer(lambda: encoder.encode([f"{questions[next(turns) % len(questions)]} "]))
    retrieve_s = timer(search)
    with tempfile.TemporaryDirectory(prefix="kvweave-costs-") as folder:
        match_s = _time_matching(Path(folder), questions, vectors, timer)
        find_s, load_s = _time_store(Path(folder), adapter, timer)
    return Costs(
        ROWS, STORED, prefill, SELECTING, BEHIND, select, CONTEXTS, decode, CHECKED, check, projected, embed_s, match_s, retrieve_s, find_s, load_s,
        statistics.median(timer.spreads),
    )  # fmt: skip


def read_costs(path: Path) -> tuple[Costs, dict[str, Any]]:
    """Return the times in a personas.json, and what they were measured on: command, commit, date, machine and so on.

    Raises InvalidRequest for a file without them.
    """
    try:
        content = json.loads(path.read_text("utf-8"))
        values = {name: _as_tuples(value) for name, value in content["costs"].items()}
        about = content["about"]
        return Costs(**values), {**about, **about.get("earlier costs", {})}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidRequest(
            f"{path} holds no times of operations ({error}); name a personas.json of `kvweave eval personas`"
        ) from error


def _as_tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _as_tuples(each) for name, each in value.items()}
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value


class _Timer:
    """Times an action: the median of several repeats, after one to warm up."""

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
    """Compute rows at the end of a prompt whose other tokens are stored."""
    tokens = rows + stored
    spans = [PlacedSpan(_stored_kv(adapter, stored), 0, 0)] if stored else []
    kv_cache = adapter.new_cache(tokens, spans)
    adapter.compute(kv_cache, _ids(tokens), adapter.rows(torch.arange(stored, tokens)))
    adapter.synchronize()


def _time_selection(adapter: Adapter, count: int, stored: int, timer: "_Timer") -> float:
    """Run a question over stored tokens up to the attention of the last layer, as `QuestionAttention` does."""
    ids, rows = _ids(stored + count), torch.arange(stored, stored + count)
    kv_cache = adapter.new_cache(len(ids), [PlacedSpan(_stored_kv(adapter, stored), 0, 0)])
    adapter.compute(kv_cache, ids, adapter.rows(rows))  # places the stored tokens

    def look() -> None:
        plan = adapter.rows(rows)
        plan.hooks += [AttentionProbe(rows, columns=(0, stored)), StopAtLayer(adapter.geometry.layers - 1)]
        adapter.run_partial(kv_cache, ids, plan)
        adapter.synchronize()

    return timer(look)


def _time_decoding(adapter: Adapter, context: int, timer: _Timer) -> float:
    kv_cache = _prompt_cache(adapter, context)

    def step() -> None:
        adapter.step(kv_cache, 7)
        adapter.synchronize()

    return timer(step)


def _time_verification(adapter: Adapter, rows: int, context: int, timer: _Timer) -> float:
    kv_cache = _prompt_cache(adapter, context)

    def check() -> None:
        adapter.verify_draft(kv_cache, _ids(rows))
        adapter.synchronize()
        kv_cache.truncate_appended(context)

    return timer(check)


def _prompt_cache(adapter: Adapter, context: int) -> FusedCache:
    """Return a prompt of stored tokens with a computed last one."""
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


def _time_matching(
    folder: Path, questions: Sequence[str], vectors: npt.NDArray[np.float32], timer: _Timer
) -> float:
    """Time a look-up among many cached questions: by vector, and by normalized question."""
    database = Database(folder / "cache.sqlite")
    try:
        cache = AnswerCache(database, 10**9)
        settings = AskOptions("prefix", 3)
        provenance = AnswerProvenance(frozenset(), (), cache.epoch)
        for number in range(_CACHED):
            of = number % len(questions)
            cache.put(f"{questions[of]} {number}", vectors[of], settings, "an answer", (), provenance)
        turns = iter(range(10**9))

        def look_up() -> None:
            number = next(turns) % len(questions)
            cache.similar(vectors[number], settings, 0.85)
            cache.find(questions[number], lambda: vectors[number], settings, 0.85)

        return timer(look_up)
    finally:
        database.close()


def _time_store(folder: Path, adapter: Adapter, timer: _Timer) -> tuple[float, float]:
    """Time looking up an entry, and loading one of its bytes."""
    with ChunkStore(folder / "kv", limit_bytes=10**10) as store:
        provenance, model = KVProvenance("observed", ("0" * 32,)), adapter.fingerprint
        kv = _stored_kv(adapter, _CHUNK_TOKENS)
        store.put(model, kv, provenance, ())
        keys = [(kv.token_ids, [provenance])]

        def load() -> None:
            found = store.get(model, kv.token_ids, provenance)
            assert found is not None
            found.kv.sum()

        find_s = timer(lambda: store.find(model, keys))
        return find_s, timer(load) / kv.bytes


def projections_of(adapter: Adapter, name: Projections) -> list[Any]:
    """Return the projection modules of all layers; none if the model has one joint projection."""
    modules = attention_modules(adapter.model).values()
    return [
        getattr(module, part) for module in modules for part in PROJECTIONS[name] if hasattr(module, part)
    ]
