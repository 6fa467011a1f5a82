"""Runs become rows: every variant at every length, task by task and over all, with intervals over texts."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from kvweave.decode.strategies import STRATEGIES
from kvweave_lab.eval.decoding.ablations import ABLATED
from kvweave_lab.eval.decoding.outcome import Run, Stretch
from kvweave_lab.eval.results import Estimate
from kvweave_lab.eval.statistics import interval_over_tasks, quotient_over_tasks

OVERALL = "overall"
_DENSE = "dense"


@dataclass(frozen=True, slots=True)
class Row:
    """All texts of a task under one variant, in the stretch that ends `decode_tokens` behind the prompt.

    What counts per token is over all layers and heads. `score`: share of the judged answers that greedy decoding gets
    right, `dense_score` the same answers' under dense decoding, `score_of_dense` the one divided by the other, None where nothing is
    judged; `agreement`: share of
    tokens that greedy decoding would choose as dense decoding does on the same text; `recall`, `attended_mass`, `output_error` as
    `watching` defines them. Estimates are means over texts with 95 % intervals by bootstrap; a text whose answers are
    none in this stretch counts for no score. `prefetch_unused`: of the clusters that were fetched ahead, the share that
    left memory without being asked for. `resident_bytes` is the largest of any text.
    """

    strategy: str
    task: str
    decode_tokens: int
    budget: float
    storage: str
    texts: int
    seeds: int
    judged: int
    recall: Estimate | None
    attended_mass: Estimate | None
    output_error: Estimate | None
    score: Estimate | None
    dense_score: Estimate | None
    score_of_dense: Estimate | None
    agreement: Estimate | None
    nll: float | None
    pages_read_per_token: float
    bytes_per_token: float
    reads_per_token: float
    mean_run_entries: float
    hit_rate: float
    ahead_rate: float
    prefetched_per_token: float
    prefetch_unused: float
    written_bytes_per_token: float
    split_bytes_per_token: float
    moved_bytes_per_token: float
    resident_bytes: int
    latency_s_per_token: float
    clusters: float | None
    cluster_variance: float | None


@dataclass(frozen=True, slots=True)
class Beside:
    """What `dynakv` comes to beside another strategy on the same texts: `missed` recall, `pages` and `reads` as shares of the other's."""

    strategy: str
    task: str
    decode_tokens: int
    budget: float
    storage: str
    missed: Estimate | None
    pages: Estimate | None
    reads: Estimate | None


_Part = tuple[Run, Stretch, Run, Stretch]  # a run's stretch, and that of another run of the same text
_Value = Callable[[_Part], float | None]


def budget_text(budget: float) -> str:
    """A budget for people: a share, or a number of entries."""
    return f"{budget:.0%}" if budget <= 1 else f"{budget:,.0f}"


def rows_of(runs: Sequence[Run]) -> Iterator[Row]:
    """Rows in the order in which runs come, by storage, budget, variant, then length and task."""
    dense = {run.text: run for run in runs if run.variant == _DENSE}
    for storage, budget, variant in dict.fromkeys((run.storage, run.budget, run.variant) for run in runs):
        own = [run for run in runs if (run.storage, run.budget, run.variant) == (storage, budget, variant)]
        for place in range(len(own[0].stretches)):
            parts = [
                (run, run.stretches[place], dense[run.text], dense[run.text].stretches[place]) for run in own
            ]
            for task, groups in _grouped(parts):
                yield _row(task, groups)


def beside_of(runs: Sequence[Run]) -> Iterator[Beside]:
    """What `dynakv` comes to beside every other strategy of the same storage and budget, by length and task."""
    ours = {(run.storage, run.budget, run.text): run for run in runs if run.variant == ABLATED}
    for storage, budget, variant in dict.fromkeys((run.storage, run.budget, run.variant) for run in runs):
        own = [run for run in runs if (run.storage, run.budget, run.variant) == (storage, budget, variant)]
        if (
            variant not in STRATEGIES
            or variant in (_DENSE, ABLATED)
            or (storage, budget, own[0].text) not in ours
        ):
            continue
        for place, stretch in enumerate(own[0].stretches):
            mine = [(ours[storage, budget, run.text], run) for run in own]
            parts = [(our, our.stretches[place], run, run.stretches[place]) for our, run in mine]
            for task, groups in _grouped(parts):
                yield Beside(
                    variant,
                    task,
                    stretch.decode_tokens,
                    budget,
                    storage,
                    missed=_quotient(groups, lambda part: _missed(part[1]), lambda part: _missed(part[3])),
                    pages=_quotient(groups, lambda part: _pages(part[1]), lambda part: _pages(part[3])),
                    reads=_quotient(groups, lambda part: _reads(part[1]), lambda part: _reads(part[3])),
                )


def _grouped(parts: Sequence[_Part]) -> Iterator[tuple[str, list[list[_Part]]]]:
    """Each task's parts, and where there are several all of them by task."""
    tasks = list(dict.fromkeys(part[0].task for part in parts))
    groups = [[part for part in parts if part[0].task == task] for task in tasks]
    for task, group in zip(tasks, groups, strict=True):
        yield task, [group]
    if len(tasks) > 1:
        yield OVERALL, groups


def _row(task: str, groups: Sequence[Sequence[_Part]]) -> Row:
    """Of the parts of one task, or of several."""
    parts = [part for group in groups for part in group]
    run, stretch = parts[0][:2]
    steps = sum(own.steps for _, own, _, _ in parts)

    def total(name: str) -> float:
        return sum(own.counts[name] for _, own, _, _ in parts)

    def per_token(name: str) -> float:
        return total(name) / steps

    def ratio(name: str, of: str) -> float:
        return total(name) / total(of) if total(of) else 0.0

    return Row(
        strategy=run.variant,
        task=task,
        decode_tokens=stretch.decode_tokens,
        budget=run.budget,
        storage=run.storage,
        texts=len(parts),
        seeds=len({part[0].seed for part in parts}),
        judged=sum(own.judged for _, own, _, _ in parts),
        recall=_estimate(groups, _watched("recall")),
        attended_mass=_estimate(groups, _watched("attended_mass")),
        output_error=_estimate(groups, _watched("output_error")),
        score=_estimate(groups, lambda part: _score(part[1])),
        dense_score=_estimate(groups, lambda part: _score(part[3])),
        score_of_dense=_quotient(groups, lambda part: _score(part[1]), lambda part: _score(part[3])),
        agreement=_estimate(groups, _agreement),
        nll=_mean([own.nll for _, own, _, _ in parts]),
        pages_read_per_token=per_token("pages_read"),
        bytes_per_token=per_token("bytes_read"),
        reads_per_token=per_token("reads"),
        mean_run_entries=ratio("entries_read", "cluster_reads"),
        hit_rate=ratio("hits", "retrieved"),
        ahead_rate=ratio("hits_ahead", "retrieved"),
        prefetched_per_token=per_token("prefetched"),
        prefetch_unused=ratio("prefetch_unused", "prefetched"),
        written_bytes_per_token=per_token("bytes_written"),
        split_bytes_per_token=per_token("split_bytes_read"),
        moved_bytes_per_token=per_token("moved_bytes"),
        resident_bytes=int(max(own.counts["peak_resident_bytes"] for _, own, _, _ in parts)),
        latency_s_per_token=median(own.latency_s for _, own, _, _ in parts),
        clusters=_mean([own.clusters for _, own, _, _ in parts]),
        cluster_variance=_mean([own.variance for _, own, _, _ in parts]),
    )


def _estimate(groups: Sequence[Sequence[_Part]], value: _Value) -> Estimate | None:
    """Mean over tasks of the means over texts that have a value; None if none has."""
    columns = [[found for part in group if (found := value(part)) is not None] for group in groups]
    filled = [column for column in columns if column]
    return interval_over_tasks(filled) if filled else None


def _quotient(groups: Sequence[Sequence[_Part]], above: _Value, below: _Value) -> Estimate | None:
    """The mean over tasks of one value divided by that of another, over texts that have both."""
    pairs = [
        [
            (one, other)
            for part in group
            if (one := above(part)) is not None and (other := below(part)) is not None
        ]
        for group in groups
    ]
    filled = [group for group in pairs if group]
    if not filled:
        return None
    return quotient_over_tasks(
        [[one for one, _ in group] for group in filled], [[other for _, other in group] for group in filled]
    )


def _missed(stretch: Stretch) -> float | None:
    return None if stretch.watched is None else 1 - stretch.watched.recall


def _pages(stretch: Stretch) -> float:
    return stretch.counts["pages_read"] / stretch.steps


def _reads(stretch: Stretch) -> float:
    return stretch.counts["reads"] / stretch.steps


def _watched(name: str) -> _Value:
    def value(part: _Part) -> float | None:
        return None if part[1].watched is None else float(getattr(part[1].watched, name))

    return value


def _score(stretch: Stretch) -> float | None:
    return stretch.right / stretch.judged if stretch.judged else None


def _agreement(part: _Part) -> float | None:
    """Where the model writes by itself, texts part with the first token that differs: nothing to compare then."""
    run, stretch, dense, _ = part
    if not run.forced:
        return None
    end = stretch.decode_tokens
    mine, theirs = run.greedy[end - stretch.steps : end], dense.greedy[end - stretch.steps : end]
    return fmean(one == other for one, other in zip(mine, theirs, strict=True))


def _mean(values: Sequence[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return fmean(found) if found else None
