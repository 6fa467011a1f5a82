"""kvweave in LangChain: a chat model, a retriever and a cache, all in the caller's own process."""

from langchain_kvweave.cache import KvweaveCache
from langchain_kvweave.chat_model import ChatKvweave
from langchain_kvweave.retriever import KvweaveRetriever

__all__ = ["ChatKvweave", "KvweaveCache", "KvweaveRetriever"]
