"""The source of the MCP tools' answers: a running server of the home, or without one the home's knowledge bases.

Each call looks for a server again, so one may start or stop at any time. Thread-safe.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final, TypeVar

from kvweave.cancellation import check_cancelled
from kvweave.config import Config
from kvweave.errors import ServerRefused, ServerUnavailable
from kvweave.results import Answer
from kvweave.server.choice import IN_REQUEST, ServerChoice, choose_server

if TYPE_CHECKING:
    from kvweave.knowledge_base import KnowledgeBase
    from kvweave.server.client import ServerClient

_LOOK_S: Final = 0.1

_T = TypeVar("_T")
Facts = list[dict[str, Any]]


class HomeSource:
    """The knowledge bases of a home folder. A context manager that closes the knowledge bases it opened.

    Args:
        config: the settings, including `home` and `use_server`.
        open_kb: opens an existing knowledge base of that home with the same settings.
    """

    def __init__(self, config: Config, open_kb: Callable[[str], "KnowledgeBase"]) -> None:
        self._config, self._open_kb = config, open_kb
        self._opening = threading.Lock()
        self._computing = threading.Lock()  # one question at a time: the model uses all cores
        self._bases: dict[str, KnowledgeBase] = {}
        self._open = ExitStack()

    def knowledge_bases(self) -> Facts:
        """Return name, documents and chunks of every knowledge base."""
        return self._ask(lambda client, _: client.knowledge_bases(), self._list)

    def documents(self, kb: str) -> Facts:
        """Return source, title, chunks and tokens of every document. Raises EmptyKnowledgeBase and InvalidRequest."""
        return self._ask(lambda client, _: client.documents(kb), lambda: self._documents(kb))

    def search(self, kb: str, question: str, top_k: int | None) -> Facts:
        """Return document, start, end, text and score of passages, best first. Raises as `KnowledgeBase.passages`."""
        return self._ask(
            lambda client, _: client.search(kb, question, top_k), lambda: self._search(kb, question, top_k)
        )

    def answer(self, kb: str, question: str, top_k: int | None) -> Answer:
        """Return the answer to a question. Raises as `KnowledgeBase.ask`."""
        wanted = {} if top_k is None else {"top_k": top_k}

        def remotely(client: "ServerClient", options: Mapping[str, Any]) -> Answer:
            return client.ask(kb, question, {**options, **wanted}, lambda piece: None)[0]

        return self._ask(remotely, lambda: self._answer(kb, question, top_k))

    def close(self) -> None:
        """Wait for the running question, then close the opened knowledge bases."""
        with self._computing, self._opening:
            self._bases.clear()
            self._open.close()

    def __enter__(self) -> "HomeSource":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _ask(self, remotely: Callable[["ServerClient", Mapping[str, Any]], _T], here: Callable[[], _T]) -> _T:
        """Ask the running server. Without one, or if it refuses the call, answer in this process, whose errors have more detail."""
        server: ServerChoice = choose_server(self._config, IN_REQUEST)
        if server.client is not None:
            try:
                with server.client:
                    return remotely(server.client, server.options)
            except (ServerUnavailable, ServerRefused) as error:
                server.give_up(error)
        return here()

    def _list(self) -> Facts:
        names = sorted(path.parent.name for path in (self._config.home / "kb").glob("*/catalog.sqlite"))
        listed = {name: self._documents(name) for name in names}
        return [
            {"name": name, "documents": len(found), "chunks": sum(each["chunks"] for each in found)}
            for name, found in listed.items()
        ]

    def _documents(self, kb: str) -> Facts:
        return [
            {"source": each.source, "title": each.title, "chunks": each.chunks, "tokens": each.tokens}
            for each in self._base(kb).documents()
        ]

    def _search(self, kb: str, question: str, top_k: int | None) -> Facts:
        with self._alone():
            return [asdict(each) for each in self._base(kb).passages(question, top_k)]

    def _answer(self, kb: str, question: str, top_k: int | None) -> Answer:
        with self._alone():
            return self._base(kb).ask(question, top_k=top_k)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Wait for the question that runs. Raises Cancelled if the call is given up meanwhile."""
        while not self._computing.acquire(timeout=_LOOK_S):
            check_cancelled()
        try:
            check_cancelled()
            yield
        finally:
            self._computing.release()

    def _base(self, name: str) -> "KnowledgeBase":
        with self._opening:
            if name not in self._bases:
                self._bases[name] = self._open.enter_context(self._open_kb(name))
            return self._bases[name]
