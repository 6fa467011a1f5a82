"""Strategies compared on given texts at equal bytes read: what each does to a model's attention and to what it would write.

A text's first tokens are prefilled once and kept on the disk. Its next ones are given (teacher forcing), so that all of
them run through the model together, while every layer attends row by row as steps of decoding would.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Self

import torch
import xxhash
from torch import Tensor
from transformers import DynamicCache

from kvweave.decode.clusters.outlined import OutlinedClusters
from kvweave.decode.offloaded_cache import OffloadedCache
from kvweave.decode.settings import OffloadSettings
from kvweave.errors import InvalidRequest
from kvweave.models.adapter import Adapter
from kvweave.models.attention import AttentionCall, RowPlan
from kvweave.state.knowledge_base_state import Progress, no_progress
from kvweave_lab.eval.decoding.measure import variant_named
from kvweave_lab.eval.decoding.recorder import Recorder, attach_recorder, unwrapped_retriever
from kvweave_lab.eval.decoding.run import RECORD_EVERY, Prefilled
from kvweave_lab.eval.long_texts import LongText
from kvweave_lab.real_models import cache_folder
from kvweave_lab.results_log import ResultsLog, dtype_name
from kvweave_lab.statistics import Estimate, interval_over_tasks
from kvweave_lab.strategies import DENSE, INDEXED, OUTLINE, OUTLINE_ENTRIES
from kvweave_lab.strategies.centroid import CentroidClusters
from kvweave_lab.strategies.indexed import NUMBER_BYTES, IndexedRetriever

COMPARED = (OUTLINE, *INDEXED[:-1], "dynakv/whole-clusters", "window", "oracle")
"""What is compared by default. `oracle` reads the entries with the largest weights, which only the whole KV can tell."""
BUDGETS = (0.025, 0.05, 0.1, 0.2)


@dataclass(frozen=True, slots=True)
class Request:
    """What to compare, on which texts.

    Attributes:
        texts: the prompt of each is prefilled, and all tokens after it but the last are decoded.
        variants: names of strategies or their variants, see `measure.variant_named`.
        budgets: shares of the entries that a step may read, sinks and window included.
        output: folder of the results log; None keeps results in memory.
        captures: folder of prefilled texts.
    """

    texts: tuple[LongText, ...]
    variants: tuple[str, ...] = COMPARED
    budgets: tuple[float, ...] = BUDGETS
    output: Path | None = None
    captures: Path = cache_folder() / "decoding"


@dataclass(frozen=True, slots=True)
class TextRun:
    """One text under one variant and budget.

    Attributes:
        kl: mean Kullback-Leibler divergence of the next token's distribution from dense decoding's, in nats.
        nll: mean loss of the text's own next token, in nats; `dense_nll` that of dense decoding.
        agreement: share of next tokens whose likeliest one is dense decoding's.
        recall, attended_mass: as `recorder.RecordingRetriever` defines them, means over layers.
        layer_errors: output error of each layer.
        read_share: entries read per step, as a share of all; sinks and window count.
        index_share: bytes of the index as a share of those of all entries.
    """

    text: str
    variant: str
    budget: float
    kl: float
    nll: float
    dense_nll: float
    agreement: float
    recall: float
    attended_mass: float
    layer_errors: tuple[float, ...]
    read_share: float
    index_share: float

    @classmethod
    def of(cls, content: dict[str, Any]) -> Self:
        """Return the run with these JSON values."""
        return cls(**{**content, "layer_errors": tuple(content["layer_errors"])})

    @property
    def output_error(self) -> float:
        """The mean over layers."""
        return fmean(self.layer_errors)


@dataclass(frozen=True, slots=True)
class ReadsRow:
    """All texts under one variant and budget: means with 95 % intervals over texts.

    `error_of_best` is the output error divided by that of the best other variant at this budget, on the same texts;
    `oracle` and the two outlines are no competitors.
    """

    strategy: str
    budget: float
    texts: int
    output_error: Estimate
    error_of_best: float | None
    kl: Estimate
    perplexity_of_dense: float
    agreement: Estimate
    recall: Estimate
    attended_mass: Estimate
    read_share: float
    index_share: float


def compare(adapter: Adapter, request: Request, progress: Progress = no_progress) -> tuple[TextRun, ...]:
    """Decode what the results log lacks; return all runs.

    Raises InvalidRequest for unknown variants, texts beyond the model's positions and another comparison's folder.
    """
    for variant in request.variants:
        variant_named(variant, OffloadSettings())
    longest = max(len(text.token_ids) for text in request.texts)
    if longest > adapter.geometry.context_tokens:
        raise InvalidRequest(
            f"texts of {longest:,} tokens are longer than the {adapter.geometry.context_tokens:,} positions of"
            f" {adapter.fingerprint.name}; take a smaller --prompt-tokens or --length"
        )
    config = {"model": adapter.fingerprint.digest, "dtype": dtype_name(adapter)}
    log: ResultsLog[tuple[str, str, float], TextRun] = ResultsLog(
        request.output,
        config,
        file="equal_reads.jsonl",
        version=1,
        key=lambda run: (run.text, run.variant, run.budget),
        parse=TextRun.of,
    )
    wanted = [(variant, budget) for variant in request.variants for budget in request.budgets]
    total = len(request.texts) * len(wanted)
    with log:
        for number, text in enumerate(request.texts):
            given: _Given | None = None
            for place, (variant, budget) in enumerate(wanted):
                progress("decoding texts", number * len(wanted) + place, total)
                if log.get((text.name, variant, budget)) is None:
                    given = given or _Given(adapter, text, request.captures)
                    log.add(given.run(variant, budget))
        progress("decoding texts", total, total)
        keys = [(text.name, *one) for text in request.texts for one in wanted]
        return tuple(run for key in keys if (run := log.get(key)) is not None)


def reads_rows(runs: Sequence[TextRun]) -> Iterator[ReadsRow]:
    """Return a row for every variant and budget, by budget."""
    for budget in dict.fromkeys(run.budget for run in runs):
        at_budget = [run for run in runs if run.budget == budget]
        by_variant = {
            name: [run for run in at_budget if run.variant == name]
            for name in dict.fromkeys(run.variant for run in at_budget)
        }
        errors = {name: fmean(run.output_error for run in own) for name, own in by_variant.items()}
        for name, own in by_variant.items():
            others = [
                error
                for other, error in errors.items()
                if other not in (name, "oracle", OUTLINE, OUTLINE_ENTRIES, DENSE)
            ]
            yield ReadsRow(
                strategy=name,
                budget=budget,
                texts=len(own),
                output_error=_over(run.output_error for run in own),
                error_of_best=errors[name] / min(others) if others and min(others) > 0 else None,
                kl=_over(run.kl for run in own),
                perplexity_of_dense=float(
                    torch.tensor([run.nll - run.dense_nll for run in own]).mean().exp()
                ),
                agreement=_over(run.agreement for run in own),
                recall=_over(run.recall for run in own),
                attended_mass=_over(run.attended_mass for run in own),
                read_share=fmean(run.read_share for run in own),
                index_share=fmean(run.index_share for run in own),
            )


def _over(values: Iterator[float] | Sequence[float]) -> Estimate:
    return interval_over_tasks([list(values)])


class _Given:
    """A text that is prefilled, with dense decoding's logits (T, vocab) of the rows after it."""

    def __init__(self, adapter: Adapter, text: LongText, captures: Path) -> None:
        self._adapter, self._text = adapter, text
        self._prefilled = _prefilled(adapter, text, captures)
        dense = OffloadSettings(1.0, strategy=DENSE)
        self._dense = self._decode(dense, Recorder())[0].log_softmax(-1)

    def run(self, variant: str, budget: float) -> TextRun:
        """Decode under a variant."""
        recorder = Recorder()
        settings = variant_named(variant, OffloadSettings(budget))
        logits, read_share, index_share = self._decode(settings, recorder)
        own = logits.log_softmax(-1)
        true = torch.tensor(self._text.token_ids[-len(own) :])[:, None]
        layers = torch.tensor(
            [(one.recall, one.attended_mass, one.output_error) for one in recorder.qualities]
        )
        recall, mass, errors = layers.unflatten(0, (self._adapter.geometry.layers, -1)).mean(1).T
        return TextRun(
            text=self._text.name,
            variant=variant,
            budget=budget,
            kl=float((self._dense.exp() * (self._dense - own)).sum(-1).mean()),
            nll=float(-own.gather(1, true).mean()),
            dense_nll=float(-self._dense.gather(1, true).mean()),
            agreement=float((own.argmax(-1) == self._dense.argmax(-1)).float().mean()),
            recall=float(recall.mean()),
            attended_mass=float(mass.mean()),
            layer_errors=tuple(round(float(error), 5) for error in errors),
            read_share=read_share,
            index_share=index_share,
        )

    def _decode(self, settings: OffloadSettings, recorder: Recorder) -> tuple[Tensor, float, float]:
        """Return the logits (T, vocab) of the rows after the prompt, and the shares that are read and indexed."""
        adapter, text = self._adapter, self._text
        first, end = text.prompt_tokens, len(text.token_ids) - 1
        rows = torch.arange(first, end, device=adapter.geometry.device)
        with OffloadedCache(adapter.geometry, settings, torch.arange(first)) as offloaded:
            attach_recorder(offloaded, recorder, text.seed)
            self._prefilled.fill(offloaded)
            ids = torch.tensor(text.token_ids[first:end], device=rows.device)
            plan = _RowByRow(offloaded, rows, adapter.geometry.dtype, recorder)
            logits = adapter.call_model(ids, rows, DynamicCache(), plan, keep=len(ids))
            heads = adapter.geometry.layers * adapter.geometry.kv_heads
            stored = sum(range(first + 1, end + 1)) * heads
            kv_bytes = end * heads * 2 * adapter.geometry.head_width * NUMBER_BYTES
            return logits.float(), offloaded.counts.attended / stored, _index_bytes(offloaded) / kv_bytes


class _RowByRow(RowPlan):
    """Rows (T,) after a prompt that attend to an offloaded cache one after another, as steps would."""

    def __init__(
        self, offloaded: OffloadedCache, rows: Tensor, dtype: torch.dtype, recorder: Recorder
    ) -> None:
        super().__init__(rows, dtype)
        self._offloaded, self._recorder = offloaded, recorder

    def attend(self, call: AttentionCall) -> Tensor:
        """Append and attend to one row after another; `call` has the rows' own keys and values."""
        outputs = []
        for number, row in enumerate(self.rows):
            query, keys, values = (
                part[:, :, number : number + 1] for part in (call.query, call.keys, call.values)
            )
            self._recorder.active = number % RECORD_EVERY == 0
            self._offloaded.layers[call.layer].update(keys, values)
            outputs.append(
                self._offloaded.attend(replace(call, query=query, keys=keys, values=values), row[None])
            )
        return torch.cat(outputs, dim=2)


def _index_bytes(offloaded: OffloadedCache) -> float:
    total = 0.0
    for layer in range(len(offloaded.layers)):
        retriever = unwrapped_retriever(offloaded, layer)
        if isinstance(retriever, CentroidClusters):
            width = offloaded.geometry.head_width
            total += int((retriever.table.sizes > 0).sum()) * width * NUMBER_BYTES
        elif isinstance(retriever, IndexedRetriever | OutlinedClusters):
            total += retriever.resident_bytes
    return total


def _prefilled(adapter: Adapter, text: LongText, captures: Path) -> Prefilled:
    """Return a text's prefilled prompt, computed once and kept in a file."""
    prompt = torch.tensor(text.token_ids[: text.prompt_tokens]).numpy().tobytes()
    name = xxhash.xxh3_64_hexdigest(f"{adapter.fingerprint.digest} {dtype_name(adapter)}".encode() + prompt)
    path = captures / f"{name}.pt"
    if path.exists():
        return Prefilled.restore(text, torch.load(path, weights_only=True))
    found = Prefilled.of(adapter, text)
    captures.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".part")
    torch.save(found.state(), partial)
    partial.replace(path)
    return found


def given_texts(
    adapter: Adapter, paths: Sequence[Path], prompt_tokens: int, decode_tokens: int, skip: int, samples: int
) -> tuple[LongText, ...]:
    """Return pieces of files as texts: the prompt, `decode_tokens` after it, and the token that the last one predicts.

    A folder stands for its .txt and .md files by name. Files are joined by empty lines; the first `skip` pieces are left
    out, and at most `samples` are returned. Raises InvalidRequest if a file cannot be read or there is no whole piece.
    """
    try:
        files = [
            file
            for path in paths
            for file in (sorted(path.iterdir()) if path.is_dir() else [path])
            if not path.is_dir() or file.suffix in (".txt", ".md")
        ]
        written = "\n\n".join(file.read_text(encoding="utf-8").strip() for file in files)
    except (OSError, UnicodeError) as error:
        raise InvalidRequest(f"--text cannot be read: {error}") from error
    ids, size = adapter.template.tokenize(written), prompt_tokens + decode_tokens + 1
    pieces = [tuple(ids[start : start + size]) for start in range(0, len(ids) - size + 1, size)]
    chosen = pieces[skip : skip + samples]
    if not chosen:
        raise InvalidRequest(
            f"--text has {len(ids):,} tokens, too few for {skip + 1} pieces of {size:,}; give more text, or take a"
            " smaller --prompt-tokens"
        )
    stem = "+".join(path.name for path in paths)
    return tuple(
        LongText(f"{stem}/{prompt_tokens}/{skip + number}", "text", skip + number, piece, prompt_tokens)
        for number, piece in enumerate(chosen)
    )
