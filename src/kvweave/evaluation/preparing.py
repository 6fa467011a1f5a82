"""Chunk KV of one sample, made as a knowledge base that holds nothing but its document would make it."""

from kvweave.core import TokenizedPrompt
from kvweave.embedding.encoder import TextEncoder
from kvweave.evaluation.samples import Sample
from kvweave.models.adapter import Adapter
from kvweave.recipes.corpus import ChunkList
from kvweave.recipes.offline import prepare_chunks
from kvweave.recipes.recipe import Recipe
from kvweave.recipes.workshop import Workshop
from kvweave.store.chunk_store import ChunkStore

_ENCODER = TextEncoder()  # loads its model with the first text that a preparation compares


def prepare_sample(
    adapter: Adapter, store: ChunkStore, sample: Sample, prompt: TokenizedPrompt, recipe: Recipe
) -> None:
    """Store the system prefix and what the recipe prepares and records of the sample's chunks."""
    system, *chunks = (prompt.ids(span) for span in prompt.spans[:-1])
    shop = Workshop(adapter, store, system, ChunkList(sample.chunks, chunks, _ENCODER.encode))
    if system:
        shop.prefix_kv()
    prepare_chunks(shop, chunks, recipe)
