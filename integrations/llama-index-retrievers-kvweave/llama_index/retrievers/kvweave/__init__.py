"""A knowledge base of kvweave as a retriever of LlamaIndex."""

from llama_index.retrievers.kvweave.base import KvweaveRetriever

__all__ = ["KvweaveRetriever"]
