"""Results of decoding runs, and the rows made of them: every variant at every length, by task and over all tasks.

Intervals are bootstrapped over texts.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, Self

from kvweave_lab.statistics import Estimate, interval_over_tasks, quotient_over_tasks
from kvweave_lab.strategies import DENSE, STRATEGIES

ABLATED = "dynakv"
"""The strategy whose techniques variants switch off, and that others are compared with."""

AFTER_STEPS = (1, 2, 4, 8, 16)
"""Steps within which a cluster may be retrieved again (DynaKV table 2)."""


@dataclass(frozen=True, slots=True)
class RetrievalQuality:
    """Means over layers and recorded steps, 0..1; `recorder.RecordingRetriever` defines them."""

    recall: float
    attended_mass: float
    output_error: float


@dataclass(frozen=True, slots=True)
class Segment:
    """The steps between two lengths.

    Attributes:
        decode_tokens: tokens after the prompt at the end.
        steps: number of tokens.
        judged: answers with evidence outside the recent window.
        correct: judged answers that greedy decoding gets right.
        nll: mean negative log-likelihood of the text's next token, in nats; None where the model writes freely.
        quality: of retrieval; None if no step was recorded.
        counts: reads and writes, by the names of `DecodeCounts`.
        latency_s: median of the steps that were not recorded.
        clusters: mean clusters per head at the end; None for strategies without clusters.
        variance: mean squared distance of keys to their centroids, over all heads; None without clusters.
    """

    decode_tokens: int
    steps: int
    judged: int
    correct: int
    nll: float | None
    quality: RetrievalQuality | None
    counts: Mapping[str, float]
    latency_s: float
    clusters: float | None
    variance: float | None


@dataclass(frozen=True, slots=True)
class ClusterReuse:
    """The number of tracked clusters, and how many of them were retrieved within each of AFTER_STEPS."""

    seen: int
    retrieved: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Run:
    """One text under one variant.

    `greedy` are the tokens that greedy decoding chooses, one per step; `forced` means that the text's own tokens are
    decoded instead. `updated` counts clusters that took an entry in or were split, `drawn` randomly drawn ones.
    """

    text: str
    task: str
    seed: int
    variant: str
    storage: str
    budget: float
    prompt_tokens: int
    forced: bool
    greedy: tuple[int, ...]
    segments: tuple[Segment, ...]
    updated: ClusterReuse
    drawn: ClusterReuse

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> Self:
        """Return the run with these JSON values."""
        segments = tuple(
            Segment(**{**part, "quality": RetrievalQuality(**part["quality"]) if part["quality"] else None})
            for part in content["segments"]
        )
        reuse = {
            name: ClusterReuse(content[name]["seen"], tuple(content[name]["retrieved"]))
            for name in ("updated", "drawn")
        }
        return cls(**{**content, "greedy": tuple(content["greedy"]), "segments": segments, **reuse})


def sum_reuse(parts: Sequence[ClusterReuse]) -> ClusterReuse:
    """Return the sums of several counts."""
    return ClusterReuse(
        sum(part.seen for part in parts),
        tuple(sum(part.retrieved[place] for part in parts) for place in range(len(AFTER_STEPS))),
    )


OVERALL = "overall"


@dataclass(frozen=True, slots=True)
class Row:
    """All texts of a task under one variant, in the segment that ends `decode_tokens` after the prompt.

    Estimates are means over texts with bootstrapped 95 % intervals; a text without judged answers in this segment has no
    score. Counts per token are over all layers and heads.

    Attributes:
        recall, attended_mass, output_error: as `recorder.RecordingRetriever` defines them.
        score: share of the judged answers that greedy decoding gets right; None where nothing is judged.
        dense_score: the same under dense decoding.
        score_of_dense: score / dense_score.
        agreement: share of greedy tokens that equal dense decoding's on the same text.
        prefetch_unused: share of prefetched clusters that were evicted without being used.
        resident_bytes: the largest of any text.
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
class ComparisonRow:
    """`dynakv` compared with another strategy on the same texts: ratios of missed recall, pages and reads."""

    strategy: str
    task: str
    decode_tokens: int
    budget: float
    storage: str
    missed: Estimate | None
    pages: Estimate | None
    reads: Estimate | None


_Part = tuple[Run, Segment, Run, Segment]  # a run's segment, and that of another run of the same text
_Value = Callable[[_Part], float | None]


def budget_text(budget: float) -> str:
    """Return a budget as text: a share, or a number of entries."""
    return f"{budget:.0%}" if budget <= 1 else f"{budget:,.0f}"


def make_rows(runs: Sequence[Run]) -> Iterator[Row]:
    """Return rows in the order of the runs, by storage, budget and variant, then by length and task."""
    dense = {run.text: run for run in runs if run.variant == DENSE}
    for storage, budget, variant in dict.fromkeys((run.storage, run.budget, run.variant) for run in runs):
        own = [run for run in runs if (run.storage, run.budget, run.variant) == (storage, budget, variant)]
        for place in range(len(own[0].segments)):
            parts = [
                (run, run.segments[place], dense[run.text], dense[run.text].segments[place]) for run in own
            ]
            for task, groups in _by_task(parts):
                yield _row(task, groups)


def comparison_rows(runs: Sequence[Run]) -> Iterator[ComparisonRow]:
    """Compare `dynakv` with every other strategy of the same storage and budget, by length and task."""
    dynakv = {(run.storage, run.budget, run.text): run for run in runs if run.variant == ABLATED}
    for storage, budget, variant in dict.fromkeys((run.storage, run.budget, run.variant) for run in runs):
        own = [run for run in runs if (run.storage, run.budget, run.variant) == (storage, budget, variant)]
        if (
            variant not in STRATEGIES
            or variant in (DENSE, ABLATED)
            or (storage, budget, own[0].text) not in dynakv
        ):
            continue
        for place, segment in enumerate(own[0].segments):
            pairs = [(dynakv[storage, budget, run.text], run) for run in own]
            parts = [(chosen, chosen.segments[place], run, run.segments[place]) for chosen, run in pairs]
            for task, groups in _by_task(parts):
                yield ComparisonRow(
                    variant,
                    task,
                    segment.decode_tokens,
                    budget,
                    storage,
                    missed=_quotient(groups, lambda part: _missed(part[1]), lambda part: _missed(part[3])),
                    pages=_quotient(groups, lambda part: _pages(part[1]), lambda part: _pages(part[3])),
                    reads=_quotient(groups, lambda part: _reads(part[1]), lambda part: _reads(part[3])),
                )


def _by_task(parts: Sequence[_Part]) -> Iterator[tuple[str, list[list[_Part]]]]:
    """Return each task's parts, and if there are several tasks, all parts grouped by task."""
    tasks = list(dict.fromkeys(part[0].task for part in parts))
    groups = [[part for part in parts if part[0].task == task] for task in tasks]
    for task, group in zip(tasks, groups, strict=True):
        yield task, [group]
    if len(tasks) > 1:
        yield OVERALL, groups


def _row(task: str, groups: Sequence[Sequence[_Part]]) -> Row:
    """Return the row of one task's parts, or of several tasks'."""
    parts = [part for group in groups for part in group]
    run, segment = parts[0][:2]
    steps = sum(own.steps for _, own, _, _ in parts)

    def total(name: str) -> float:
        return sum(own.counts.get(name, 0) for _, own, _, _ in parts)  # only some strategies move anything

    def per_token(name: str) -> float:
        return total(name) / steps

    def ratio(name: str, of: str) -> float:
        return total(name) / total(of) if total(of) else 0.0

    return Row(
        strategy=run.variant,
        task=task,
        decode_tokens=segment.decode_tokens,
        budget=run.budget,
        storage=run.storage,
        texts=len(parts),
        seeds=len({part[0].seed for part in parts}),
        judged=sum(own.judged for _, own, _, _ in parts),
        recall=_estimate(groups, _quality("recall")),
        attended_mass=_estimate(groups, _quality("attended_mass")),
        output_error=_estimate(groups, _quality("output_error")),
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
    """Return the mean over tasks of the means over texts with a value; None if no text has one."""
    columns = [[found for part in group if (found := value(part)) is not None] for group in groups]
    filled = [column for column in columns if column]
    return interval_over_tasks(filled) if filled else None


def _quotient(groups: Sequence[Sequence[_Part]], above: _Value, below: _Value) -> Estimate | None:
    """Return one value's mean over tasks divided by another's, over texts that have both."""
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


def _missed(segment: Segment) -> float | None:
    return None if segment.quality is None else 1 - segment.quality.recall


def _pages(segment: Segment) -> float:
    return segment.counts["pages_read"] / segment.steps


def _reads(segment: Segment) -> float:
    return segment.counts["reads"] / segment.steps


def _quality(name: str) -> _Value:
    def value(part: _Part) -> float | None:
        return None if part[1].quality is None else float(getattr(part[1].quality, name))

    return value


def _score(segment: Segment) -> float | None:
    return segment.correct / segment.judged if segment.judged else None


def _agreement(part: _Part) -> float | None:
    """Return the share of equal greedy tokens; None where the model writes freely, since such texts diverge."""
    run, segment, dense, _ = part
    if not run.forced:
        return None
    end = segment.decode_tokens
    own, expected = run.greedy[end - segment.steps : end], dense.greedy[end - segment.steps : end]
    return fmean(one == other for one, other in zip(own, expected, strict=True))


def _mean(values: Sequence[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return fmean(found) if found else None
