"""`kvweave bench ttft`: time to first token of full prefill, and of reuse by recipe and ratio, in turn in one process.

A request's time runs from known chunks to the first token's logits: look-up, loading, placement, selection and
recomputation. Full prefill is the fastest of transformers' (in one pass and in blocks) and kvweave's without reuse, all
over the same ids, with the last position's logits alone. A machine's speed drifts within minutes, so a request is
compared with the full prefills right before and after it. `baselines.py` models the best possible time.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, get_args

import torch

from kvweave.errors import InvalidRequest
from kvweave.models.adapter import Adapter
from kvweave.recipes.methods import recipe_named
from kvweave.recipes.recipe import Recipe, run
from kvweave.recipes.request import Budget, PrefillRequest, PrefillResult
from kvweave.results import Timing
from kvweave.state.knowledge_base_state import Progress, no_progress
from kvweave.types import TokenizedPrompt
from kvweave_lab.bench.baselines import (
    Rates,
    Work,
    WorkCounter,
    blockwise_prefill,
    measure_memory_bandwidth,
    measure_read_bandwidth,
    stock_attention,
    transformers_prefill,
)
from kvweave_lab.bench.measurement import (
    MedianRange,
    elapsed_s,
    mean_of_neighbours,
    paired_ratios,
    peak_memory_bytes,
)
from kvweave_lab.bench.workload import PreparedStores, prompt_of_chunks
from kvweave_lab.results_log import dtype_name

KVSource = Literal["memory", "disk"]
"""Where a request's stored KV is read from."""
KV_SOURCES: tuple[KVSource, ...] = get_args(KVSource)
KVWEAVE = "kvweave"
"""The name of kvweave's full prefill; the others are transformers'."""
TRIAL_ROUNDS = 2
"""Rounds in which every implementation of full prefill is timed; later rounds time the fastest alone."""


@dataclass(frozen=True, slots=True)
class TtftSettings:
    """What is measured: every recipe at every ratio over every context, `rounds` times.

    With `kv_from` disk, stored KV is dropped from memory before a request, so that it is read and verified. With both
    memory and disk, each request is timed both ways.
    """

    context_tokens: tuple[int, ...]
    recipes: tuple[str, ...]
    ratios: tuple[float, ...]
    chunk_tokens: int = 512
    rounds: int = 5
    kv_from: tuple[KVSource, ...] = ("memory",)


@dataclass(frozen=True, slots=True)
class TtftRow:
    """One recipe at one ratio over one context: medians of all rounds.

    Attributes:
        shape, dtype, device, threads: of the model and the process.
        context_tokens: of all chunks together, as requested.
        recipe: its name.
        ratio: share of stale tokens recomputed.
        kv_from: where stored KV was at the start of the request.
        rows: prompt tokens that were computed, including the question's.
        full_s: full prefill, median of all times.
        ttft_s: from known chunks to the first token's logits.
        speedup: full prefill over ttft_s, paired with the full prefills right before and after it.
        limit_speedup: full_s over the time of the roofline model.
        efficiency: speedup / limit_speedup; 1 is the roofline.
        load_s: looking up stored KV and mapping it.
        place_s: reading and verifying it unless this process already has, rotating and placing it.
        select_s: choosing tokens.
        recompute_s: the last pass.
        peak_bytes: peak memory beyond weights and stored KV; None where it is unknown.
    """

    shape: str
    dtype: str
    device: str
    threads: int
    context_tokens: int
    recipe: str
    ratio: float
    kv_from: KVSource
    rows: int
    full_s: float
    ttft_s: float
    speedup: float
    limit_speedup: float
    efficiency: float
    load_s: float
    place_s: float
    select_s: float
    recompute_s: float
    peak_bytes: int | None


@dataclass(frozen=True, slots=True)
class TtftRange:
    """The range over the rounds of one row."""

    context_tokens: int
    recipe: str
    ratio: float
    kv_from: KVSource
    ttft_s: MedianRange
    speedup: MedianRange


@dataclass(frozen=True, slots=True)
class FullPrefill:
    """Full prefill of one context.

    Attributes:
        context_tokens: as requested.
        prompt_tokens: of the whole prompt.
        fastest: the implementation in `ways_s` that rows are compared with.
        ways_s: seconds of each implementation; only the fastest is timed after the first two rounds.
        gflops_per_s: of the fastest.
        memory_bytes_per_s: memory bandwidth, measured after the rounds like the next two.
        read_bytes_per_s, disk_bytes_per_s: read bandwidth of stored KV in memory and on disk.
        peak_bytes: peak memory of the fastest beyond the weights; None where it is unknown.
    """

    context_tokens: int
    prompt_tokens: int
    fastest: str
    ways_s: dict[str, MedianRange]
    gflops_per_s: float
    memory_bytes_per_s: float
    read_bytes_per_s: float
    disk_bytes_per_s: float
    peak_bytes: int | None


@dataclass(frozen=True, slots=True)
class TtftBench:
    """Everything that was measured. `spreads` has a range for each row."""

    settings: TtftSettings
    rows: tuple[TtftRow, ...]
    spreads: tuple[TtftRange, ...]
    full: tuple[FullPrefill, ...]


def bench_ttft(
    adapter: Adapter,
    shape: str,
    folder: Path,
    settings: TtftSettings,
    progress: Progress = no_progress,
) -> TtftBench:
    """Measure with chunk KV stored under `folder`, whose disk `kv_from` reads. `shape` is for the rows.

    Raises InvalidRequest for a context that is not made of whole chunks and for a recipe that no ratio applies to,
    PromptTooLong and UnknownRecipe, all before anything is measured.
    """
    recipes = [recipe_named(name) for name in settings.recipes]
    cases = [case for recipe in recipes for case in _cases(recipe, settings)]
    texts = [prompt_of_chunks(adapter, tokens, settings.chunk_tokens) for tokens in settings.context_tokens]
    prompts = [adapter.template.render(text) for text in texts]
    for prompt in prompts:
        adapter.check_length(prompt.tokens)
    rows: list[TtftRow] = []
    spreads: list[TtftRange] = []
    full: list[FullPrefill] = []
    for tokens, text, prompt in zip(settings.context_tokens, texts, prompts, strict=True):
        with PreparedStores(adapter, folder / str(tokens), text.chunks, recipes) as stores:
            context = _ContextBench(adapter, prompt, stores, cases)
            context.warm_up()
            for number in range(settings.rounds):
                if number == TRIAL_ROUNDS:
                    context.keep_fastest()
                context.round(backwards=number % 2 == 1)
                progress(f"{tokens} tokens", number + 1, settings.rounds)
            full.append(context.full_prefill(tokens))
            rows += context.rows(shape, full[-1])
            spreads += context.spreads(full[-1])
    return TtftBench(settings, tuple(rows), tuple(spreads), tuple(full))


@dataclass(frozen=True, slots=True)
class Case:
    """One request that is timed over each context."""

    recipe: Recipe
    ratio: float
    kv_from: KVSource


def _cases(recipe: Recipe, settings: TtftSettings) -> list[Case]:
    ratios = [ratio for ratio in settings.ratios if recipe.select.selective or ratio in (0, 1)]
    if not ratios:
        asked = ", ".join(f"{ratio:g}" for ratio in settings.ratios)
        raise InvalidRequest(
            f"recipe {recipe.name!r} selects no tokens, so none of the ratios {asked} applies to it; give 0 or 1, or leave it out"
        )
    return [Case(recipe, ratio, place) for ratio in ratios for place in settings.kv_from]


def group_cases(ratios: Sequence[float]) -> list[list[int]]:
    """Group case numbers, in order, so that each group computes about one full prefill."""
    groups: list[list[int]] = []
    left = 0.0
    for number, ratio in enumerate(ratios):
        if ratio > left or not groups:
            groups.append([])
            left = 1.0
        groups[-1].append(number)
        left -= ratio
    return groups


@dataclass(frozen=True, slots=True)
class _CaseCost:
    """What one case computes and reads, equal in every round."""

    rows: int
    works: tuple[Work, ...]
    stored_bytes: int
    peak_bytes: int | None


class _ContextBench:
    """Full prefill and the cases over one context, timed in turn."""

    def __init__(
        self, adapter: Adapter, prompt: TokenizedPrompt, stores: PreparedStores, cases: Sequence[Case]
    ) -> None:
        self._adapter, self._prompt, self._stores, self._cases = adapter, prompt, stores, cases
        ids = torch.tensor([prompt.token_ids], device=adapter.geometry.device)
        some_store = stores.of(cases[0].recipe)
        self._full_prefills: dict[str, Callable[[], object]] = {
            "transformers": lambda: transformers_prefill(adapter, ids),
            "transformers in blocks": lambda: blockwise_prefill(adapter, ids),
            KVWEAVE: lambda: run(recipe_named("full"), adapter, some_store, prompt),
        }
        self._full_s: dict[str, list[float]] = {name: [] for name in self._full_prefills}
        self._timings: list[list[Timing]] = [[] for _ in cases]
        self._timed: list[str | int] = []  # in order: full prefills by name, cases by number
        self._candidates = list(self._full_prefills)  # candidates for the fastest
        self._costs: list[_CaseCost] = []
        self._full_flops = 0.0

    def warm_up(self) -> None:
        """Run everything once, untimed, while counting work and peak memory."""
        counter = WorkCounter(self._adapter)
        with counter.record() as works:
            for full_prefill in self._full_prefills.values():
                full_prefill()
        (work,) = works  # kvweave's; transformers' passes have no row plan
        self._full_flops = work.flops
        for case in self._cases:
            self._costs.append(self._measure_cost(counter, case))

    def keep_fastest(self) -> None:
        """Time only the fastest full prefill from now on."""
        self._candidates = [self._fastest()]

    def round(self, *, backwards: bool) -> None:
        """Run every case once, between full prefills. With every other round backwards, slow drift cancels out."""
        steps: list[Callable[[], None]] = [
            partial(self._time_full_prefill, name) for name in self._candidates
        ]
        for group in group_cases([case.ratio for case in self._cases]):
            steps += [partial(self._time_case, number) for number in group]
            steps.append(lambda: self._time_full_prefill(self._fastest()))
        for step in reversed(steps) if backwards else steps:
            step()

    def _fastest(self) -> str:
        """Return the fastest full prefill so far, which requests are compared with."""
        return min(self._candidates, key=lambda name: MedianRange.of(self._full_s[name]).median)

    def full_prefill(self, context_tokens: int) -> FullPrefill:
        """Return the results of full prefill; call it after the rounds."""
        ways = {name: MedianRange.of(times) for name, times in self._full_s.items()}
        fastest = self._fastest()
        return FullPrefill(
            context_tokens=context_tokens,
            prompt_tokens=self._prompt.tokens,
            fastest=fastest,
            ways_s=ways,
            gflops_per_s=self._full_flops / ways[fastest].median / 1e9,
            memory_bytes_per_s=measure_memory_bandwidth(self._adapter.geometry.device),
            read_bytes_per_s=measure_read_bandwidth(self._stores.files()),
            disk_bytes_per_s=self._disk_bytes_per_s(),
            peak_bytes=peak_memory_bytes(self._full_prefills[fastest], self._adapter.geometry.device),
        )

    def rows(self, shape: str, full: FullPrefill) -> Iterator[TtftRow]:
        """Return the rows of all cases, in order."""
        geometry = self._adapter.geometry
        full_s = full.ways_s[full.fastest].median
        for case, timings, cost, spread in zip(
            self._cases, self._timings, self._costs, self.spreads(full), strict=True
        ):
            read = full.disk_bytes_per_s if case.kv_from == "disk" else full.read_bytes_per_s
            rates = Rates(full.gflops_per_s * 1e9, full.memory_bytes_per_s, read)
            limit_speedup = full_s / rates.limit_s(cost.works, cost.stored_bytes)
            yield TtftRow(
                shape=shape,
                dtype=dtype_name(self._adapter),
                device=str(geometry.device),
                threads=torch.get_num_threads(),
                context_tokens=full.context_tokens,
                recipe=case.recipe.name,
                ratio=case.ratio,
                kv_from=case.kv_from,
                rows=cost.rows,
                full_s=full_s,
                ttft_s=spread.ttft_s.median,
                speedup=spread.speedup.median,
                limit_speedup=limit_speedup,
                efficiency=spread.speedup.median / limit_speedup,
                load_s=_median(timings, "match_s"),
                place_s=_median(timings, "place_s"),
                select_s=_median(timings, "select_s"),
                recompute_s=_median(timings, "recompute_s"),
                peak_bytes=cost.peak_bytes,
            )

    def spreads(self, full: FullPrefill) -> Iterator[TtftRange]:
        """Return the range over the rounds of each case."""
        for number, (case, timings) in enumerate(zip(self._cases, self._timings, strict=True)):
            times = [timing.ttft_s for timing in timings]
            speedup = paired_ratios(
                mean_of_neighbours(self._timed, number, full.fastest, self._full_s[full.fastest]), times
            )
            ttft_s = MedianRange.of(times)
            yield TtftRange(full.context_tokens, case.recipe.name, case.ratio, case.kv_from, ttft_s, speedup)

    def _time_full_prefill(self, name: str) -> None:
        def step() -> None:
            self._full_prefills[name]()
            self._adapter.synchronize()

        with nullcontext() if name == KVWEAVE else stock_attention(self._adapter):
            self._full_s[name].append(elapsed_s(step))
        self._timed.append(name)

    def _time_case(self, number: int) -> None:
        self._timings[number].append(self._run(self._cases[number]).timing)
        self._timed.append(number)

    def _measure_cost(self, counter: WorkCounter, case: Case) -> _CaseCost:
        found: list[PrefillResult] = []
        with counter.record() as works:
            peak = peak_memory_bytes(lambda: found.append(self._run(case)), self._adapter.geometry.device)
        plan = found[0].plan
        return _CaseCost(
            rows=plan.recomputed_tokens + plan.fresh_tokens,
            works=tuple(works),
            stored_bytes=self._stored_bytes(case.recipe),
            peak_bytes=peak,
        )

    def _stored_bytes(self, recipe: Recipe) -> int:
        """Return the bytes of all KV that the request finds, as stored: quantised KV counts its quantised size."""
        store = self._stores.of(recipe)
        with store.lease() as lease:
            request = PrefillRequest(self._adapter, store, self._prompt, Budget(), lease)
            matched = recipe.match.find(request, recipe.prepare)
            return sum(found.kv.bytes for found in matched if found.kv is not None)

    def _run(self, case: Case) -> PrefillResult:
        store = self._stores.of(case.recipe)
        if case.kv_from == "disk":
            store.forget_recent()
        return run(case.recipe, self._adapter, store, self._prompt, ratio=case.ratio)

    def _disk_bytes_per_s(self) -> float:
        self._stores.of(self._cases[0].recipe).forget_recent()
        return measure_read_bandwidth(self._stores.files())


def _median(timings: Sequence[Timing], name: str) -> float:
    return MedianRange.of(getattr(timing, name) for timing in timings).median
