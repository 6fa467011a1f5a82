"""One user's questions under one system, in order of time: what the bank gives, what the model answers, what is kept.

Bank, outlook, recipes and stores are the engine's; this file is what the systems differ in. What is done at idle time is
`idle_time`'s to say.
"""

import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from kvweave.answer_cache.cache import AnswerCache
from kvweave.answer_cache.english.words import plain
from kvweave.answer_cache.records import AnswerSettings, CachedAnswer, Vector
from kvweave.config import AnswersConfig
from kvweave.database import Database
from kvweave.engine.speculative import PromptLookupDrafter, drafts_of
from kvweave.kvstore.chunk_store import ChunkStore
from kvweave.kvstore.memory_store import MemoryStore
from kvweave.models.adapter import Adapter
from kvweave.predict.store import PredictionStore
from kvweave.recipes.methods import recipe_named
from kvweave.recipes.recipe import Recipe
from kvweave_lab.eval.bleu import bleu
from kvweave_lab.eval.metrics import METRICS
from kvweave_lab.eval.personas.notebook import Notebook
from kvweave_lab.eval.personas.people import Asked
from kvweave_lab.eval.personas.reading import Read, TextPath
from kvweave_lab.eval.personas.served import Held, Served
from kvweave_lab.eval.personas.systems import Reuse, Source, System
from kvweave_lab.eval.personas.trials import Setting

_SAME_WORDS: Final = 1.0
_ENTRY_BYTES: Final = 8192  # an entry's header on disk, generously
_RECIPES: Final = {"none": "full", "path": "prefix"}


class UserSession:
    """A system at work for one user. A context manager; its files go with it."""

    def __init__(self, system: System, setting: Setting, notebook: Notebook) -> None:
        self.system, self.setting, self.notebook = system, setting, notebook
        self._folder = Path(tempfile.mkdtemp(dir=notebook.folder))
        self._database = Database(self._folder / "catalog.sqlite")
        self.answers = AnswerCache(self._database, AnswersConfig().answer_limit_bytes)
        self.predictions = PredictionStore(self._database)
        self.recipe = recipe_of(system.kv, notebook)
        self.store = self._opened_store()
        self.circumstances = AnswerSettings(
            self.recipe.name, None, None, notebook.top_k, None, False, None, None
        )
        self._asked: set[str] = set()
        self._ahead: dict[TextPath, bool] = {}  # of KV behind exactly its text: whether a prediction left it

    def _opened_store(self) -> ChunkStore:
        limit, anywhere = self.setting.limit_tokens, self.system.kv == "anywhere"
        if limit is None:
            return MemoryStore(self.notebook.prepared) if anywhere else MemoryStore()
        store = ChunkStore(self._folder / "kv", limit_bytes=limit_bytes(self.notebook.adapter, limit))
        if anywhere:
            self.notebook.prepare(store)
        return store

    def change(self, setting: Setting) -> None:
        """Settings are others from now on; a limit may change, not appear."""
        if setting.limit_tokens is not None:
            self.store.set_limit(limit_bytes(self.notebook.adapter, setting.limit_tokens))
        self.setting = setting

    # Questions

    def ask(self, asked: Asked) -> Served:
        """Answer a question of the user."""
        question = plain(asked.text)
        vector = self.notebook.encoder.encode([question])[0]
        cache_hit = self._banked(question, vector)
        if cache_hit is not None:
            foreseen = self._is_foreseen(cache_hit.question)
            self.answers.given(cache_hit, question, lambda: vector)
            self.predictions.ledger.gave(cache_hit.question)
            served = _served(question, cache_hit.text, asked)
            served = replace(
                served, cache_hit=cache_hit.question, similarity=cache_hit.similarity, foreseen=foreseen
            )
        else:
            read = self.read(question, "asked", self._drafts(vector) if self.system.foretells else None)
            if "asked" in self.system.fills_answers:
                self.keep(question, vector, read.text)
            served = replace(
                _served(question, read.text, asked),
                took=read.took,
                context=read.context,
                found=read.found,
                found_ahead=sum(tokens for path, tokens in read.behind if self._ahead.get(path)),
            )
        self._asked.add(question)
        if self.system.foresees == "abstract":
            self.predictions.asked(question)
        return served

    def _banked(self, question: str, vector: Vector) -> CachedAnswer | None:
        threshold = self.setting.threshold
        match self.system.matching:
            case "none":
                return None
            case "same":
                return self.answers.find(question, lambda: vector, self.circumstances, threshold)
            case "near":
                return self._nearest(vector, threshold)

    def _nearest(self, vector: Vector, threshold: float) -> CachedAnswer | None:
        """The answered question whose vector is nearest, whatever it says (PerCache §4.2.1)."""
        near = self.answers.near(vector, self.circumstances, threshold)
        for other, cosine in sorted(near, key=lambda each: -each[1]):
            cache_hit = self.answers.find(other, lambda: vector, self.circumstances, _SAME_WORDS)
            if cache_hit is not None and cache_hit.question == other:
                return replace(cache_hit, similarity=cosine)
        return None

    def _drafts(self, vector: Vector) -> list[tuple[int, ...]]:
        """What the answer may be."""
        nearest = self.answers.nearest(vector, self.circumstances, self.setting.threshold)
        return [] if nearest is None else drafts_of(self.notebook.adapter, nearest.text)

    def read(self, question: str, source: Source, drafts: Sequence[Sequence[int]] | None = None) -> Read:
        """The model's answer, from whatever KV the system has; leaves KV where this source's questions do.

        With `drafts`, what they and the prompt tell of it is checked.
        """
        prompt = self.notebook.prompt(question)
        keeps_kv = source in self.system.fills_kv
        foretelling = None if drafts is None else PromptLookupDrafter(prompt.token_ids, drafts)
        read = self.notebook.reader.answer(
            self.recipe, self.store, prompt, keeps_kv=keeps_kv, foretelling=foretelling
        )
        self._left(read, ahead=source == "predicted" and self._is_foreseen(question))
        return read

    def prefill(self, question: str) -> Read:
        """The same at idle time without an answer, for the KV alone."""
        prompt = self.notebook.prompt(question)
        read = self.notebook.reader.prefill(self.recipe, self.store, prompt)
        self._left(read, ahead=self._is_foreseen(question))
        return read

    def _is_foreseen(self, question: str) -> bool:
        """Whether a question was predicted, and nobody has asked it."""
        return self.predictions.ledger.knows(question) and question not in self._asked

    def _left(self, read: Read, *, ahead: bool) -> None:
        self._ahead |= dict.fromkeys(read.left, ahead)

    def keep(self, question: str, vector: Vector, text: str) -> None:
        """Put an answer into the bank."""
        sources, rests_on = self.notebook.provenance(question, self.answers.epoch)
        self.answers.put(question, vector, self.circumstances, text, sources, rests_on)

    # What is left

    def held(self) -> Held:
        """What lies stored now."""
        totals, geometry = self.answers.totals(), self.notebook.adapter.geometry
        return Held(
            questions=totals.questions,
            answered=totals.answered,
            answer_bytes=totals.bytes,
            kv_tokens=round(self.store.used_bytes / geometry.token_bytes),
            predicted=self.predictions.ledger.totals().kept,
        )

    def close(self) -> None:
        """Close and delete the files."""
        self.store.close()
        self._database.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> "UserSession":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def recipe_of(kv: Reuse, notebook: Notebook) -> Recipe:
    """The recipe by which a system reuses KV."""
    return notebook.recipe if kv == "anywhere" else recipe_named(_RECIPES[kv])


def limit_bytes(adapter: Adapter, tokens: int) -> int:
    """A cap for so many tokens of KV, with room for what an entry takes beside it."""
    return tokens * adapter.geometry.token_bytes + tokens // 64 * _ENTRY_BYTES


def _served(question: str, answer: str, asked: Asked) -> Served:
    return Served(
        question=question,
        answer=answer,
        rouge_l=METRICS["rouge_l"](answer, asked.answers),
        exact_match=METRICS["exact_match"](answer, asked.answers),
        took=None,
        bleu=bleu(answer, asked.answers),
    )
