"""A conversation: one text that grows turn by turn. Its KV is in files and outlives the process.

Every turn is prefilled as any question is, with stored chunk KV. Later turns are prefilled behind what was said before.
The next turn, in this process or another, continues from what the files hold after a turn. `Conversations` opens those of a
knowledge base, and finds chunks and answers for their turns.
"""

import logging
from array import array
from collections.abc import Callable, Collection, Iterator, Sequence, Set
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from types import TracebackType
from typing import Self

from torch import Tensor

from kvweave.answering.ask import Asker
from kvweave.answering.cached_answers import provenance
from kvweave.answering.generation import Decoded, generate_in_conversation
from kvweave.answering.kb_question import reading_order, sources_of
from kvweave.answering.pipeline import prefill_turn
from kvweave.config import GenerationConfig
from kvweave.decode.handoff import PromptOffloader, TurnAppender, prefill_offloaded
from kvweave.decode.offloaded_cache import OffloadedCache
from kvweave.decode.persistence import persist, reset_file, resume
from kvweave.decode.settings import OffloadSettings
from kvweave.errors import InvalidRequest, StoreError, StoreFull
from kvweave.files import make_folder, try_lock
from kvweave.index.documents import version_of
from kvweave.models.adapter import Adapter
from kvweave.models.cache_base import LayerSink, PrefixContext
from kvweave.models.snapshot_adapter import fused
from kvweave.options import AskOptions
from kvweave.recipes.request import PrefillResult
from kvweave.state.conversation_log import (
    LOCK,
    ConversationState,
    empty,
    read_state,
    sweep,
    write_state,
)
from kvweave.state.knowledge_base_state import KnowledgeBaseState, checked_name
from kvweave.types import Prompt, TokenizedPrompt

_LOG = logging.getLogger(__name__)
_TAKEN = "another process has the conversation in {} open; name another one"


@dataclass(frozen=True, slots=True)
class ConversationSettings:
    """The instruction that every prompt starts with, how answers are decoded, and how KV is stored in files.

    `options` are those that the answer cache keeps answers under; None if it keeps none. `any_budget`: nobody named a
    budget, so that a resumed conversation keeps its own.
    """

    system: str
    generation: GenerationConfig
    max_new_tokens: int
    kv: OffloadSettings
    options: AskOptions | None = None
    any_budget: bool = False


def start_over(folder: Path) -> None:
    """Empty the conversation in a folder; raises InvalidRequest while another process has it open."""
    make_folder(folder)
    with try_lock(folder / LOCK) as free:
        if not free:
            raise InvalidRequest(_TAKEN.format(folder))
        empty(folder)


class Conversation:
    """The turns of one text, stored in a folder. A context manager: leaving it keeps the text.

    Args:
        adapter: the model.
        folder: the conversation's own; a conversation stored there is resumed.
        settings: a resumed conversation keeps the `kv` that it began with, except `resident_bytes`; naming another budget
            is an error.
        prefill: prefills a turn behind the earlier text, if there is any, and streams its layers to a sink.
        visible: gives the document versions that are listed. A conversation that has read any other version starts
            over and logs a warning.

    Attributes:
        settings: what it was opened with.
        token_ids: the whole text.
        last_reply: what the latest finished turn of this process gave; None before the first one.

    Raises:
        InvalidRequest: another process has the conversation open; it began with another model or budget; or
            `resident_bytes` are too few for it.
    """

    def __init__(
        self,
        adapter: Adapter,
        folder: Path,
        settings: ConversationSettings,
        prefill: Callable[[TokenizedPrompt, LayerSink, PrefixContext | None], PrefillResult],
        visible: Callable[[], Set[str]] = frozenset,
    ) -> None:
        self._adapter, self._folder, self.settings, self._prefill = adapter, folder, settings, prefill
        self._visible = visible
        self.token_ids: list[int] = []
        self.last_reply: Decoded | None = None
        self._versions: frozenset[str] = frozenset()
        self.held: OffloadedCache | None = None
        self.open_files = ExitStack()
        make_folder(folder)
        if not self.open_files.enter_context(try_lock(folder / LOCK)):
            self.open_files.close()
            raise InvalidRequest(_TAKEN.format(folder))
        try:
            sweep(folder)
            self._resume()
        except BaseException:
            self.open_files.close()
            raise

    def send(
        self, question: str, chunks: Sequence[str], decoded: Decoded, versions: Collection[str] = ()
    ) -> Iterator[str]:
        """Yield the answer to the next turn. Chunks that the conversation already contains are left out.

        `versions` are those of the documents that the chunks come from. A turn that fails, or whose answer is not
        iterated to its end, does not count: the next one continues from the turn before.

        Raises:
            PromptTooLong: no room is left.
            StoreError, StoreFull: the files fail.
        """
        if self._outdated:
            self._start_over()
        turn = self._render(question, chunks)
        logits = self._prefill_turn(turn)
        assert self.held is not None
        settings, text = self.settings, [*self.token_ids, *turn.token_ids]
        reply = yield from generate_in_conversation(
            self._adapter,
            self.held,
            text,
            logits,
            settings.generation,
            settings.max_new_tokens,
            decoded,
            self.recompute,
            turn.reply,
        )
        if decoded.missing_answer:
            _LOG.warning(decoded.missing_answer)
        self._finish_turn([*text, *reply], decoded, versions)

    def send_known(self, question: str, answer: str, versions: Collection[str] = ()) -> Iterator[str]:
        """Yield an answer that is known as the next turn's; later turns are prefilled behind it, as behind any other.

        `versions` are those of the documents that the answer was made from. The turn counts once the iterator ends.

        Raises:
            PromptTooLong: no room is left; before the answer.
            StoreError, StoreFull: the files fail.
        """
        if self._outdated:
            self._start_over()
        turn = self._render(question, (), answer)
        yield answer
        self._prefill_turn(turn)
        known = Decoded(text=answer, ids=self._adapter.template.tokenize(answer))
        self._finish_turn([*self.token_ids, *turn.token_ids], known, versions)

    @property
    def is_empty(self) -> bool:
        """Whether nothing was said so far, or the next turn starts over."""
        return self._outdated or not self.token_ids

    @property
    def text(self) -> str:
        """Everything said so far, chunks included; empty if the next turn starts over. Decodes all of it."""
        return "" if self._outdated else self._adapter.template.decode(self.token_ids)

    def close(self) -> None:
        """Store the text for another process; closing twice is fine."""
        held, self.held = self.held, None
        with self.open_files:
            if held is None:
                return
            with held:
                if held.get_seq_length() == len(self.token_ids) and held.usable:
                    persist(held, self._folder, self.token_ids, self._adapter.fingerprint.digest)
                else:
                    reset_file(self._folder)  # the files hold an unfinished turn
            if self._outdated:
                self._start_over()  # a document was removed meanwhile: none of its text may stay here

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _render(self, question: str, chunks: Sequence[str], answer: str = "") -> TokenizedPrompt:
        """Return the tokens of the next turn, those of its answer included if it is known; raises PromptTooLong."""
        template, system, think = (
            self._adapter.template,
            self.settings.system,
            self.settings.generation.think,
        )
        self._drop_unfinished_turn()
        if not self.token_ids:
            turn = template.render(Prompt(question, tuple(chunks), system, think))
        else:
            new = tuple(text for text in chunks if not self._contains(template.chunk_ids(text)))
            turn = template.render_turn(Prompt(question, new, system, think))
        if answer:
            turn = self._with_answer(turn, answer)
        self._adapter.check_length(len(self.token_ids) + turn.tokens, self.settings.max_new_tokens)
        return turn

    def _with_answer(self, turn: TokenizedPrompt, answer: str) -> TokenizedPrompt:
        """Return a turn whose last span goes on with an answer, as if the model had written it."""
        template = self._adapter.template
        spaced = template.decode(turn.token_ids[-1:])[-1:].isspace()
        ids = (*turn.token_ids, *template.tokenize(answer if spaced else f" {answer}"))
        *before, last = turn.spans
        return replace(turn, token_ids=ids, spans=(*before, replace(last, end=len(ids))))

    def _prefill_turn(self, turn: TokenizedPrompt) -> Tensor:
        """Put the KV of a turn behind the text, and return the logits (1, vocab) after it."""
        if self.held is None:
            offloader = PromptOffloader(self._adapter.geometry, self.settings.kv, reset_file(self._folder))
            logits = self._prefill(turn, offloader, None).logits
            self.held = offloader.cache
            return logits
        text = [*self.token_ids, *turn.token_ids]
        if self._adapter.needs_rope_rescale(len(text), len(self.token_ids)):
            return self.recompute(text)[1]
        prefix = self._adapter.template.prefix_ids(self.settings.system, think=self.settings.generation.think)
        behind = TurnAppender(self._adapter, self.held, self.token_ids, prefix)
        try:
            return self._prefill(turn, behind, behind).logits
        except StoreFull:
            raise
        except StoreError as error:  # the files are damaged; the text is not
            _LOG.warning("the KV of the conversation in %s is computed again: %s", self._folder, error)
            return self.recompute(text)[1]

    def _contains(self, ids: Sequence[int]) -> bool:
        """Return whether the text contains these tokens in a row."""
        text, some = array("i", self.token_ids).tobytes(), array("i", ids).tobytes()
        at = text.find(some)
        while at >= 0 and at % 4:
            at = text.find(some, at + 1)
        return at >= 0

    @property
    def _outdated(self) -> bool:
        """Whether a document that was read was removed or changed."""
        return not self._versions <= self._visible()

    def _start_over(self) -> None:
        self._close_kv()
        self.token_ids, self._versions = [], frozenset()
        empty(self._folder)
        _LOG.warning(
            "the conversation in %s starts over: documents that it had read were removed or changed",
            self._folder,
        )

    def _resume(self) -> None:
        """Resume a stored conversation; where its KV files are incomplete, compute its KV again."""
        stored = read_state(self._folder)
        if stored is None:
            return
        if stored.outdated(self._visible()):
            self._start_over()
        elif stored.token_ids:
            self._restore(stored)

    def _restore(self, stored: ConversationState) -> None:
        model = self._adapter.fingerprint
        if stored.model != model.digest:
            raise InvalidRequest(
                f"the conversation in {self._folder} was held with another model than {model.name}; use that one, or"
                " begin another conversation"
            )
        if self.settings.any_budget:
            kv = replace(self.settings.kv, kv_budget=stored.kv_budget)
            self.settings = replace(self.settings, kv=kv)
        elif stored.kv_budget != self.settings.kv.kv_budget:
            raise InvalidRequest(
                f"the conversation in {self._folder} began with kv_budget {stored.kv_budget:g}, not"
                f" {self.settings.kv.kv_budget:g}; name that or none, or begin another conversation"
            )
        self.token_ids, self._versions = list(stored.token_ids), stored.versions
        with suppress(StoreError):
            bound = self.settings.kv.resident_bytes
            self.held, _ = resume(self._adapter, self._folder, bound, self.token_ids)
        self._drop_unfinished_turn()

    def _drop_unfinished_turn(self) -> None:
        """Make the KV hold `token_ids` and nothing else; after an unfinished turn, compute them again."""
        held = self.held
        if held is not None and held.usable and held.get_seq_length() == len(self.token_ids):
            return
        self._close_kv()
        if self.token_ids:
            self.recompute(self.token_ids)

    def _close_kv(self) -> None:
        held, self.held = self.held, None
        if held is not None:
            held.close()

    def recompute(self, token_ids: Sequence[int]) -> tuple[OffloadedCache, Tensor]:
        """Compute the KV of a text from scratch, with full attention; also return the logits after it."""
        self._close_kv()
        self.held, logits = prefill_offloaded(
            self._adapter, token_ids, self.settings.kv, reset_file(self._folder)
        )
        return self.held, logits

    def _finish_turn(self, token_ids: list[int], reply: Decoded, versions: Collection[str]) -> None:
        """Store what was said; everything else can be computed from it."""
        self.token_ids, self.last_reply = token_ids, reply
        self._versions |= frozenset(versions)
        model, kv = self._adapter.fingerprint, self.settings.kv
        write_state(
            self._folder, ConversationState(model.digest, kv.kv_budget, tuple(token_ids), self._versions)
        )


@dataclass(frozen=True, slots=True)
class Conversations:
    """Opens the conversations of a knowledge base, each in a folder of its own. `asker` finds chunks and answers.

    The first turn uses the answer cache, as `KnowledgeBase.ask` does. Later turns do not: what was said before may change the answer.
    """

    state: KnowledgeBaseState
    asker: Asker

    def open(self, name: str, *, new: bool, kv_budget: float | None = None) -> Conversation:
        """Resume a conversation, or start over; raises as `KnowledgeBase.conversation`."""
        asker, folder = self.asker, self.state.conversations / checked_name("conversation", name)
        adapter = fused(asker.components.model, "a conversation")
        if new:
            start_over(folder)
        options = asker.settings.options(asker.metadata.system, kv_budget=kv_budget)
        settings = ConversationSettings(
            options.system,
            options.generation,
            options.max_new_tokens(adapter.geometry.context_tokens),
            asker.settings.offload(options.kv_budget) or OffloadSettings(1.0),
            options if options.cacheable else None,
            any_budget=options.kv_budget is None,
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
