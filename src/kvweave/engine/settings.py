"""What a question is answered with: what was named with it, and the settings where that left something open.

Knows neither documents nor models.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from kvweave.answer_cache.records import AnswerSettings
from kvweave.config import DEFAULT_NEW_TOKENS, Config, GenerationConfig, within_context
from kvweave.database import Database
from kvweave.decode.settings import OffloadSettings, asked_for
from kvweave.errors import InvalidRequest, KnowledgeBaseMismatch, PathNotFound
from kvweave.models.prompt import DEFAULT_SYSTEM
from kvweave.recipes.methods import recipe_named
from kvweave.recipes.prepare import NotPrepared
from kvweave.recipes.recipe import Recipe
from kvweave.types import AnswerCacheUse, ModelFingerprint


@dataclass(frozen=True, slots=True)
class Options:
    """As `KnowledgeBase.stream` describes it; None leaves it to the settings."""

    recipe: str | None = None
    prepare: str | None = None
    ratio: float | None = None
    coverage: float | None = None
    top_k: int | None = None
    drop_chunks: bool = False
    bank: AnswerCacheUse = "serve"


@dataclass(frozen=True, slots=True)
class Choices:
    """Chooses by the settings of the knowledge base in `folder`."""

    config: Config
    folder: Path

    def recipe(self, named: str | None = None, prepare: str | None = None) -> Recipe:
        """What is named here, else in the settings; there a preparation is for those recipes that prepare something.

        Raises UnknownRecipe and InvalidRequest.
        """
        auxiliary = self.config.model.auxiliary
        storage = None if self.config.store.storage == "auto" else self.config.store.storage
        if named is None:
            return recipe_named(self.config.recipe, prepare or self.config.prepare, auxiliary, storage)
        chosen = recipe_named(named, prepare, auxiliary, storage)
        complete = prepare is not None or "+" in named or chosen.prepare == NotPrepared()
        return chosen if complete else recipe_named(named, self.config.prepare, auxiliary, storage)

    def circumstances(self, recipe: Recipe, options: Options, top_k: int) -> AnswerSettings | None:
        """Under which settings an answer is kept and given again; None where it is not: it was drawn at random."""
        generation = self.config.generation
        if options.bank == "ignore" or generation.temperature > 0:
            return None
        return AnswerSettings(
            recipe.name,
            options.ratio,
            options.coverage,
            top_k,
            generation.max_new_tokens,
            options.drop_chunks,
            self.config.model.auxiliary,
            self.config.decoding.kv_budget,
        )

    def top_k(self, named: int | None = None) -> int:
        """How many chunks are looked for; raises InvalidRequest below one."""
        top_k = self.config.retrieval.top_k if named is None else named
        if top_k < 1:
            raise InvalidRequest(f"top_k is {top_k}; at least one chunk is needed")
        return top_k

    @property
    def generation(self) -> GenerationConfig:
        """How answers are decoded."""
        return self.config.generation

    def max_new_tokens(self, context_tokens: int) -> int:
        """The most tokens of an answer by a model that holds this many."""
        return within_context(self.config.generation.max_new_tokens, DEFAULT_NEW_TOKENS, context_tokens)

    @property
    def kv(self) -> OffloadSettings | None:
        """How the KV is held while an answer is decoded; None: all of it in memory."""
        return self.decoded_from(self.config.decoding.kv_budget)

    def decoded_from(self, kv_budget: float | None) -> OffloadSettings | None:
        """The same with this budget."""
        wanted = replace(self.config.decoding, kv_budget=kv_budget)
        # Beside the knowledge base: the system's temporary folder may well be memory.
        return asked_for(wanted, self.folder / "decoding")


_SCHEMA = ("CREATE TABLE IF NOT EXISTS identity (name TEXT PRIMARY KEY, value TEXT NOT NULL)",)
OPTIONS = {
    "system": "--system",
    "chunk_tokens": "--chunk-tokens",
    "overlap_tokens": "--overlap-tokens",
    "embedding": "--embedding-model",
    "embedding_source": "--embedding-model",
}
"""How a user says each fact that is settled."""

_WAY_OUT = "name another --kb, or empty this one with `kvweave rm --all` and add the documents again"


class KBIdentity:
    """Named facts about a knowledge base; each is settled once and must agree from then on."""

    def __init__(self, database: Database, kb: str) -> None:
        self._database = database
        self._kb = kb
        database.script(_SCHEMA)

    def get(self, name: str) -> str | None:
        """A settled fact, or None."""
        rows = self._database.query("SELECT value FROM identity WHERE name = ?", (name,))
        return str(rows[0][0]) if rows else None

    def settle(self, model: ModelFingerprint, facts: Mapping[str, str]) -> None:
        """Write what is not settled yet; raise KnowledgeBaseMismatch where something else is.

        Two processes may fill a new knowledge base at once: whoever came first wins, and the other is told.
        """
        made_by = {f"model_{part}": value for part, value in dataclasses.asdict(model).items()}
        with self._database.transaction():
            self._database.execute_many(
                "INSERT OR IGNORE INTO identity VALUES (?, ?)", list({**made_by, **facts}.items())
            )
            self.check_model(model)
            for fact, value in facts.items():
                self.check(fact, value)

    def clear(self) -> None:
        """Forget everything, so that an emptied knowledge base can be made anew."""
        self._database.execute("DELETE FROM identity")

    def check_model(self, model: ModelFingerprint) -> None:
        """Raise KnowledgeBaseMismatch, saying what differs, if a model is settled and it is not this one."""
        if self.get("model_digest") in (None, model.digest):
            return
        given = dataclasses.asdict(model)
        parts = ("dtype", "configuration", "tokenizer", "weights")
        differing = [part for part in parts if self.get(f"model_{part}") != given[part]]
        if "dtype" in differing and "weights" in differing:
            differing.remove("weights")  # the same weights in another dtype are other bytes
        raise KnowledgeBaseMismatch(
            f"knowledge base {self._kb!r} was made with the model {self.get('model_name')!r} "
            f"({self.get('model_dtype')}), not with {model.name!r} ({model.dtype}): other {', '.join(differing)}. "
            f"Nothing it stored is used. Go back to that model, {_WAY_OUT}"
        )

    def check(self, fact: str, value: str) -> None:
        """Raise KnowledgeBaseMismatch, naming both values and the option, if another value is settled."""
        settled, option = self.get(fact), OPTIONS.get(fact, fact)
        if settled not in (None, value):
            raise KnowledgeBaseMismatch(
                f"knowledge base {self._kb!r} was made with {option} {settled!r}, not {value!r}; leave {option} out, "
                f"{_WAY_OUT}"
            )


_USABLE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_USABLE = "letters, digits, '.', '_' and '-', 100 at most, a letter or digit first"


def usable(kind: Literal["knowledge base", "conversation"], name: str) -> str:
    """The name, if a folder can have it; raises InvalidRequest."""
    if not _USABLE_NAME.fullmatch(name):
        raise InvalidRequest(f"{kind} name {name!r} is not usable: {_USABLE}")
    return name


def kb_folder(name: str, config: Config) -> Path:
    """Where a knowledge base is kept; raises InvalidRequest for an unusable name."""
    return config.home / "kb" / usable("knowledge base", name)


def place(path: str | Path) -> Path:
    """A path that a user named, absolute; an empty one would mean the working folder, which nobody means.

    Raises InvalidRequest for that.
    """
    if not str(path):
        raise InvalidRequest("a path is empty; name a file or folder ('.' for this one)")
    return Path(path).expanduser().absolute()


def existing(paths: Sequence[str | Path]) -> list[Path]:
    """The same of paths to add; raises PathNotFound for one that does not exist, InvalidRequest if there are none."""
    if not paths:
        raise InvalidRequest("no paths to add")
    places = [place(path) for path in paths]
    for each in places:
        if not each.exists():
            raise PathNotFound(f"{each} does not exist")
    return places


@dataclass(frozen=True, slots=True)
class KBMetadata:
    """The settings beside what is settled."""

    config: Config
    identity: KBIdentity

    @property
    def system(self) -> str:
        """The instruction that every prompt starts with: settled by the first `add`, since KV is computed behind it.

        Raises KnowledgeBaseMismatch if the settings name another.
        """
        return self._value("system", self.config.system, DEFAULT_SYSTEM)

    @property
    def overlap_tokens(self) -> int:
        """How far chunks overlap; raises as `system`."""
        return int(self._value("overlap_tokens", self.config.chunking.overlap_tokens, 0))

    @property
    def names_settled_model(self) -> bool:
        """Whether no other model is asked for than the one that banked answers come from, as far as names tell."""
        wanted, settled = self.config.model, self.identity.get
        return wanted.model in (None, settled("model_name")) and wanted.dtype in (
            "auto",
            settled("model_dtype"),
        )

    def chunk_tokens(self, default: int) -> int:
        """How long chunks are, by default as given here; raises as `system`."""
        return int(self._value("chunk_tokens", self.config.chunking.chunk_tokens, default))

    def settle(self, model: ModelFingerprint, facts: dict[str, str]) -> None:
        """Write down what this knowledge base is made with, now that documents come in; raises as `KBIdentity.settle`."""
        given = self.config.embedding.embedding_model
        if given is not None:
            folder = Path(given).expanduser()
            facts = {**facts, "embedding_source": str(folder.absolute()) if folder.exists() else given}
        self.identity.settle(model, facts)

    def _value(self, fact: str, given: object, default: object) -> str:
        """What holds of a fact: the value given or else settled, which must not contradict."""
        if given is not None:
            self.identity.check(fact, str(given))
            return str(given)
        return self.identity.get(fact) or str(default)
