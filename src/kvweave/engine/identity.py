"""What a knowledge base was made with, kept in its own database, and compared whenever it is used.

Chunks are cut by a tokenizer, vectors come from an embedding model, KV from weights behind a system
prompt: a knowledge base read with any other of these would be wrong in silence.
"""

from kvweave.core import ModelFingerprint
from kvweave.errors import KnowledgeBaseMismatch
from kvweave.store.database import Database

_SCHEMA = ("CREATE TABLE IF NOT EXISTS identity (name TEXT PRIMARY KEY, value TEXT NOT NULL)",)


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

    def settle(self, **facts: str) -> None:
        """Write facts that are not settled yet; whoever came first wins."""
        rows = list(facts.items())
        self._database.execute_many("INSERT OR IGNORE INTO identity VALUES (?, ?)", rows)

    def clear(self) -> None:
        """Forget everything, so that an emptied knowledge base can be made anew."""
        self._database.execute("DELETE FROM identity")

    def check_model(self, model: ModelFingerprint) -> None:
        """Settle the model, or raise KnowledgeBaseMismatch naming the one the knowledge base was made with."""
        self.settle(model=model.name, model_digest=model.digest)
        if self.get("model_digest") != model.digest:
            raise KnowledgeBaseMismatch(
                f"knowledge base {self._kb!r} was made with the model {self.get('model')!r} "
                f"(digest {(self.get('model_digest') or '')[:8]}), not with {model.name!r} (digest {model.digest[:8]}); "
                "nothing it stored is used. Name another --kb, go back to that model, or empty this one with "
                "`kvweave rm --all` and add the documents again"
            )

    def check(self, fact: str, value: str, option: str) -> None:
        """Settle a fact, or raise KnowledgeBaseMismatch naming both values and the option that differs."""
        self.settle(**{fact: value})
        settled = self.get(fact)
        if settled != value:
            raise KnowledgeBaseMismatch(
                f"knowledge base {self._kb!r} was made with {option} {settled!r}, not {value!r}; leave {option} out, "
                "name another --kb, or empty this one with `kvweave rm --all` and add the documents again"
            )
