"""One run of the natural benchmark from start to end: the set, the library, retrieval, prompts, outcomes and rows."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import xxhash

from kvweave.config import DEFAULT_CHUNK_TOKENS
from kvweave.embedding import TextEncoder
from kvweave.errors import InvalidRequest, PromptTooLong
from kvweave.kvstore.chunk_store import ChunkStore
from kvweave.models.adapter import Adapter
from kvweave.options import within_context
from kvweave.recipes.names import UNCALIBRATED
from kvweave.state.knowledge_base_state import Progress, no_progress
from kvweave_lab.eval.grid import SUITES, candidates_of, selectors
from kvweave_lab.eval.natural.distractors import PAGES, installed_pages
from kvweave_lab.eval.natural.fallback import Fallback, fallbacks
from kvweave_lab.eval.natural.library import Library, configuration, open_library
from kvweave_lab.eval.natural.measure import NaturalRunner
from kvweave_lab.eval.natural.offline_cost import CHUNKS, OfflineCost, measure_costs
from kvweave_lab.eval.natural.outcomes import ROUNDED, NaturalLog, NaturalOutcome
from kvweave_lab.eval.natural.prompts import (
    LENGTHS,
    MAX_NEW_TOKENS,
    NaturalPrompt,
    instruction,
    make_prompt,
)
from kvweave_lab.eval.natural.questions import (
    SPLITS,
    UNANSWERABLE,
    Question,
    QuestionSet,
    read_set,
    shipped_set,
)
from kvweave_lab.eval.natural.retrieval import RetrievalFigures, measure_retrieval
from kvweave_lab.eval.natural.rows import Comparison, Row, comparisons, summary_rows
from kvweave_lab.eval.runner import Candidate
from kvweave_lab.real_models import cache_folder
from kvweave_lab.results_log import dtype_name, run_config

RECIPES: Final = SUITES["full"].recipes
RATIOS: Final = (0.1, 0.3)
KV_BYTES: Final = 20_000_000_000
"""The cap on prepared KV that is kept between runs."""

Notice = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Request:
    """What to run.

    Attributes:
        recipes: recipe names, NAME:RATIO for one that runs with this ratio alone; full attention, reuse and no context always
            run too.
        ratios: shares of stale context tokens to recompute.
        coverages: shares of all scores to recompute, for recipes whose scores add up.
        preparations: also run every selecting recipe on chunks prepared in these ways.
        storages: also run every recipe with its KV stored in these ways.
        auxiliary: the model of recipes with an auxiliary model.
        lengths: of the context, in tokens.
        chunk_tokens: the longest chunk; None is the product's default for the model.
        split: dev or test.
        kinds: kinds of questions; empty for all that have an answer.
        limit: questions; None runs all. A larger limit begins with the same ones.
        examples: worked examples before the context, at most 3; 0 is the product's own prompt.
        distractors: pages of installed documentation among the documents.
        answers: most tokens of a generated answer; 0 generates none.
        minutes: after so many, no other prompt is begun.
        against: the method with which others are compared.
        documents: a folder with another set's documents.
        questions: the file with its questions.
        index: where the indexes are kept; None is the user's cache.
        output: folder of results; None writes nothing.
        kv: where prepared KV is kept between runs; None is the user's cache.
        kv_bytes: the most that it takes there.
    """

    recipes: tuple[str, ...] = RECIPES
    ratios: tuple[float, ...] = RATIOS
    coverages: tuple[float, ...] = ()
    preparations: tuple[str, ...] = ()
    storages: tuple[str, ...] = ("exact",)
    auxiliary: str | None = None
    lengths: tuple[int, ...] = LENGTHS
    chunk_tokens: int | None = None
    split: str = "dev"
    kinds: tuple[str, ...] = ()
    limit: int | None = None
    examples: int = 3
    distractors: int = PAGES
    answers: int = 0
    minutes: float = math.inf
    against: str = UNCALIBRATED
    documents: Path | None = None
    questions: Path | None = None
    index: Path | None = None
    output: Path | None = None
    kv: Path | None = None
    kv_bytes: int = KV_BYTES


@dataclass(frozen=True, slots=True)
class NaturalResult:
    """Everything that a run found; without recipes, what retrieval does alone.

    Attributes:
        retrieval: what retrieval finds for the questions of the split.
        rows: over all prompts.
        subsets: the same over the prompts whose context holds all evidence, and over those of each kind.
        comparisons: over all prompts.
        fallbacks: over all prompts; empty without answers.
        left_out: prompts that are too long for the model.
        minutes: that all outcomes took, without preparations.
        preparation_minutes: that this run took to prepare chunks and to read what earlier ones had prepared.
    """

    retrieval: RetrievalFigures
    rows: tuple[Row, ...] = ()
    subsets: Mapping[str, tuple[Row, ...]] = field(default_factory=dict)
    comparisons: tuple[Comparison, ...] = ()
    fallbacks: tuple[Fallback, ...] = ()
    left_out: int = 0
    minutes: float = 0.0
    preparation_minutes: float = 0.0


class NaturalBenchmark:
    """The set and the library of a request, for one model; `rounded` has it with other weights, by their number format.

    Raises InvalidRequest for an unknown split or kind, and for a folder of indexes that cannot be written to.
    """

    def __init__(
        self,
        adapter: Adapter,
        request: Request,
        content: QuestionSet,
        encoder: TextEncoder,
        progress: Progress = no_progress,
        rounded: Mapping[str, Adapter] | None = None,
    ) -> None:
        self._adapter, self._request, self._content = adapter, request, content
        self._rounded = {ROUNDED.format(name): each for name, each in (rounded or {}).items()}
        self._kv_folder = request.kv or cache_folder() / "natural-kv"
        self._chunk_tokens = within_context(
            request.chunk_tokens, DEFAULT_CHUNK_TOKENS, adapter.geometry.context_tokens
        )
        self.questions = chosen_questions(self._content, request)
        pages = installed_pages(request.distractors)
        self.library: Library = open_library(
            self._content, pages, adapter.tokenizer, self._chunk_tokens, encoder, request.index, progress
        )
        self._configuration = configuration(pages, self.library)

    def retrieval(self, progress: Progress = no_progress) -> RetrievalFigures:
        """Return the measurements of retrieval, without a language model."""
        return measure_retrieval(self.library, self.questions, self._request.lengths, progress)

    def run(self, notice: Notice = lambda sentence: None, progress: Progress = no_progress) -> NaturalResult:
        """Run everything; with an output folder, the same request resumes an interrupted run.

        Raises PromptTooLong if the model has room for no prompt; InvalidRequest for unknown recipes, an output folder
        of another run and a cap on prepared KV that one prompt exceeds; StoreError if the folder of KV cannot be used.
        """
        adapter, request = self._adapter, self._request
        candidates = chosen_candidates(request)
        retrieval = self.retrieval(progress)
        system = instruction(request.examples)
        prompts, left_out = self._prompts(system)
        if left_out:
            notice(f"{left_out} prompts are left out: they are longer than {adapter.fingerprint.name} takes")
        corpus = self.library.corpus(adapter.template)
        with NaturalLog(request.output, self._run_config()) as log, ExitStack() as stores:
            runner = NaturalRunner(
                adapter,
                corpus,
                log,
                system=system,
                answers=request.answers,
                rounded=self._rounded,
                open_store=lambda group: stores.enter_context(self._store(group)),
            )
            outcomes: list[NaturalOutcome] = []
            ends = time.monotonic() + 60 * request.minutes
            for done, prompt in enumerate(prompts, 1):
                if time.monotonic() < ends or not runner.missing(prompt, candidates):
                    outcomes += runner.outcomes(prompt, candidates)
                progress("prompts", done, len(prompts))
        left = len(prompts) - len({each.prompt for each in outcomes})
        if left:
            said = f"{left} of {len(prompts)} prompts were not begun within {request.minutes:g} minutes"
            if not outcomes:
                raise InvalidRequest(f"{said}; give more --minutes")
            notice(f"{said}; the same command with --output continues")
        costs = self._costs(candidates, system)
        rows = summary_rows(outcomes, costs)
        return NaturalResult(
            retrieval,
            tuple(rows),
            {name: tuple(summary_rows(own, costs)) for name, own in _subsets(outcomes).items()},
            tuple(comparisons(outcomes, rows, request.against)),
            tuple(fallbacks(outcomes)),
            left_out,
            sum(outcome.took_s for outcome in outcomes) / 60,
            runner.prepared_s / 60,
        )

    def about(self) -> dict[str, Any]:
        """Return the description of the set and of the prompts for the report."""
        request = self._request
        return {
            "model": self._adapter.fingerprint.name,
            "dtype": dtype_name(self._adapter),
            "set": str(request.questions or "natural"),
            "documents": len(self._content.documents),
            "questions": len(self.questions),
            "split": request.split,
            "kinds": list(request.kinds) or "all with an answer",
            "chunk_tokens": self._chunk_tokens,
            "examples": request.examples,
            "embedding": self.library.encoder.name,
            "critical_layers": list(self._adapter.critical_layers),
            **self._configuration,
        }

    def _store(self, group: str) -> ChunkStore:
        """Open the store of a group of preparations. Neighbours depend on the library, so that each library has its own KV."""
        namespace = xxhash.xxh3_64_hexdigest(f"{self.library.digest} {group}".encode())
        folder, limit_bytes = self._kv_folder / "chunks", self._request.kv_bytes
        return ChunkStore(folder, namespace=namespace, limit_bytes=limit_bytes)

    def _prompts(self, system: str | None) -> tuple[list[NaturalPrompt], int]:
        """Return the prompts, those of a document together so that its KV is prepared once; and how many are too long."""
        prompts: list[NaturalPrompt] = []
        asked = sorted(self.questions, key=lambda each: _hash(_first_document(each)))
        new_tokens = max(self._request.answers, MAX_NEW_TOKENS)
        for question in asked:
            for length in self._request.lengths:
                try:
                    prompts.append(
                        make_prompt(self._adapter, self.library, question, length, system, new_tokens)
                    )
                except PromptTooLong as error:
                    too_long = error
        left_out = len(asked) * len(self._request.lengths) - len(prompts)
        if not prompts:
            raise PromptTooLong(f"no prompt fits the model; take a shorter --context-tokens: {too_long}")
        return prompts, left_out

    def _run_config(self) -> dict[str, Any]:
        request = self._request
        return {
            **run_config(self._adapter, request.auxiliary),
            **self._configuration,
            "embedding": self.library.encoder.name,
            "chunk_tokens": self._chunk_tokens,
            "examples": request.examples,
            "answers": request.answers,
        }

    def _costs(self, candidates: Sequence[Candidate], system: str | None) -> dict[str, OfflineCost]:
        """Return what each recipe prepares of the library's first documents, as measured now or by an earlier run."""
        template = self._adapter.template
        return measure_costs(
            self._adapter,
            (each.recipe for each in candidates),
            self.library.texts(CHUNKS),
            self.library.corpus(template, CHUNKS),
            system,
            self._kv_folder / "costs" / self.library.digest,
        )


def _subsets(outcomes: Sequence[NaturalOutcome]) -> dict[str, list[NaturalOutcome]]:
    """Return the outcomes of prompts with all evidence, and of each kind of question; those that there are."""
    found = {"all evidence": [outcome for outcome in outcomes if outcome.evidence == 1]}
    for kind in sorted({outcome.kind for outcome in outcomes}):
        found[kind] = [outcome for outcome in outcomes if outcome.kind == kind]
    return {name: own for name, own in found.items() if own}


def chosen_candidates(request: Request) -> list[Candidate]:
    """Return every recipe on its own preparation, and the selecting ones on those that the request names as well."""
    plain = tuple(name for name in request.recipes if ":" not in name)
    suite = replace(
        SUITES["full"],
        recipes=plain,
        ratios=request.ratios,
        coverages=request.coverages,
        storages=request.storages,
        auxiliary=request.auxiliary,
    )
    found = candidates_of(suite)
    for name, ratio in map(_with_ratio, sorted({*request.recipes} - {*plain})):
        found += candidates_of(replace(suite, recipes=(name,), ratios=(ratio,), coverages=()))
    if request.preparations:
        combined = tuple(name for name in selectors() if name in {*plain, "reuse"})
        found += candidates_of(replace(suite, recipes=combined, preparations=request.preparations))
    return list({candidate.label: candidate for candidate in found}.values())


def _with_ratio(recipe: str) -> tuple[str, float]:
    """Split NAME:RATIO; raises InvalidRequest for a ratio that is none."""
    name, _, text = recipe.rpartition(":")
    try:
        ratio = float(text)
    except ValueError:
        ratio = -1.0
    if not 0 <= ratio <= 1:
        raise InvalidRequest(f"--recipe {recipe} has no ratio from 0 to 1 behind its colon; write {name}:0.2")
    return name, ratio


def chosen_questions(content: QuestionSet, request: Request) -> list[Question]:
    """Return the questions of the split and the kinds, limited; raise InvalidRequest if there are none."""
    known = sorted({each.kind for each in content.questions})
    unknown = sorted({*request.kinds} - {*known})
    if unknown:
        raise InvalidRequest(f"the set has no kind {unknown[0]!r}; choose from {', '.join(known)}")
    if request.split not in SPLITS:
        raise InvalidRequest(f"there is no split {request.split!r}; choose one of {', '.join(SPLITS)}")
    kinds = request.kinds or tuple(kind for kind in known if kind != UNANSWERABLE)
    found = [each for each in content.questions if each.split == request.split and each.kind in kinds]
    if not found:
        raise InvalidRequest(f"the set has no questions of split {request.split} and kind {', '.join(kinds)}")
    return sorted(found, key=lambda each: _hash(each.id))[: request.limit]


def _hash(name: str) -> int:
    """Return a number that sorts names in an order that no property of theirs decides."""
    return xxhash.xxh3_64_intdigest(name.encode())


def read_request_set(request: Request) -> QuestionSet:
    """Return the set of a request and check that it has questions; raises InvalidRequest."""
    content = _content(request)
    chosen_questions(content, request)
    return content


def _content(request: Request) -> QuestionSet:
    if request.documents is None and request.questions is None:
        return shipped_set()
    if request.documents is None or request.questions is None:
        raise InvalidRequest("--documents and --questions belong together; give both or neither")
    return read_set(request.documents, request.questions)


def _first_document(question: Question) -> str:
    return question.evidence[0].doc if question.evidence else ""
