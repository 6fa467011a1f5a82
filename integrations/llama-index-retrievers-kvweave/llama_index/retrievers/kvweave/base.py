"""A knowledge base as a retriever: search by words and by meaning."""

from dataclasses import asdict
from typing import Any

from llama_index.core.callbacks.base import CallbackManager
from llama_index.core.retrievers import BaseRetriever
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode

from kvweave.local import local_engine
from kvweave.results import Source


class KvweaveRetriever(BaseRetriever):
    """Finds passages of a knowledge base, best first. Loads no language model.

    Give them to the LLM `Kvweave` as `documents`: chunks are matched by their exact text, so their KV is reused.

    Args:
        kb: the knowledge base.
        top_k: number of passages; None leaves it to the settings.
        home: folder that holds everything; None is kvweave's own choice.
        callback_manager: LlamaIndex's.
        settings: more settings, as `kvweave.open` takes them.
    """

    def __init__(
        self,
        kb: str = "default",
        *,
        top_k: int | None = None,
        home: str | None = None,
        callback_manager: CallbackManager | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(callback_manager=callback_manager)
        self._kb, self._top_k, self._home, self._settings = kb, top_k, home, settings

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        engine = local_engine(self._kb, self._home, **self._settings)
        found = engine.passages(self._kb, query_bundle.query_str, self._top_k)
        return [NodeWithScore(node=_node(source), score=source.score) for source in found]


def _node(source: Source) -> TextNode:
    facts = {
        name: value for name, value in asdict(source).items() if name not in ("document", "text", "score")
    }
    return TextNode(
        id_=f"{source.document}[{source.start}:{source.end}]",
        text=source.text,
        metadata={"file_path": source.document, **facts},
    )
