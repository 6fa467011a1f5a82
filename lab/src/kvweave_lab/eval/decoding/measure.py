"""Every text under every variant, budget and storage: dense decoding first, which the others are compared with."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from kvweave.decode.settings import MEMORY_SHARE, OffloadSettings
from kvweave.engine.facts import facts
from kvweave.engine.state import Progress
from kvweave.errors import InvalidRequest
from kvweave.models.adapter import Adapter
from kvweave.types import Storage
from kvweave_lab.eval.decoding.ablations import variant_named
from kvweave_lab.eval.decoding.kept import KeptResults
from kvweave_lab.eval.decoding.outcome import Run
from kvweave_lab.eval.decoding.rows import Beside, Row, beside_of, rows_of
from kvweave_lab.eval.decoding.run import LOOK_EVERY, Prefilled, decode
from kvweave_lab.eval.decoding.shift import UPDATES, Shift, measure_shift
from kvweave_lab.eval.haystack import Haystack
from kvweave_lab.eval.longtext import LONG_TASKS
from kvweave_lab.eval.longtext.telling import LongText, long_text
from kvweave_lab.eval.subject import dtype_of

DENSE = "dense"


@dataclass(frozen=True, slots=True)
class Request:
    """What runs.

    Attributes:
        tasks: kinds of long texts; none where files are given.
        lengths: tokens decoded behind the prompt, ascending; a text runs to the last, and each begins a row.
        variants: names as in `decode.ablations`; dense always runs beside them.
        budgets, storages: of every variant.
        seeds: each gives texts of its own.
        samples: texts per kind and seed; of a file, the first so many.
        prompt_tokens: of a generated text.
        cluster_entries: mean size of clusters made at once, of every variant, and a quarter of the largest; None for the
            default, which suits texts of many thousand tokens: what a step may retrieve has to hold several.
        resident_bytes: bound of KV in memory; None takes MEMORY_SHARE.
        split: pool of names, values, phrases and natural text.
        haystack: a folder of natural text instead of the split's.
        texts: those of files, instead of generated ones.
        folder: where KV lies while decoding; None for the folder for temporary files.
        output: where results are kept; None keeps nothing.
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
class Quality:
    """A whole evaluation; `shift` None where texts are of files, or not all strategies run that it compares."""

    request: Request
    model: str
    dtype: str
    resident_bytes: int
    rows: tuple[Row, ...]
    beside: tuple[Beside, ...]
    runs: tuple[Run, ...]
    shift: Shift | None


def evaluate_decoding(
    adapter: Adapter, request: Request, progress: Progress = lambda stage, done, total: None
) -> Quality:
    """Run what is not there yet and sum everything up.

    Raises InvalidRequest for names that are unknown, lengths that the model has no positions for, too little memory
    or another evaluation's folder; StoreError and StoreFull where the KV's file fails.
    """
    _check(adapter, request)
    texts = _texts(adapter, request)
    _check_positions(adapter, request, texts)
    # As many tokens for all seeds, though prompts end a token earlier or later: results of more seeds may join them.
    prompt = max(text.prompt_tokens for text in request.texts) if request.texts else request.prompt_tokens
    longest = prompt + request.lengths[-1]
    bound = request.resident_bytes or int(MEMORY_SHARE * longest * adapter.geometry.token_bytes)
    kept = KeptResults(request.output, _subject(adapter, request, bound))
    runs = tuple(_runs(adapter, request, texts, bound, kept, progress))
    shift = None
    if not request.texts and set(UPDATES) <= set(request.variants):
        base = _grouped(request, OffloadSettings(request.budgets[0], bound, folder=request.folder))
        shift = measure_shift(adapter, texts[0], base, request.lengths, kept)
    return Quality(
        request,
        adapter.fingerprint.name,
        dtype_of(adapter),
        bound,
        tuple(rows_of(runs)),
        tuple(beside_of(runs)),
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
    stretches = [later - earlier for earlier, later in pairwise(request.lengths)]
    if request.lengths[0] < 16 or min(stretches, default=LOOK_EVERY) < LOOK_EVERY:
        raise InvalidRequest(
            f"the lengths {', '.join(map(str, request.lengths))} are not ascending from 16 tokens on, at least"
            f" {LOOK_EVERY} apart"
        )


def _check_positions(adapter: Adapter, request: Request, texts: Sequence[LongText]) -> None:
    prompt = max(text.prompt_tokens for text in texts)
    over = prompt + request.lengths[-1] - adapter.geometry.context_tokens
    if over > 0:
        raise InvalidRequest(
            f"{request.lengths[-1]:,} decoded tokens behind a prompt of {prompt:,} are {over:,} more than the"
            f" {adapter.geometry.context_tokens:,} positions of {adapter.fingerprint.name}; take a shorter --length,"
            " or a --model with more positions"
        )


def _texts(adapter: Adapter, request: Request) -> list[LongText]:
    """In an order that lets every kind and seed come early."""
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
        f"none of the {len(request.texts)} texts goes on for {request.lengths[-1]:,} tokens behind its prompt, the"
        f" longest for {most:,}; take a shorter --length"
    )


def _subject(adapter: Adapter, request: Request, bound: int) -> dict[str, object]:
    return {
        "model": adapter.fingerprint.digest,
        "dtype": dtype_of(adapter),
        "lengths": list(request.lengths),
        "resident bytes": bound,
        "cluster entries": request.cluster_entries,
        "haystack": str(request.haystack) if request.haystack else request.split,
    }


def _runs(
    adapter: Adapter,
    request: Request,
    texts: Sequence[LongText],
    bound: int,
    kept: KeptResults,
    progress: Progress,
) -> Iterator[Run]:
    chosen = list(_settings(request, bound))
    total = len(texts) * len(chosen)
    for number, text in enumerate(texts):
        prefilled: Prefilled | None = None
        for place, (variant, settings) in enumerate(chosen):
            progress("decoding texts", number * len(chosen) + place, total)
            name = f"{text.name} {variant} {settings.kv_budget:g} {settings.storage}"
            found = kept.get(name)
            if found is None:
                prefilled = prefilled or Prefilled.of(adapter, text)
                found = facts(decode(adapter, prefilled, variant, settings, request.lengths))
                kept.put(name, found)
            yield Run.of(found)
    progress("decoding texts", total, total)


def _settings(request: Request, bound: int) -> Iterator[tuple[str, OffloadSettings]]:
    """Dense first; it has no budget, no storage and no bound."""
    yield DENSE, OffloadSettings(1.0, strategy=DENSE, folder=request.folder)
    for storage in request.storages:
        for budget in request.budgets:
            base = OffloadSettings(budget, bound, folder=request.folder, storage=storage)
            for variant in request.variants:
                if variant != DENSE:
                    yield variant, variant_named(variant, _grouped(request, base))


def _grouped(request: Request, kv: OffloadSettings) -> OffloadSettings:
    """With clusters of the size asked for."""
    size = request.cluster_entries
    if size is None:
        return kv
    return replace(kv, clusters=replace(kv.clusters, mean_entries=size, max_entries=4 * size))
