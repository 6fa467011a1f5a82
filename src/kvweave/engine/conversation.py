"""A conversation: one text that grows turn by turn, whose KV lies in files and outlives the process.

Every turn is prefilled as any question is, stored KV and all: the first to be a text, later ones behind it. What is in the
files after a turn is what the next one goes on from, in this process or another.
"""

import logging
from array import array
from collections.abc import Callable, Collection, Iterator, Sequence, Set
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

from torch import Tensor

from kvweave.config import GenerationConfig
from kvweave.decode.handoff import PromptOffloader, TurnAppender, computed
from kvweave.decode.offloaded_cache import OffloadedCache
from kvweave.decode.persistence import keep, new_files, resume
from kvweave.decode.settings import OffloadSettings
from kvweave.engine.components import Components
from kvweave.engine.conversation_log import LOCK, ConversationState, empty, read_said, write_said
from kvweave.engine.generation import Decoded, reply_on
from kvweave.engine.pipeline import prefilled
from kvweave.engine.settings import Choices, KBMetadata, usable
from kvweave.errors import InvalidRequest, StoreError
from kvweave.files import alone
from kvweave.index.documents import DocumentTable
from kvweave.index.vector_index import FoundChunk
from kvweave.kvstore.chunk_store import ChunkStore
from kvweave.models.adapter import Adapter
from kvweave.models.cache_base import LayerSink, PrefixContext
from kvweave.recipes.request import PrefillResult
from kvweave.types import Prompt, TokenizedPrompt

_LOG = logging.getLogger(__name__)
_TAKEN = "another process is having the conversation in {}; name another one"


@dataclass(frozen=True, slots=True)
class ConversationSettings:
    """How a conversation is held: what every prompt starts with, how answers are chosen, how KV lies in files."""

    system: str
    generation: GenerationConfig
    max_new_tokens: int
    kv: OffloadSettings


def forget(folder: Path) -> None:
    """Have the conversation in a folder begin anew; raises InvalidRequest while another process is having it."""
    folder.mkdir(parents=True, exist_ok=True)
    with alone(folder / LOCK) as free:
        if not free:
            raise InvalidRequest(_TAKEN.format(folder))
        empty(folder)


class Conversation:
    """Turns of one text in a folder; a context manager, whose end keeps the text.

    Args:
        adapter: the model.
        folder: the conversation's own; what an earlier process kept there is gone on with.
        manner: as above; a conversation that goes on keeps the `kv` it began with, but for `resident_bytes`.
        prefill: computes a prompt, reusing what is stored, behind earlier text or none, and hands its layers over.
        visible: gives the versions of documents that there are. A conversation that has read another one begins anew,
            and logs that as a warning.

    Raises:
        InvalidRequest: another process holds the conversation, it began with another budget, or with another model, or
            `resident_bytes` are too few for it.
    """

    def __init__(
        self,
        adapter: Adapter,
        folder: Path,
        manner: ConversationSettings,
        prefill: Callable[[TokenizedPrompt, LayerSink, PrefixContext | None], PrefillResult],
        visible: Callable[[], Set[str]] = frozenset,
    ) -> None:
        self._adapter, self._folder, self._manner, self._prefill = adapter, folder, manner, prefill
        self._visible = visible
        self.token_ids: list[int] = []
        self._versions: frozenset[str] = frozenset()
        self._held: OffloadedCache | None = None
        self._stack = ExitStack()
        folder.mkdir(parents=True, exist_ok=True)
        if not self._stack.enter_context(alone(folder / LOCK)):
            self._stack.close()
            raise InvalidRequest(_TAKEN.format(folder))
        try:
            self._go_on()
        except BaseException:
            self._stack.close()
            raise

    def say(
        self, question: str, chunks: Sequence[str], decoded: Decoded, versions: Collection[str] = ()
    ) -> Iterator[str]:
        """Yield the answer to the next turn; chunks that the conversation holds already are not read again.

        `versions` are those of the documents that the chunks are from. Raises PromptTooLong where no room is left,
        StoreError and StoreFull where the files fail. A turn that fails, or is not listened to until its end, was never
        said: the next one goes on from the turn before.
        """
        if self._outdated:
            self._begin_anew()
        ids, logits = self._read(question, chunks)
        assert self._held is not None
        manner, text = self._manner, [*self.token_ids, *ids]
        reply = yield from reply_on(
            self._adapter,
            self._held,
            text,
            logits,
            manner.generation,
            manner.max_new_tokens,
            decoded,
            self._computed_again,
        )
        self.token_ids, self._versions = [*text, *reply], self._versions | frozenset(versions)
        self._note()

    def close(self) -> None:
        """Keep the text for another process; closing twice is fine."""
        held, self._held = self._held, None
        with self._stack:
            if held is None:
                return
            with held:
                if held.get_seq_length() == len(self.token_ids) and held.usable:
                    keep(held, self._folder, self.token_ids, self._adapter.fingerprint.digest)
                else:
                    new_files(self._folder)  # what lies there was never said
            if self._outdated:
                self._begin_anew()  # a document was taken out meanwhile: nothing of it may lie here

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read(self, question: str, chunks: Sequence[str]) -> tuple[Sequence[int], Tensor]:
        """A turn's tokens, which are held then, and the logits (1, vocab) behind them."""
        template, room = self._adapter.template, self._manner.max_new_tokens
        self._undo_what_was_not_said()
        if self._held is None:
            prompt = template.render(Prompt(question, tuple(chunks), self._manner.system))
            self._adapter.check_length(prompt.tokens, room)
            entering = PromptOffloader(self._adapter.geometry, self._manner.kv, new_files(self._folder))
            logits = self._prefill(prompt, entering, None).logits
            self._held = entering.held
            return prompt.token_ids, logits
        new = tuple(text for text in chunks if not self._holds(template.chunk_ids(text)))
        turn = template.turn(Prompt(question, new, self._manner.system))
        text = [*self.token_ids, *turn.token_ids]
        self._adapter.check_length(len(text), room)
        if self._adapter.needs_rope_rescale(len(text), len(self.token_ids)):
            return turn.token_ids, self._computed_again(text)[1]
        prefix = template.prefix_ids(self._manner.system)
        behind = TurnAppender(self._adapter, self._held, self.token_ids, prefix)
        return turn.token_ids, self._prefill(turn, behind, behind).logits

    def _holds(self, ids: Sequence[int]) -> bool:
        """Whether these tokens stand in the text, one behind the other."""
        text, some = array("i", self.token_ids).tobytes(), array("i", ids).tobytes()
        at = text.find(some)
        while at >= 0 and at % 4:
            at = text.find(some, at + 1)
        return at >= 0

    @property
    def _outdated(self) -> bool:
        """Whether a document that was read is not there any more, or is another version by now."""
        return not self._versions <= self._visible()

    def _begin_anew(self) -> None:
        self._let_go()
        self.token_ids, self._versions = [], frozenset()
        empty(self._folder)
        _LOG.warning(
            "the conversation in %s begins anew: documents that it had read were removed or changed",
            self._folder,
        )

    def _go_on(self) -> None:
        """Open what was kept; where files are not whole, the text is computed again from what was said."""
        said = read_said(self._folder)
        if said is None:
            return
        if said.outdated(self._visible()):
            self._begin_anew()
        elif said.token_ids:
            self._take_up(said)

    def _take_up(self, said: ConversationState) -> None:
        model = self._adapter.fingerprint
        if said.model != model.digest:
            raise InvalidRequest(
                f"the conversation in {self._folder} was had with another model than {model.name}; use that one, or"
                " begin another conversation"
            )
        if said.kv_budget != self._manner.kv.kv_budget:
            raise InvalidRequest(
                f"the conversation in {self._folder} began with kv_budget {said.kv_budget:g}, not"
                f" {self._manner.kv.kv_budget:g}; name that, or begin another conversation"
            )
        self.token_ids, self._versions = list(said.token_ids), said.versions
        with suppress(StoreError):
            bound = self._manner.kv.resident_bytes
            self._held, _ = resume(self._adapter, self._folder, bound, self.token_ids)
        self._undo_what_was_not_said()

    def _undo_what_was_not_said(self) -> None:
        """Have `token_ids` held, and nothing else: where a turn was given up or failed, they are computed again."""
        held = self._held
        if held is not None and held.usable and held.get_seq_length() == len(self.token_ids):
            return
        self._let_go()
        if self.token_ids:
            self._computed_again(self.token_ids)

    def _let_go(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            held.close()

    def _computed_again(self, token_ids: Sequence[int]) -> tuple[OffloadedCache, Tensor]:
        """Hold these tokens instead of what is held, computed anew, each attending to all before; also the logits behind them."""
        self._let_go()
        self._held, logits = computed(self._adapter, token_ids, self._manner.kv, new_files(self._folder))
        return self._held, logits

    def _note(self) -> None:
        """Write down what was said, from which everything else can be computed again."""
        model, kv = self._adapter.fingerprint, self._manner.kv
        write_said(
            self._folder, ConversationState(model.digest, kv.kv_budget, tuple(self.token_ids), self._versions)
        )


@dataclass(frozen=True, slots=True)
class Conversations:
    """Begins conversations, each in a folder under `folder`, and takes their turns.

    `shelf` lists the documents that they may have read; `found` finds the chunks for a turn, as many as its number says.
    """

    folder: Path
    shelf: DocumentTable
    store: ChunkStore
    parts: Components
    choices: Choices
    terms: KBMetadata
    found: Callable[[str, int | None], Sequence[FoundChunk]]

    def open(self, name: str, *, new: bool) -> Conversation:
        """Go on with a conversation, or begin it anew; raises as `KnowledgeBase.conversation`."""
        folder = self.folder / usable("conversation", name)
        adapter = self.parts.adapter
        if new:
            forget(folder)
        most = self.choices.max_new_tokens(adapter.geometry.context_tokens)
        held = self.choices.kv or OffloadSettings(1.0)
        manner = ConversationSettings(self.terms.system, self.choices.generation, most, held)
        recipe = self.choices.recipe()
        return Conversation(
            adapter, folder, manner, partial(prefilled, adapter, self.store, recipe), self.shelf.visible
        )

    def say(self, conversation: Conversation, question: str, top_k: int | None) -> Iterator[str]:
        """Yield the answer to a conversation's next turn; raises as `KnowledgeBase.say`."""
        found = self.found(question, top_k)
        texts, versions = [chunk.text for chunk in found], {chunk.version for chunk in found}
        yield from conversation.say(question, texts, Decoded(), versions)
