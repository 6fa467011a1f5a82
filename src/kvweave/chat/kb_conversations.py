"""The conversations of a knowledge base: opens them, and finds chunks and answers for their turns.

The first turn uses the answer cache, as `KnowledgeBase.ask` does. Later turns do not: what was said before may change the answer.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, partial

from kvweave.answering.ask import Asker
from kvweave.answering.cached_answers import provenance
from kvweave.answering.generation import Decoded
from kvweave.answering.kb_question import reading_order, sources_of
from kvweave.answering.pipeline import prefill_turn
from kvweave.chat.conversation import Conversation, ConversationSettings, start_over
from kvweave.decode.settings import OffloadSettings
from kvweave.index.documents import version_of
from kvweave.state.knowledge_base_state import KnowledgeBaseState, checked_name


@dataclass(frozen=True, slots=True)
class Conversations:
    """Opens the conversations of a knowledge base, each in a folder of its own. `asker` finds chunks and answers."""

    state: KnowledgeBaseState
    asker: Asker

    def open(self, name: str, *, new: bool) -> Conversation:
        """Resume a conversation, or start over; raises as `KnowledgeBase.conversation`."""
        asker, folder = self.asker, self.state.conversations / checked_name("conversation", name)
        adapter = asker.components.adapter
        if new:
            start_over(folder)
        options = asker.settings.options(asker.metadata.system)
        settings = ConversationSettings(
            options.system,
            options.generation,
            options.max_new_tokens(adapter.geometry.context_tokens),
            asker.settings.offload(options.kv_budget) or OffloadSettings(1.0),
            options if options.cacheable else None,
        )
        prefill = partial(prefill_turn, adapter, self.state.store, asker.settings.recipe_of(options))
        return Conversation(adapter, folder, settings, prefill, self.state.documents.visible_versions)

    def send(self, conversation: Conversation, question: str, top_k: int | None) -> Iterator[str]:
        """Yield the answer to a conversation's next turn; raises as `KnowledgeBase.send`."""
        question = self.asker.checked(question)
        encoder, cached = self.asker.components.encoder, self.asker.cached
        vector = cache(lambda: encoder.encode([question])[0])
        # Those that `KnowledgeBase.ask` looked a question up under when the conversation was opened: its recipe stays.
        options = conversation.settings.options if conversation.is_empty else None
        if options is not None:
            options = replace(options, top_k=self.asker.settings.top_k(top_k))
        found = None if options is None else cached.find(question, vector, options)
        if found is not None:
            yield from conversation.send_known(question, found.text, set(map(version_of, found.chunks)))
            cached.record_hit(found, question, vector)
            return
        epoch = cached.answers.epoch  # before the search: a document that comes in later makes the answer old
        ranked = self.asker.ranked(question, top_k, vector)
        chunks, decoded = reading_order(ranked), Decoded()
        versions = {chunk.version for chunk in chunks}
        yield from conversation.send(question, [chunk.text for chunk in chunks], decoded, versions)
        if options is not None and not decoded.missing_answer:
            text, sources = decoded.text.strip(), sources_of(self.state.documents, chunks)
            cached.keep(question, vector(), options, text, sources, provenance(ranked, epoch))
