"""What a knowledge base knows about questions to come: the abstract, the history, and what was predicted from them.

Lives in the knowledge base's own database, so that what a document has told goes in the commit that takes it out.
"""

from collections.abc import Iterable

from kvweave.predict.abstract import Abstract
from kvweave.predict.history import History
from kvweave.predict.ledger import Ledger
from kvweave.store.database import Database


class Outlook:
    """`abstract`, `history` and `ledger` in `database`. Questions are given as the answer bank has them."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self.abstract = Abstract(database)
        self.history = History(database)
        self.ledger = Ledger(database)

    def asked(self, question: str) -> None:
        """A user has asked this, and has an answer."""
        with self._database.transaction():
            self.history.add(question)
            self.ledger.asked(question)

    def documents_changed(self, gone: Iterable[str]) -> list[str]:
        """Versions leave the list of documents in this transaction; returns predicted questions to be forgotten."""
        versions = list(gone)
        if not versions:
            return []
        with self._database.transaction():
            self.abstract.forget(versions)
            return self.ledger.forget(versions)

    def clear(self) -> None:
        """Forget everything."""
        with self._database.transaction():
            self.abstract.clear()
            self.history.clear()
            self.ledger.clear()
