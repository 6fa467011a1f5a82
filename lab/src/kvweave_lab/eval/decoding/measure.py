"""Decodes every text under every variant, budget and storage, starting with dense decoding as the baseline.

The variants of decoding strategies are at the end.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kvweave.decode.offloaded_cache import strategy_named
from kvweave.decode.settings import OffloadSettings
from kvweave.errors import InvalidRequest
from kvweave.models.adapter import Adapter
from kvweave.state.knowledge_base_state import Progress, no_progress
from kvweave.types import Storage
from kvweave_lab.eval.decoding.results import ABLATED, ComparisonRow, Row, Run, comparison_rows, make_rows
from kvweave_lab.eval.decoding.run import RECORD_EVERY, Prefilled, decode
from kvweave_lab.eval.decoding.shift import UPDATES, Shift, measure_shift
from kvweave_lab.eval.long_texts import LONG_TASKS, LongText, long_text
from kvweave_lab.eval.world import Haystack
from kvweave_lab.results_log import ResultsLog, dtype_name
from kvweave_lab.strategies import CLUSTERED, DENSE, INDEXED, MEMORY_SHARE, STRATEGIES

_LOG, _LOG_VERSION = "runs.jsonl", 3


@dataclass(frozen=True, slots=True)
class Request:
    """What to decode.

    Attributes:
        tasks: kinds of long texts; none with texts from files.
        lengths: decoded tokens after the prompt, ascending. A text is decoded to the last; each length gives a row.
        variants: names of `all_variants`; dense decoding always runs too.
        budgets, storages: of every variant.
        seeds: of the texts.
        samples: texts per kind and seed; of a file, the first ones.
        prompt_tokens: of a generated text.
        cluster_entries: mean size of new clusters, in every variant; the largest size is four times that. None for the
            default, which suits texts of many thousand tokens: a step's budget has to hold several clusters.
        resident_bytes: limit of KV in memory; None takes MEMORY_SHARE.
        split: pool of names, values, phrases and natural text.
        haystack: folder of natural text instead of the split's.
        texts: from files, instead of generated ones.
        folder: of the KV while decoding; None for the folder for temporary files.
        output: of the results log; None keeps results in memory.
    """

    tasks: tuple[str, ...]
    lengths: tuple[int, ...]
    variants: tuple[str, ...]
    budgets: tuple[float, ...]
    storages: tuple[Storage, ...] = ("exact",)
    seeds: tuple[int, ...] = (0, 1, 2)
    samples: int = 4
    prompt_tokens: int = 256
    cluster_entries: int | None = None
    resident_bytes: int | None = None
    split: str = "dev"
    haystack: Path | None = None
    texts: tuple[LongText, ...] = ()
    folder: Path | None = None
    output: Path | None = None


@dataclass(frozen=True, slots=True)
class DecodingResult:
    """All results. `shift` is None for texts from files, and unless all strategies run that it compares."""

    request: Request
    model: str
    dtype: str
    resident_bytes: int
    rows: tuple[Row, ...]
    comparisons: tuple[ComparisonRow, ...]
    runs: tuple[Run, ...]
    shift: Shift | None


def evaluate_decoding(adapter: Adapter, request: Request, progress: Progress = no_progress) -> DecodingResult:
    """Decode what the results log lacks, and summarize all.

    Raises InvalidRequest for unknown names, lengths beyond the model's positions, a memory limit that is too small and
    another evaluation's folder; StoreError and StoreFull if the KV's file fails.
    """
    _check(adapter, request)
    texts = _texts(adapter, request)
    _check_positions(adapter, request, texts)
    # Equal for all seeds, although prompts differ by a token: results of more seeds may be added later.
    prompt = max(text.prompt_tokens for text in request.texts) if request.texts else request.prompt_tokens
    longest = prompt + request.lengths[-1]
    bound = request.resident_bytes or int(MEMORY_SHARE * longest * adapter.geometry.token_bytes)
    with _open_log(request.output, _run_config(adapter, request, bound)) as log:
        runs = tuple(_runs(adapter, request, texts, bound, log, progress))
        shift = None
        if not request.texts and set(UPDATES) <= set(request.variants):
            base = OffloadSettings(request.budgets[0], bound, folder=request.folder)
            base = _with_clusters(request, variant_named(UPDATES[0], base))
            shift = _shift(adapter, request, texts[0], base, log)
    return DecodingResult(
        request,
        adapter.fingerprint.name,
        dtype_name(adapter),
        bound,
        tuple(make_rows(runs)),
        tuple(comparison_rows(runs)),
        runs,
        shift,
    )


def _check(adapter: Adapter, request: Request) -> None:
    for name in request.tasks:
        if name not in LONG_TASKS:
            raise InvalidRequest(
                f"there is no kind of long text {name!r}; choose one of {', '.join(LONG_TASKS)}"
            )
    for name in request.variants:
        variant_named(name, OffloadSettings())
    segments = [later - earlier for earlier, later in pairwise(request.lengths)]
    if request.lengths[0] < 16 or min(segments, default=RECORD_EVERY) < RECORD_EVERY:
        raise InvalidRequest(
            f"the lengths {', '.join(map(str, request.lengths))} are not ascending from 16 tokens on, at least"
            f" {RECORD_EVERY} apart"
        )


def _check_positions(adapter: Adapter, request: Request, texts: Sequence[LongText]) -> None:
    prompt = max(text.prompt_tokens for text in texts)
    over = prompt + request.lengths[-1] - adapter.geometry.context_tokens
    if over > 0:
        raise InvalidRequest(
            f"{request.lengths[-1]:,} decoded tokens after a prompt of {prompt:,} are {over:,} more than the"
            f" {adapter.geometry.context_tokens:,} positions of {adapter.fingerprint.name}; take a shorter --length,"
            " or a --model with more positions"
        )


def _texts(adapter: Adapter, request: Request) -> list[LongText]:
    """Return the texts in an order that starts with every kind and seed."""
    if request.texts:
        return [text for text in request.texts if text.decode_tokens >= request.lengths[-1]] or _too_short(
            request
        )
    natural = Haystack.of_folder(request.haystack) if request.haystack else Haystack.of_split(request.split)
    return [
        long_text(
            task,
            adapter.template,
            natural,
            request.split,
            seed=seed,
            number=number,
            prompt_tokens=request.prompt_tokens,
            decode_tokens=request.lengths[-1],
        )
        for number in range(request.samples)
        for seed in request.seeds
        for task in request.tasks
    ]


def _too_short(request: Request) -> list[LongText]:
    most = max(text.decode_tokens for text in request.texts)
    raise InvalidRequest(
        f"none of the {len(request.texts)} texts has {request.lengths[-1]:,} tokens after its prompt, the"
        f" longest has {most:,}; take a shorter --length"
    )


def _run_config(adapter: Adapter, request: Request, bound: int) -> dict[str, object]:
    return {
        "model": adapter.fingerprint.digest,
        "dtype": dtype_name(adapter),
        "lengths": list(request.lengths),
        "resident bytes": bound,
        "cluster entries": request.cluster_entries,
        "haystack": str(request.haystack) if request.haystack else request.split,
    }


@dataclass(frozen=True, slots=True)
class _LogLine:
    """A line of the results log: a run, or the shift."""

    name: str
    run: Run | None = None
    shift: Shift | None = None


def _open_log(output: Path | None, run_config: Mapping[str, Any]) -> ResultsLog[str, _LogLine]:
    return ResultsLog(
        output, run_config, file=_LOG, version=_LOG_VERSION, key=lambda line: line.name, parse=_parse_line
    )


def _parse_line(content: dict[str, Any]) -> _LogLine:
    run, shift = content["run"], content["shift"]
    return _LogLine(content["name"], run and Run.of(run), shift and Shift.of(shift))


def _shift(
    adapter: Adapter,
    request: Request,
    text: LongText,
    base: OffloadSettings,
    log: ResultsLog[str, _LogLine],
) -> Shift | None:
    name = f"shift {text.name} {base.kv_budget:g}"
    line = log.get(name)
    if line is None:
        shift = measure_shift(adapter, text, base, request.lengths)
        if shift is None:
            return None
        line = _LogLine(name, shift=shift)
        log.add(line)
    return line.shift


def _runs(
    adapter: Adapter,
    request: Request,
    texts: Sequence[LongText],
    bound: int,
    log: ResultsLog[str, _LogLine],
    progress: Progress,
) -> Iterator[Run]:
    chosen = list(_settings(request, bound))
    total = len(texts) * len(chosen)
    for number, text in enumerate(texts):
        prefilled: Prefilled | None = None
        for place, (variant, settings) in enumerate(chosen):
            progress("decoding texts", number * len(chosen) + place, total)
            name = f"{text.name} {variant} {settings.kv_budget:g} {settings.storage}"
            line = log.get(name)
            if line is None:
                prefilled = prefilled or Prefilled.of(adapter, text)
                line = _LogLine(name, run=decode(adapter, prefilled, variant, settings, request.lengths))
                log.add(line)
            assert line.run is not None
            yield line.run
    progress("decoding texts", total, total)


def _settings(request: Request, bound: int) -> Iterator[tuple[str, OffloadSettings]]:
    """Return all variants with their settings, dense decoding first, which has no budget, storage or memory limit."""
    yield DENSE, OffloadSettings(1.0, strategy=DENSE, folder=request.folder)
    for storage in request.storages:
        for budget in request.budgets:
            base = OffloadSettings(budget, bound, folder=request.folder, storage=storage)
            for variant in request.variants:
                if variant != DENSE:
                    yield variant, _with_clusters(request, variant_named(variant, base))


def _with_clusters(request: Request, kv: OffloadSettings) -> OffloadSettings:
    """Return settings with clusters of the requested size."""
    size = request.cluster_entries
    return kv if size is None else _clusters(kv, mean_entries=size, max_entries=4 * size)


# Variants: a strategy with one technique switched off or one setting changed. A variant's name is a strategy's, or
# STRATEGY/ABLATION for a strategy with clusters. Techniques can be switched off in `dynakv` alone.


def _clusters(settings: OffloadSettings, **changes: Any) -> OffloadSettings:
    """Return settings with clusters like the strategy's own, but for `changes`."""
    clusters = settings.clusters or strategy_named(settings.strategy).clusters
    return replace(settings, clusters=replace(clusters, **changes))


def _without(technique: str) -> Callable[[OffloadSettings], OffloadSettings]:
    return lambda kv: replace(kv, strategy=f"{kv.strategy}-{technique}")


ABLATIONS: Mapping[str, Callable[[OffloadSettings], OffloadSettings]] = MappingProxyType(
    {
        "immediate-split": _without("immediate-split"),
        **{f"buffer-{n}": partial(_clusters, buffer_entries=n) for n in (0, 2, 4, 8)},
        **{f"spread-{c:g}": partial(_clusters, spread=c) for c in (0.5, 0.7, 1.0, 2.0, 3.0)},
        "whole-clusters": lambda kv: _clusters(kv, candidates=1.0),
        **{f"candidates-{c:g}": partial(_clusters, candidates=c) for c in (1.4, 1.8, 2.5)},
        "made-order": _without("made-order"),
        "packed": _without("packed"),
        "one-tail-page": lambda kv: replace(kv, disk=replace(kv.disk, tail_pages=1)),
        "no-gaps": lambda kv: replace(kv, disk=replace(kv.disk, gap_pages=0)),
        **{name: _without(name) for name in ("no-prefetch", "lru", "lfu", "resident-centroids")},
    }
)
"""Changes of settings by name. The defaults are a buffer of 16 entries, a spread of 1.5 and 1.8 times as many candidates."""


def all_variants() -> tuple[str, ...]:
    """Return the names of every strategy, then of every ablation."""
    return (*STRATEGIES, *INDEXED, *(f"{ABLATED}/{name}" for name in ABLATIONS))


def variant_named(name: str, settings: OffloadSettings) -> OffloadSettings:
    """Return the settings of a variant; raise InvalidRequest for an unknown name."""
    strategy, _, ablation = name.partition("/")
    strategy_named(strategy)
    chosen = replace(settings, strategy=strategy)
    if not ablation:
        return chosen
    if strategy not in CLUSTERED or ablation not in ABLATIONS:
        raise InvalidRequest(
            f"there is no variant {name!r} of a decoding strategy; choose one of {', '.join(all_variants())}; "
            f"{' and '.join(CLUSTERED[1:])} may be changed as {ABLATED} is"
        )
    changed = ABLATIONS[ablation](chosen)
    strategy_named(changed.strategy)
    return changed
