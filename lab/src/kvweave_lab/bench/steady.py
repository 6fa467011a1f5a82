"""`kvweave bench steady`: speed-up over hundreds of new questions, over a growing store larger than its memory limit.

A cache that is asked a fixed set of questions can be fast while it is warm and slow afterwards. Here no question is
repeated, and chunk popularity follows the traffic of `workload.py`. New chunks are prepared before their first question,
as an index does when a document is added; that time does not count. Chunks outside the host tier are read from disk.
"""

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from kvweave.errors import InvalidRequest
from kvweave.kvstore.chunk_store import ChunkStore
from kvweave.kvstore.keys import digest_tokens
from kvweave.models.adapter import Adapter
from kvweave.recipes.methods import recipe_named
from kvweave.recipes.offline import prepare
from kvweave.recipes.recipe import remember, run
from kvweave.results import Timing
from kvweave.state.knowledge_base_state import Progress, no_progress
from kvweave.types import Prompt
from kvweave_lab.bench.baselines import stock_attention, transformers_prefill
from kvweave_lab.bench.measurement import elapsed_s, memory_limit_bytes
from kvweave_lab.bench.workload import Query, Traffic, chunk_text, draw_queries, question_text
from kvweave_lab.results_log import ResultsLog, dtype_name


@dataclass(frozen=True, slots=True)
class SteadySettings:
    """What is measured: the questions of a traffic in order, over a growing store.

    Attributes:
        traffic: which chunks the questions retrieve, and which of them are known beforehand.
        recipe: its name.
        ratio: share of stale tokens recomputed.
        chunk_tokens: of every chunk.
        host_bytes: limit of the host tier.
        full_every: full prefill is timed every this many questions.
        page_cache: leave files in the page cache; otherwise every read that the host tier does not serve goes to the
            disk.
    """

    traffic: Traffic
    recipe: str = "prophetkv"
    ratio: float = 0.15
    chunk_tokens: int = 512
    host_bytes: int = 2 * 10**9
    full_every: int = 10
    page_cache: bool = False

    def __post_init__(self) -> None:
        if self.traffic.queries < 4:
            raise InvalidRequest(f"{self.traffic.queries} questions have no quarters; ask 4 or more")
        if self.full_every < 1:
            raise InvalidRequest(f"full_every is {self.full_every}; give 1 or more")


@dataclass(frozen=True, slots=True)
class SteadyRow:
    """One question. Times are in seconds.

    Attributes:
        question: its number, from 0.
        prompt_tokens: of the whole prompt.
        computed_tokens: prompt tokens that were computed, including the question's.
        new_chunks: chunks that were new and prepared before the question.
        prepare_s: of all new chunks.
        ttft_s: from known chunks to the first token's logits: tokenizing, look-up, load, placement, selection,
            recomputation.
        full_s: full prefill from the same start, if it was timed for this question.
        load_s: looking stored KV up and mapping it.
        place_s: reading, verifying, rotating and placing it.
        select_s: choosing tokens.
        recompute_s: the last pass.
        from_host: spans whose KV was in the host tier.
        from_disk: spans whose KV was read from files.
        stored_bytes: of all files, after the question.
        host_bytes: of the host tier, after the question.
    """

    question: int
    prompt_tokens: int
    computed_tokens: int
    new_chunks: int
    prepare_s: float
    ttft_s: float
    full_s: float | None
    load_s: float
    place_s: float
    select_s: float
    recompute_s: float
    from_host: int
    from_disk: int
    stored_bytes: int
    host_bytes: int


@dataclass(frozen=True, slots=True)
class SteadyBench:
    """Everything that was measured.

    Attributes:
        settings: what was asked for.
        shape: the model's.
        dtype: of weights and KV.
        device: where it ran.
        memory_limit_bytes: of the process including its page cache; None where the system sets no limit.
        started_at: the first question of every process: 0, and each point at which an interrupted run resumed.
        rows: one for each question.
        speedups: of each question: the full prefill timed nearest to it, over its own time.
        quarters: medians of the speed-ups over each quarter of the questions.
        kept: the last quarter's speed-up over the second's; 1 means no decay.
    """

    settings: SteadySettings
    shape: str
    dtype: str
    device: str
    memory_limit_bytes: int | None
    started_at: tuple[int, ...]
    rows: tuple[SteadyRow, ...]
    speedups: tuple[float, ...]
    quarters: tuple[float, ...]
    kept: float


def speedups(rows: Sequence[SteadyRow]) -> tuple[float, ...]:
    """Return each question's speed-up over the nearest full prefill, the earlier of two equally near ones."""
    timed = [(row.question, row.full_s) for row in rows if row.full_s is not None]
    nearest = (min(timed, key=lambda one: abs(one[0] - row.question))[1] for row in rows)
    return tuple(full_s / row.ttft_s for full_s, row in zip(nearest, rows, strict=True))


def quarters(values: Sequence[float]) -> tuple[float, ...]:
    """Return the medians of four equal parts, each with at least one value."""
    edges = [round(part * len(values) / 4) for part in range(5)]
    return tuple(statistics.median(values[start:end]) for start, end in pairwise(edges))


_PREPARED_AT_ONCE = 32
"""Chunks between two progress reports."""

_LOG, _LOG_VERSION = "steady.jsonl", 1


def bench_steady(
    adapter: Adapter,
    shape: str,
    folder: Path,
    settings: SteadySettings,
    output: Path | None = None,
    progress: Progress = no_progress,
) -> SteadyBench:
    """Ask every question, with chunk KV stored under `folder`, whose disk the reads measure.

    With `output`, every question's row is logged there, and a later run resumes after the last one; it needs the same
    `folder`. `shape` is for the report. Raises InvalidRequest for another measurement's output and for a ratio that the
    recipe cannot use, PromptTooLong and UnknownRecipe.
    """
    recipe = recipe_named(settings.recipe)
    if not recipe.select.selective and settings.ratio not in (0, 1):
        raise InvalidRequest(
            f"recipe {recipe.name!r} selects no tokens, so ratio {settings.ratio:g} does not apply to it; give 0 or 1"
        )
    geometry = adapter.geometry
    about = {
        "shape": shape,
        "dtype": dtype_name(adapter),
        "device": str(geometry.device),
    }
    queries = draw_queries(settings.traffic)
    with _open_log(output, {**asdict(settings), **about}) as log:
        if len(log.results) < len(queries):
            with ChunkStore(folder, limit_bytes=2**62, host_bytes=settings.host_bytes) as store:
                _ask_remaining(Asker(adapter, store, settings), queries, log, progress)
        asked = log.results
    rows = tuple(one.row for one in asked)
    found = speedups(rows)
    medians = quarters(found)
    return SteadyBench(
        settings=settings,
        **about,
        memory_limit_bytes=memory_limit_bytes(),
        started_at=tuple(one.row.question for one in asked if one.starts_process),
        rows=rows,
        speedups=found,
        quarters=medians,
        kept=medians[3] / medians[1],
    )


@dataclass(frozen=True, slots=True)
class _Asked:
    """A line of the log: a question's row, and whether it was the first question of its process."""

    row: SteadyRow
    starts_process: bool


def _open_log(output: Path | None, run_config: Mapping[str, Any]) -> ResultsLog[int, _Asked]:
    return ResultsLog(
        output,
        run_config,
        file=_LOG,
        version=_LOG_VERSION,
        key=lambda asked: asked.row.question,
        parse=lambda line: _Asked(SteadyRow(**line["row"]), line["starts_process"]),
    )


def _ask_remaining(
    asker: "Asker", queries: Sequence[Query], log: ResultsLog[int, _Asked], progress: Progress
) -> None:
    """Ask the questions that the log lacks, after preparing the store as it was before them."""
    first = len(log.results)
    asker.prepare_known(queries[:first], progress)
    asker.warm_up(queries[0])
    for number in range(first, len(queries)):
        progress("questions", number, len(queries))
        row = asker.ask(number, queries[number], last=number == len(queries) - 1)
        log.add(_Asked(row, starts_process=number == first))


class Asker:
    """Asks questions over a growing store."""

    def __init__(self, adapter: Adapter, store: ChunkStore, settings: SteadySettings) -> None:
        self._adapter, self._store, self._settings = adapter, store, settings
        self._recipe = recipe_named(settings.recipe)
        self._prepared: set[int] = set()

    def prepare_known(self, asked: Sequence[Query], progress: Progress) -> None:
        """Prepare the chunks that are known beforehand, and those of the questions already asked."""
        known = range(self._settings.traffic.known_chunks)
        chunks = [*known, *sorted({chunk for query in asked for chunk in query}.difference(known))]
        for first in range(0, len(chunks), _PREPARED_AT_ONCE):
            progress("chunks", first, len(chunks))
            self._prepare(chunks[first : first + _PREPARED_AT_ONCE])

    def warm_up(self, query: Query) -> None:
        """Do the one-time work of the process, which belongs to no question."""
        self._full_s(self._prompt(0, query))

    def ask(self, number: int, query: Query, *, last: bool) -> SteadyRow:
        """Ask one question, and time full prefill if it is due."""
        new = [chunk for chunk in dict.fromkeys(query) if chunk not in self._prepared]
        prepare_s = elapsed_s(lambda: self._prepare(new)) if new else 0.0
        prompt = self._prompt(number, query)
        if not self._settings.page_cache:
            self._store.forget_files()
        before = self._store.stats()
        ttft_s, prompt_tokens, computed, timing = self._answer(prompt)
        after = self._store.stats()
        is_due = last or number % self._settings.full_every == 0
        hits = {tier: after.by_tier[tier].hits - before.by_tier[tier].hits for tier in ("host", "disk")}
        return SteadyRow(
            question=number,
            prompt_tokens=prompt_tokens,
            computed_tokens=computed,
            new_chunks=len(new),
            prepare_s=prepare_s,
            ttft_s=ttft_s,
            full_s=self._full_s(prompt) if is_due else None,
            load_s=timing.match_s,
            place_s=timing.place_s,
            select_s=timing.select_s,
            recompute_s=timing.recompute_s,
            from_host=hits["host"],
            from_disk=hits["disk"],
            stored_bytes=after.by_tier["disk"].bytes,
            host_bytes=after.by_tier["host"].bytes,
        )

    def _prepare(self, chunks: Sequence[int]) -> None:
        prepare(self._adapter, self._store, [self._text(chunk) for chunk in chunks], recipe=self._recipe)
        self._prepared.update(chunks)

    def _text(self, chunk: int) -> str:
        return chunk_text(self._adapter, chunk, self._settings.chunk_tokens)

    def _prompt(self, number: int, query: Query) -> Prompt:
        return Prompt(question_text(number), tuple(map(self._text, query)))

    def _answer(self, asked: Prompt) -> tuple[float, int, int, Timing]:
        """Return the seconds to the first token, the prompt tokens, the computed tokens, and the timing of the parts."""
        adapter, store, recipe = self._adapter, self._store, self._recipe
        prefix = adapter.template.prefix_ids(asked.system)
        keys = [  # known to an index
            (digest_tokens(ids), recipe.prepare.provenances(adapter, prefix, len(ids)))
            for ids in map(adapter.template.chunk_ids, asked.chunks)
        ]
        began = time.perf_counter()
        with store.lease() as lease:
            if recipe.match.position_independent:
                store.prefetch(adapter.fingerprint, keys, lease)
            prompt = adapter.template.render(asked)
            result = run(recipe, adapter, store, prompt, ratio=self._settings.ratio, lease=lease)
        ttft_s = time.perf_counter() - began
        remember(result)
        plan = result.plan
        return ttft_s, prompt.tokens, plan.recomputed_tokens + plan.fresh_tokens, result.timing

    def _full_s(self, asked: Prompt) -> float:
        """Return the seconds of the faster full prefill: transformers' or kvweave's, tokenizing included."""
        adapter = self._adapter

        def transformers_step() -> None:
            ids = adapter.template.render(asked).token_ids
            transformers_prefill(adapter, torch.tensor([ids], device=adapter.geometry.device))
            adapter.synchronize()

        with stock_attention(adapter):
            transformers_s = elapsed_s(transformers_step)
        full = recipe_named("full")
        return min(
            transformers_s, elapsed_s(lambda: run(full, adapter, self._store, adapter.template.render(asked)))
        )
