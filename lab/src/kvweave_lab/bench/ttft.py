"""Time to first token: full prefill, and reuse by recipe and ratio, timed in turn in one process.

Ours runs from "chunks are known" to the first token's logits: look-up, loading, placement, selection and
recomputation. Full prefill is the fastest of transformers' own, in one pass and in blocks, and ours without reuse, all
over the same ids and with the last position's logits alone. A machine's speed drifts within minutes, so a request is compared
with the full prefills right before and after it. What it could be at best is in `limit.py`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from kvweave.engine.state import Progress
from kvweave.errors import InvalidRequest
from kvweave.models.adapter import Adapter
from kvweave.recipes.methods import recipe_named
from kvweave.recipes.recipe import Recipe, run
from kvweave.recipes.request import Budget, PrefillRequest, PrefillResult
from kvweave.types import Timing, TokenizedPrompt
from kvweave_lab.bench.baseline import library_attention, prefill_in_blocks, stock_prefill
from kvweave_lab.bench.limit import Rates, memory_bytes_per_s, read_bytes_per_s
from kvweave_lab.bench.peak import peak_bytes
from kvweave_lab.bench.prompts import prompt_of_chunks
from kvweave_lab.bench.spread import Spread, ratios, timed
from kvweave_lab.bench.stores import PreparedStores
from kvweave_lab.bench.ttft_results import FullPrefill, TtftBench, TtftRow, TtftSettings, TtftSpread, Whence
from kvweave_lab.bench.work import Work, WorkCount

OURS = "kvweave"
"""The way of full prefill that is not transformers' own."""
TRIED_ROUNDS = 2
"""In so many rounds every way of full prefill is timed; afterwards the fastest alone."""


def bench_ttft(
    adapter: Adapter,
    shape: str,
    folder: Path,
    settings: TtftSettings,
    progress: Progress = lambda stage, done, of: None,
) -> TtftBench:
    """Measure; chunk KV is stored under `folder`, whose disk `kv_from` is about. `shape` is for the rows.

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
    spreads: list[TtftSpread] = []
    full: list[FullPrefill] = []
    for tokens, text, prompt in zip(settings.context_tokens, texts, prompts, strict=True):
        with PreparedStores(adapter, folder / str(tokens), text.chunks, recipes) as stores:
            context = _Context(adapter, prompt, stores, cases)
            context.warm_up()
            for number in range(settings.rounds):
                if number == TRIED_ROUNDS:
                    context.settle()
                context.round(backwards=number % 2 == 1)
                progress(f"{tokens} tokens", number + 1, settings.rounds)
            full.append(context.full_prefill(tokens))
            rows += context.rows(shape, full[-1])
            spreads += context.spreads(full[-1])
    return TtftBench(settings, tuple(rows), tuple(spreads), tuple(full))


@dataclass(frozen=True, slots=True)
class Case:
    """What is timed over each context."""

    recipe: Recipe
    ratio: float
    kv_from: Whence


def _cases(recipe: Recipe, settings: TtftSettings) -> list[Case]:
    ratios = [ratio for ratio in settings.ratios if recipe.select.selects or ratio in (0, 1)]
    if not ratios:
        asked = ", ".join(f"{ratio:g}" for ratio in settings.ratios)
        raise InvalidRequest(
            f"recipe {recipe.name!r} selects no tokens, so none of the ratios {asked} applies to it; give 0 or 1, or leave it out"
        )
    return [Case(recipe, ratio, place) for ratio in ratios for place in settings.kv_from]


def _groups(ratios: Sequence[float]) -> list[list[int]]:
    """Numbers of cases that together compute about one full prefill, in order."""
    groups: list[list[int]] = []
    left = 0.0
    for number, ratio in enumerate(ratios):
        if ratio > left or not groups:
            groups.append([])
            left = 1.0
        groups[-1].append(number)
        left -= ratio
    return groups


def around(order: Sequence[str | int], case: int, way: str, way_s: Sequence[float]) -> list[float]:
    """For each place of a case in the order of what was timed, the mean of a way's times right before and after it.

    `way_s` are this way's times in order; where one side has none, the other's counts.
    """
    found: list[float] = []
    times, before, waiting = iter(way_s), None, 0  # cases since then
    for one in order:
        waiting += one == case
        if one == way:
            after = next(times)
            found += [after if before is None else (before + after) / 2] * waiting
            before, waiting = after, 0
    return [*found, *[before] * waiting] if before is not None else found


@dataclass(frozen=True, slots=True)
class _Cost:
    """What one case computes and takes up, the same in every round."""

    rows: int
    works: tuple[Work, ...]
    stored_bytes: int
    peak_bytes: int | None


class _Context:
    """One context: full prefill and the cases, timed in turn."""

    def __init__(
        self,
        adapter: Adapter,
        prompt: TokenizedPrompt,
        stores: PreparedStores,
        cases: Sequence[Case],
    ) -> None:
        self._adapter, self._prompt, self._stores, self._cases = adapter, prompt, stores, cases
        ids = torch.tensor([prompt.token_ids], device=adapter.geometry.device)
        nothing = stores.of(cases[0].recipe)
        self._ways: dict[str, Callable[[], object]] = {
            "transformers": lambda: stock_prefill(adapter, ids),
            "transformers in blocks": lambda: prefill_in_blocks(adapter, ids),
            OURS: lambda: run(recipe_named("full"), adapter, nothing, prompt),
        }
        self._full_s: dict[str, list[float]] = {name: [] for name in self._ways}
        self._timings: list[list[Timing]] = [[] for _ in cases]
        self._timed: list[str | int] = []  # what was, in order: a way by its name, a case by its number
        self._tried = list(self._ways)  # those that may still be the fastest
        self._costs: list[_Cost] = []
        self._full_flops = 0.0

    def warm_up(self) -> None:
        """Everything once, untimed: what is computed is counted, and memory watched."""
        count = WorkCount(self._adapter)
        with count.counting() as works:
            for way in self._ways.values():
                way()
        (work,) = works  # of ours: the library's passes carry no rows
        self._full_flops = work.flops
        for case in self._cases:
            self._costs.append(self._cost(count, case))

    def settle(self) -> None:
        """From now on the way of full prefill that has been the fastest is timed alone."""
        self._tried = [self._fastest()]

    def round(self, *, backwards: bool) -> None:
        """Every case once, between full prefills; a slow drift favours nobody if every other round runs backwards."""
        steps: list[Callable[[], None]] = [partial(self._time_way, name) for name in self._tried]
        for group in _groups([case.ratio for case in self._cases]):
            steps += [partial(self._time_case, number) for number in group]
            steps.append(lambda: self._time_way(self._fastest()))
        for step in reversed(steps) if backwards else steps:
            step()

    def _fastest(self) -> str:
        """The way of full prefill that requests are compared with, as far as is known."""
        return min(self._tried, key=lambda name: Spread.of(self._full_s[name]).median)

    def full_prefill(self, context_tokens: int) -> FullPrefill:
        """The ways beside each other, after the rounds."""
        ways = {name: Spread.of(times) for name, times in self._full_s.items()}
        fastest = self._fastest()
        return FullPrefill(
            context_tokens=context_tokens,
            prompt_tokens=self._prompt.tokens,
            fastest=fastest,
            ways_s=ways,
            gflops_per_s=self._full_flops / ways[fastest].median / 1e9,
            memory_bytes_per_s=memory_bytes_per_s(self._adapter.geometry.device),
            read_bytes_per_s=read_bytes_per_s(self._stores.files()),
            disk_bytes_per_s=self._disk_bytes_per_s(),
            peak_bytes=peak_bytes(self._ways[fastest], self._adapter.geometry.device),
        )

    def rows(self, shape: str, full: FullPrefill) -> Iterator[TtftRow]:
        """The rows of all cases, in order."""
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
                dtype=str(geometry.dtype).removeprefix("torch."),
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

    def spreads(self, full: FullPrefill) -> Iterator[TtftSpread]:
        """How far the rounds lie apart, case by case."""
        for number, (case, timings) in enumerate(zip(self._cases, self._timings, strict=True)):
            times = [timing.ttft_s for timing in timings]
            speedup = ratios(around(self._timed, number, full.fastest, self._full_s[full.fastest]), times)
            yield TtftSpread(
                full.context_tokens, case.recipe.name, case.ratio, case.kv_from, Spread.of(times), speedup
            )

    def _time_way(self, name: str) -> None:
        def step() -> None:
            self._ways[name]()
            self._adapter.synchronize()

        with nullcontext() if name == OURS else library_attention(self._adapter):
            self._full_s[name].append(timed(step))
        self._timed.append(name)

    def _time_case(self, number: int) -> None:
        self._timings[number].append(self._run(self._cases[number]).timing)
        self._timed.append(number)

    def _cost(self, count: WorkCount, case: Case) -> _Cost:
        found: list[PrefillResult] = []
        with count.counting() as works:
            peak = peak_bytes(lambda: found.append(self._run(case)), self._adapter.geometry.device)
        plan = found[0].plan
        return _Cost(
            rows=plan.recomputed_tokens + plan.fresh_tokens,
            works=tuple(works),
            stored_bytes=self._stored_bytes(case.recipe),
            peak_bytes=peak,
        )

    def _stored_bytes(self, recipe: Recipe) -> int:
        """Of all KV that the request finds, as it is stored: quantised KV counts as what it takes up."""
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
        return read_bytes_per_s(self._stores.files())


def _median(timings: Sequence[Timing], name: str) -> float:
    return Spread.of(getattr(timing, name) for timing in timings).median
