"""A knowledge base as a retriever: search by words and by meaning."""

from typing import Any

from langchain_core.callbacks import CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from pydantic import Field

from kvweave.local import local_engine
from langchain_kvweave.messages import document_from


class KvweaveRetriever(BaseRetriever):
    """Finds passages of a knowledge base, best first. Loads no language model.

    Give them to `ChatKvweave` as `documents`: chunks are matched by their exact text, so their KV is reused.
    """

    kb: str = "default"
    """The knowledge base."""
    home: str | None = None
    """Folder that holds everything; None is kvweave's own choice."""
    k: int | None = None
    """Number of passages; None leaves it to the settings. A call may give another one."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """More settings, as `kvweave.open` takes them."""

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun, k: int | None = None
    ) -> list[Document]:
        found = local_engine(self.kb, self.home, **self.settings).passages(
            self.kb, query, self.k if k is None else k
        )
        return [document_from(source) for source in found]
