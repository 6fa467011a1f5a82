"""Records what a knowledge base was made with on the first `add`, and checks it on every later use.

A tokenizer cuts the chunks, an embedding model makes the vectors, and the weights make KV behind one system prompt.
A knowledge base that is read with any other of these gives wrong answers without an error, so kvweave refuses.
Loads no model.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from kvweave.config import EMBEDDING_MODELS, Config, ModelConfig
from kvweave.database import Database
from kvweave.errors import KnowledgeBaseMismatch
from kvweave.models.prompt import DEFAULT_SYSTEM
from kvweave.types import ModelFingerprint

_SCHEMA: Final = ("CREATE TABLE IF NOT EXISTS identity (name TEXT PRIMARY KEY, value TEXT NOT NULL)",)

OPTIONS: Final = {
    "system": "--system",
    "chunk_tokens": "--chunk-tokens",
    "overlap_tokens": "--overlap-tokens",
    "embedding": "--embedding-model",
    "embedding_source": "--embedding-model",
}
"""The command-line option that sets each recorded fact."""

_WAY_OUT: Final = "name another --kb, or empty this one with `kvweave rm --all` and add the documents again"


class KBMetadata:
    """The recorded facts of the knowledge base `name`, and the settings, which must not contradict them.

    Each fact is recorded once. The table `identity` of `database` holds them.
    """

    def __init__(self, database: Database, name: str, config: Config) -> None:
        self._database = database
        self._name = name
        self._config = config
        database.script(_SCHEMA)

    def get(self, fact: str) -> str | None:
        """Return a recorded fact, or None."""
        rows = self._database.query("SELECT value FROM identity WHERE name = ?", (fact,))
        return str(rows[0][0]) if rows else None

    def record(self, model: ModelFingerprint, facts: Mapping[str, str]) -> None:
        """Record what is not recorded yet, in the caller's transaction if there is one.

        Two processes may fill a new knowledge base at once: the first one records, the second one gets an error.

        Raises:
            KnowledgeBaseMismatch: another value is recorded.
        """
        embedding = self._config.embedding.embedding_model
        embedding = EMBEDDING_MODELS.get(embedding or "", embedding)
        if embedding is not None:
            folder = Path(embedding).expanduser()
            facts = {**facts, "embedding_source": str(folder.absolute()) if folder.exists() else embedding}
        model_facts = {f"model_{part}": value for part, value in dataclasses.asdict(model).items()}
        with self._database.transaction():
            self.check_model(model)
            self._database.execute_many(
                "INSERT OR IGNORE INTO identity VALUES (?, ?)", list({**model_facts, **facts}.items())
            )
            self.check_model(model)
            for fact, value in facts.items():
                self.check(fact, value)

    def clear(self) -> None:
        """Forget all facts, so that an emptied knowledge base can be filled with another model."""
        self._database.execute("DELETE FROM identity")

    def check_model(self, model: ModelFingerprint) -> None:
        """Raise KnowledgeBaseMismatch, naming what differs, if another model is recorded."""
        if self.get("model_digest") in (None, model.digest):
            return
        given = dataclasses.asdict(model)
        recorded = {part: self.get(f"model_{part}") for part in given} | {"weight_bits": self.weight_bits}
        parts = ("dtype", "weight_bits", "configuration", "tokenizer", "weights")
        differing = [part for part in parts if recorded[part] != given[part]]
        if "weights" in differing and {"dtype", "weight_bits"}.intersection(differing):
            differing.remove("weights")  # the same weights in another dtype or other bits are other bytes
        raise KnowledgeBaseMismatch(
            f"knowledge base {self._name!r} was made with the model {self.get('model_name')!r} "
            f"({self.get('model_dtype')}, --weights {recorded['weight_bits']}), not with {model.name!r} ({model.dtype}, "
            f"--weights {model.weight_bits}): other {', '.join(differing).replace('_', ' ')}. "
            f"Nothing it stored is used. Go back to that model, {_WAY_OUT}"
        )

    def check(self, fact: str, value: str) -> None:
        """Raise KnowledgeBaseMismatch, naming both values and the option, if another value is recorded."""
        recorded, option = self.get(fact), OPTIONS.get(fact, fact)
        if recorded not in (None, value):
            raise KnowledgeBaseMismatch(
                f"knowledge base {self._name!r} was made with {option} {recorded!r}, not {value!r}; "
                f"leave {option} out, {_WAY_OUT}"
            )

    # The facts that settings may name

    @property
    def system(self) -> str:
        """The instruction that every prompt starts with; chunk KV is computed behind it.

        Raises KnowledgeBaseMismatch if the settings name another one than is recorded.
        """
        return self._agreed("system", self._config.system, DEFAULT_SYSTEM)

    @property
    def overlap_tokens(self) -> int:
        """By how many tokens chunks overlap; raises as `system`."""
        return int(self._agreed("overlap_tokens", self._config.chunking.overlap_tokens, 0))

    def chunk_tokens(self, default: int) -> int:
        """Return the length of chunks in tokens, `default` if none is named or recorded; raises as `system`."""
        return int(self._agreed("chunk_tokens", self._config.chunking.chunk_tokens, default))

    @property
    def weight_bits(self) -> str:
        """The bits of the recorded model's weights; auto before a model is recorded."""
        # Knowledge bases that are older than the choice have weights in full precision.
        return self.get("model_weight_bits") or ("full" if self.get("model_digest") else "auto")

    @property
    def model_settings(self) -> ModelConfig:
        """The settings of the model; what they leave open is as it is recorded."""
        wanted = self._config.model
        return dataclasses.replace(
            wanted,
            model=wanted.model or self.get("model_name"),
            dtype=wanted.dtype if wanted.dtype != "auto" else self.get("model_dtype") or "auto",
            weights=wanted.weights if wanted.weights != "auto" else self.weight_bits,
        )

    @property
    def names_recorded_model(self) -> bool:
        """Whether the settings name no other model than the recorded one, by name, dtype and bits of the weights alone."""
        wanted = self._config.model
        return (
            wanted.model in (None, self.get("model_name"))
            and wanted.dtype in ("auto", self.get("model_dtype"))
            and wanted.weights in ("auto", self.weight_bits)
        )

    def _agreed(self, fact: str, given: object, default: object) -> str:
        if given is not None:
            self.check(fact, str(given))
            return str(given)
        return self.get(fact) or str(default)
