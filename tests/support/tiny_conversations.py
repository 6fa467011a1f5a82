"""Conversations of a tiny model, without a knowledge base."""

import torch

from kvweave.answering.generation import Decoded
from kvweave.answering.pipeline import prefill_turn
from kvweave.chat import Conversation, ConversationSettings
from kvweave.config import GenerationConfig
from kvweave.decode.settings import ClusterSettings, DiskSettings, OffloadSettings
from kvweave.kvstore.chunk_store import ChunkStore
from kvweave.recipes.methods import recipe_named

CHUNKS = ("The lamp is in the hall.", "The key is under the stone.")


KV = OffloadSettings(
    kv_budget=0.5,
    resident_bytes=120_000,
    window=8,
    clusters=ClusterSettings(mean_entries=8, max_entries=16),
    disk=DiskSettings(page_bytes=512),
)


WHOLE = OffloadSettings(1.0, window=8, clusters=KV.clusters, disk=KV.disk)


def opened(adapter, folder, kv=KV, new_tokens=12, visible=frozenset) -> Conversation:
    def prefill(prompt, sink, earlier):
        with ChunkStore(folder.parent / "store") as store:
            return prefill_turn(adapter, store, recipe_named("full"), prompt, sink, earlier)

    manner = ConversationSettings("Read.", GenerationConfig(temperature=0.0), new_tokens, kv)
    return Conversation(adapter, folder, manner, prefill, visible)


def say(talk, questions, versions=()) -> list[str]:
    return ["".join(talk.send(question, CHUNKS, Decoded(), versions)) for question in questions]


def follows(adapter, text, replied, short=64) -> None:
    """Check that plain transformers chooses the same last tokens.

    One pass over a text of at most `short` tokens shows what passes over its beginnings choose, and one over a longer text
    what those over its longer beginnings do: the frequencies are the same.
    """
    for begin, end in ((0, min(short, len(text))), (short, len(text))):
        first = max(begin + 1, len(text) - replied)
        if first <= min(end, len(text) - 1):
            with torch.no_grad():
                logits = adapter.model(torch.tensor([text[:end]])).logits[0]
            found = logits[first - 1 : end].argmax(-1).tolist()
            assert found[: len(text) - first] == text[first : end + 1]
