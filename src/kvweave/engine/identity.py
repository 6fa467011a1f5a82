"""What a knowledge base was made with, kept in its own database, and compared whenever it is used.

Chunks are cut by a tokenizer, vectors come from an embedding model, KV from weights behind a system
prompt: a knowledge base read with any other of these would be wrong in silence.
"""

import dataclasses
from collections.abc import Mapping

from kvweave.core import ModelFingerprint
from kvweave.errors import KnowledgeBaseMismatch
from kvweave.store.database import Database

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


class Identity:
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
