"""The conversations that are had with a knowledge base, each by its name."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kvweave.decode.settings import ClusteredKV
from kvweave.engine.choices import Choices
from kvweave.engine.conversation import Conversation, Manner, forget
from kvweave.engine.generation import Decoded
from kvweave.engine.lazy_parts import LazyParts
from kvweave.engine.naming import usable
from kvweave.engine.pipeline import prefilled
from kvweave.engine.terms import Terms
from kvweave.knowledge.bank import Found
from kvweave.knowledge.shelf import Shelf
from kvweave.store.chunk_store import ChunkStore


@dataclass(frozen=True, slots=True)
class Conversations:
    """Begins conversations, each in a folder under `folder`, and takes their turns.

    `shelf` lists the documents that they may have read; `found` finds the chunks for a turn, as many as its number says.
    """

    folder: Path
    shelf: Shelf
    store: ChunkStore
    parts: LazyParts
    choices: Choices
    terms: Terms
    found: Callable[[str, int | None], Sequence[Found]]

    def open(self, name: str, *, new: bool) -> Conversation:
        """Go on with a conversation, or begin it anew; raises as `KnowledgeBase.conversation`."""
        folder = self.folder / usable("conversation", name)
        adapter = self.parts.adapter
        if new:
            forget(folder)
        most = self.choices.max_new_tokens(adapter.geometry.context_tokens)
        held = self.choices.kv or ClusteredKV(1.0)
        manner = Manner(self.terms.system, self.choices.generation, most, held)
        recipe = self.choices.recipe()
        return Conversation(
            adapter, folder, manner, partial(prefilled, adapter, self.store, recipe), self.shelf.visible
        )

    def say(self, conversation: Conversation, question: str, top_k: int | None) -> Iterator[str]:
        """Yield the answer to a conversation's next turn; raises as `KnowledgeBase.say`."""
        found = self.found(question, top_k)
        texts, versions = [chunk.text for chunk in found], {chunk.version for chunk in found}
        yield from conversation.say(question, texts, Decoded(), versions)
