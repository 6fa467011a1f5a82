"""kvweave as a language model of LlamaIndex."""

from llama_index.llms.kvweave.base import Kvweave

__all__ = ["Kvweave"]
