"""One user's questions under one system, in order: which answers come from the cache, and what is stored.

The answer cache, predictions, recipes and stores are the product's; this file is where systems differ. Work at idle time
is in `background.py`.
"""

import shutil
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Self

from kvweave.answer_cache.cache import AnswerCache
from kvweave.answer_cache.predictions import PredictionStore
from kvweave.answer_cache.records import CachedAnswer, Vector
from kvweave.config import AnswersConfig
from kvweave.database import Database
from kvweave.kvstore.chunk_store import ChunkStore
from kvweave.kvstore.memory_store import MemoryStore
from kvweave.models.adapter import Adapter
from kvweave.options import AskOptions
from kvweave.recipes.methods import recipe_named
from kvweave.text import clean_text
from kvweave_lab.eval.metrics import METRICS, bleu
from kvweave_lab.eval.personas.corpus import UserCorpus
from kvweave_lab.eval.personas.model import ModelPass, Reply, TextPath
from kvweave_lab.eval.personas.systems import Answers, Setting, Source, System
from kvweave_lab.eval.personas.users import Question


@dataclass(frozen=True, slots=True)
class ServedQuestion:
    """One question and its answer.

    Attributes:
        question: as it was asked.
        answer: that the user got; of a long reply, the short answer that it begins with.
        rouge_l: of the answer, 0..1.
        exact_match: 1 if the answer is a reference, 0 if not.
        model_pass: that computed the answer; None for a cached answer.
        cached_question: the question whose cached answer was given; None for a computed answer.
        similarity: the cosine of both questions; 0 for a computed answer.
        was_predicted: whether the cached question was predicted and not asked before.
        context: tokens of the retrieved chunks.
        found: context tokens with stored KV.
        found_predicted: context tokens whose KV was stored for a predicted question.
        bleu: of the answer, 0..1; None where sacrebleu is not installed.
    """

    question: str
    answer: str
    rouge_l: float
    exact_match: float
    model_pass: ModelPass | None
    cached_question: str | None = None
    similarity: float = 0.0
    was_predicted: bool = False
    context: int = 0
    found: int = 0
    found_predicted: int = 0
    bleu: float | None = None

    @property
    def is_hit(self) -> bool:
        """Whether the answer came from the cache."""
        return self.cached_question is not None

    @property
    def is_reworded_hit(self) -> bool:
        """Whether the answer came from the cache, from a question in other words."""
        return self.is_hit and self.cached_question != self.question


@dataclass(frozen=True, slots=True)
class IdlePeriod:
    """Idle time before a question or after the last: steps by kind, and operations at the shape that is priced."""

    steps: dict[str, int]
    flops: float


@dataclass(frozen=True, slots=True)
class StoredTotals:
    """What is stored at the end: questions and the bytes of their answers, tokens of KV, and predicted questions."""

    questions: int
    answered: int
    answer_bytes: int
    kv_tokens: int
    predicted: int


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """The record of a trial's session with one user."""

    trial: str
    user: str
    served: tuple[ServedQuestion, ...]
    idle: tuple[IdlePeriod, ...]
    stored: StoredTotals
    took_s: float = 0.0

    @property
    def key(self) -> tuple[str, str]:
        """Identifies the record in a results log."""
        return self.trial, self.user


_SAME_WORDS: Final = 1.0
_ENTRY_BYTES: Final = 8192  # upper bound of an entry's header on disk
_RECIPES: Final = {"none": "full", "path": "prefix"}


class UserSession:
    """A system that serves one user. A context manager, which deletes its files."""

    def __init__(
        self, system: System, setting: Setting, corpus: UserCorpus, answers: Answers = "short"
    ) -> None:
        self.system, self.setting, self.corpus = system, setting, corpus
        self._long = answers == "long"
        self._folder = Path(tempfile.mkdtemp(dir=corpus.folder))
        self._database = Database(self._folder / "catalog.sqlite")
        self.answers = AnswerCache(self._database, AnswersConfig().answer_limit_bytes)
        self.predictions = PredictionStore(self._database)
        self.recipe = corpus.recipe if system.kv == "anywhere" else recipe_named(_RECIPES[system.kv])
        self.store = self._open_store()
        self.answer_settings = AskOptions(self.recipe.name, corpus.top_k)
        self._asked: set[str] = set()
        self._stored_by_prediction: dict[TextPath, bool] = {}  # of exact KV

    def _open_store(self) -> ChunkStore | MemoryStore:
        limit, anywhere = self.setting.limit_tokens, self.system.kv == "anywhere"
        if limit is None:
            return MemoryStore(self.corpus.prepared) if anywhere else MemoryStore()
        store = ChunkStore(self._folder / "kv", limit_bytes=limit_bytes(self.corpus.adapter, limit))
        if anywhere:
            self.corpus.prepare(store)
        return store

    def change(self, setting: Setting) -> None:
        """Use other settings from now on; a storage limit may change, not be introduced."""
        if setting.limit_tokens is not None:
            assert isinstance(self.store, ChunkStore)
            self.store.set_limit(limit_bytes(self.corpus.adapter, setting.limit_tokens))
        self.setting = setting

    def ask(self, asked: Question) -> ServedQuestion:
        """Answer a question of the user."""
        question = clean_text(asked.text)
        vector = self.corpus.encoder.encode([question])[0]
        cached = self.cached(question, vector)
        if cached is not None:
            served = self._serve_cached(asked, question, vector, cached)
        else:
            served = self._serve_computed(asked, question, vector)
        self._asked.add(question)
        if self.system.predicts_from == "summary":
            self.predictions.record_question(question)
        return served

    def _serve_cached(
        self, asked: Question, question: str, vector: Vector, cached: CachedAnswer
    ) -> ServedQuestion:
        was_predicted = self._is_predicted(cached.question)
        self.answers.record_hit(cached, question, lambda: vector)
        self.predictions.predicted.record_hit(cached.question)
        return replace(
            self._scored(question, cached.text, asked),
            cached_question=cached.question,
            similarity=cached.similarity,
            was_predicted=was_predicted,
        )

    def _serve_computed(self, asked: Question, question: str, vector: Vector) -> ServedQuestion:
        reply = self.compute(question, "asked")
        if "asked" in self.system.fills_answers:
            self.store_answer(question, vector, reply.text)
        predicted = sum(tokens for path, tokens in reply.exact_chunks if self._stored_by_prediction.get(path))
        return replace(
            self._scored(question, reply.text, asked),
            model_pass=reply.model_pass,
            context=reply.context,
            found=reply.found,
            found_predicted=predicted,
        )

    def cached(self, question: str, vector: Vector) -> CachedAnswer | None:
        """Return the cached answer that a question gets; None if it is to be computed."""
        threshold = self.setting.threshold
        match self.system.matching:
            case "none":
                return None
            case "same":
                return self.answers.find(question, lambda: vector, self.answer_settings, threshold)
            case "near":
                return self._nearest(vector, threshold)

    def _nearest(self, vector: Vector, threshold: float) -> CachedAnswer | None:
        """Return the cached answer with the nearest question vector, without comparing the questions (PerCache §4.2.1)."""
        near = self.answers.similar(vector, self.answer_settings, threshold)
        for other, cosine in sorted(near, key=lambda each: -each[1]):
            cached = self.answers.find(other, lambda: vector, self.answer_settings, _SAME_WORDS)
            if cached is not None and cached.question == other:
                return replace(cached, similarity=cosine)
        return None

    def compute(self, question: str, source: Source) -> Reply:
        """Compute the model's reply over the system's KV; store KV if the system does for this source.

        For the user's questions, the drafts of prompt lookup are counted, for every system.
        """
        reply = self.corpus.model.answer(
            self.recipe,
            self.store,
            self.corpus.prompt(question),
            store_kv=source in self.system.fills_kv,
            looks_up=source == "asked",
            long=self._long,
        )
        self._record_stored(reply, by_prediction=source == "predicted" and self._is_predicted(question))
        return reply

    def short_answer(self, text: str) -> str:
        """Return the answer in a reply, which is scored."""
        return self.corpus.model.long_replies.short(text)

    def prefill(self, question: str) -> Reply:
        """Compute and store the KV of a predicted question's prompt, without an answer."""
        prompt = self.corpus.prompt(question)
        reply = self.corpus.model.prefill(self.recipe, self.store, prompt)
        self._record_stored(reply, by_prediction=self._is_predicted(question))
        return reply

    def _is_predicted(self, question: str) -> bool:
        """Return whether a question was predicted and not asked yet."""
        return self.predictions.predicted.contains(question) and question not in self._asked

    def _record_stored(self, reply: Reply, *, by_prediction: bool) -> None:
        self._stored_by_prediction |= dict.fromkeys(reply.stored_paths, by_prediction)

    def store_answer(self, question: str, vector: Vector, text: str) -> None:
        """Put an answer into the cache."""
        sources, provenance = self.corpus.provenance(question, self.answers.epoch)
        self.answers.put(question, vector, self.answer_settings, text, sources, provenance)

    def stored(self) -> StoredTotals:
        """Return the totals of stored questions, answers, KV and predictions."""
        totals, geometry = self.answers.totals(), self.corpus.adapter.geometry
        return StoredTotals(
            questions=totals.questions,
            answered=totals.answered,
            answer_bytes=totals.bytes,
            kv_tokens=round(self.store.used_bytes / geometry.token_bytes),
            predicted=self.predictions.predicted.totals().kept,
        )

    def _scored(self, question: str, reply: str, asked: Question) -> ServedQuestion:
        answer = self.short_answer(reply)
        return ServedQuestion(
            question=question,
            answer=answer,
            rouge_l=METRICS["rouge_l"](answer, asked.answers),
            exact_match=METRICS["exact_match"](answer, asked.answers),
            model_pass=None,
            bleu=bleu(answer, asked.answers),
        )

    def close(self) -> None:
        """Close and delete the files."""
        self.store.close()
        self._database.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def limit_bytes(adapter: Adapter, tokens: int) -> int:
    """Return the store limit for this many tokens of KV, with room for entry headers."""
    return tokens * adapter.geometry.token_bytes + tokens // 64 * _ENTRY_BYTES
