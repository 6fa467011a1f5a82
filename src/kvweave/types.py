"""Documents, prompts and chunk KV: the values that packages pass to each other. What calls return is in `results`.

Tensor letters: L layers, G KV heads, S stored tokens, D head width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, get_args

if TYPE_CHECKING:
    import torch
    from typing_extensions import TypeIs

Storage = Literal["exact", "int8", "int4"]
"""How KV is stored: as the model computed it, or with 8 or 4 bits per number, which is never exact."""

STORAGES: Mapping[str, Storage] = MappingProxyType({name: name for name in get_args(Storage)})

SpanKind = Literal["system", "chunk", "question"]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a person finds a passage: page or slide from 1, headings ("Guide > Setup"), line from 1; else None or empty."""

    page: int | None = None
    heading: str = ""
    line: int | None = None


@dataclass(frozen=True, slots=True)
class Section:
    """A part of a document's text, which ends where the next section starts.

    Attributes:
        start: character offset into the text.
        page: page or slide, from 1.
        heading: the headings above it, outermost first.
        head: its beginning, if every chunk cut from the section repeats it: a table's header; an e-mail's sender, date and
            subject.
    """

    start: int
    page: int | None = None
    heading: tuple[str, ...] = ()
    head: str = ""


@dataclass(frozen=True, slots=True)
class Document:
    """One file as text.

    Attributes:
        source: absolute path; the document's identity. That of a file inside a file, such as an attachment, is a path below
            the outer file.
        title: for people.
        text: the content.
        digest: hash of the file's bytes; identifies this version.
        sections: places in the text, by `start`.
        notes: doubts about the text that people should know: an uncertain encoding, pages without text.
        numbered_lines: whether the text's lines are those of the file.
    """

    source: str
    title: str
    text: str
    digest: str
    sections: tuple[Section, ...] = ()
    notes: tuple[str, ...] = ()
    numbered_lines: bool = False


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a document's text, split at token boundaries.

    Callers with their own retriever leave the document fields empty.

    Attributes:
        text: the chunk's text.
        token_ids: the tokenizer's ids for `text` alone, without a separator.
        digest: names the content; equal ids give equal digests, whatever document they came from.
        document: source of the document.
        document_digest: version of the document.
        start: character offset into the document's text.
        end: character offset into the document's text.
        place: where a person finds it.

    What `text` has before its last `end - start` characters is repeated from the section's head.
    """

    text: str
    token_ids: tuple[int, ...]
    digest: str
    document: str = ""
    document_digest: str = ""
    start: int = 0
    end: int = 0
    place: Place = Place()


class Message(NamedTuple):
    """One message of a chat: its role (system, user, assistant or another that the chat template knows), and its text."""

    role: str
    text: str


class QuestionContext(NamedTuple):
    """What a question comes with: the messages before it, and an instruction beside the system's; see `Prompt`."""

    earlier: tuple[Message, ...] = ()
    instruction: str = ""


NO_CONTEXT = QuestionContext()


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request: `system` (None for the default instruction), chunk texts in prompt order, and a question.

    Attributes:
        think: whether a reasoning model may think before it answers, where its chat template has a switch for that.
        several_lines: whether the reply of a model without a chat template may have several lines. Such a model never
            stops by itself, so its reply otherwise ends with its line.
        earlier: messages of users and assistant before the question, in order. The chunks stand before all of them, so that
            stored KV fits whatever was said.
        instruction: a further instruction after the chunks, whose KV is stored after `system` alone.
    """

    question: str
    chunks: tuple[str, ...] = ()
    system: str | None = None
    think: bool = False
    several_lines: bool = False
    earlier: tuple[Message, ...] = ()
    instruction: str = ""

    def __post_init__(self) -> None:
        if isinstance(self.chunks, str):
            raise TypeError("Prompt.chunks is one string; give a list or tuple of chunk texts")
        object.__setattr__(self, "chunks", tuple(self.chunks))


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive prompt positions, from `start` to before `end`, in tokens; `chunk` indexes Prompt.chunks."""

    kind: SpanKind
    start: int
    end: int
    chunk: int = -1

    @property
    def tokens(self) -> int:
        """Length in tokens."""
        return self.end - self.start


ThoughtMode = Literal["tagged", "opened", "unmarked", "none"]
"""Where a reply's thoughts begin.

none: nowhere, all of it is the answer; tagged: with an opening tag, at the reply's start; opened: the prompt ends with the
opening tag; unmarked: at the reply's start, with or without an opening tag.
"""


class ThoughtTags(NamedTuple):
    """The texts around a model's thoughts, and their ids where they are single tokens."""

    opening: str = "<think>"
    closing: str = "</think>"
    opening_id: int | None = None
    closing_id: int | None = None


USUAL_TAGS = ThoughtTags()


@dataclass(frozen=True, slots=True)
class ReplyFormat:
    """How the reply to a rendered prompt is read.

    Attributes:
        one_line: the answer ends with its first line, or where it begins another question.
        thoughts: where they begin; they end with the closing tag.
        tags: what marks them.
    """

    one_line: bool = False
    thoughts: ThoughtMode = "tagged"
    tags: ThoughtTags = USUAL_TAGS


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """The prompt as the model sees it: X = S ++ C1 ++ … ++ Cn ++ Q.

    Attributes:
        token_ids: N ids.
        spans: cover the ids without gaps: one `system`, one per chunk, one `question`.
        user_rows: start and end of what the user wrote in the question span, without template text.
        reply: how the reply is read.
    """

    token_ids: tuple[int, ...]
    spans: tuple[Span, ...]
    user_rows: tuple[int, int]
    reply: ReplyFormat = ReplyFormat()

    @property
    def tokens(self) -> int:
        """N, the prompt's length in tokens."""
        return len(self.token_ids)

    def ids(self, span: Span) -> tuple[int, ...]:
        """The token ids of one span."""
        return self.token_ids[span.start : span.end]


class KVLayers(Protocol):
    """A chunk's KV that is not a plain tensor yet.

    A layer is verified, unpacked or waited for when a caller asks for it. Several threads may ask for a layer at once.
    Callers do not write to what is returned.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """(L, 2, G, S, D)."""

    @property
    def dtype(self) -> torch.dtype:
        """The model's dtype, which `layer` and `all_layers` return."""

    @property
    def nbytes(self) -> int:
        """Size in memory in its present form."""

    @property
    def layer_wait_s(self) -> float:
        """Estimated seconds to receive one more layer over a network; 0 if nothing has to be received."""

    def load(self, index: int) -> None:
        """Load and verify a layer, so that `layer` need not wait; raises DamagedEntry as `layer` does."""

    def layer(self, index: int) -> torch.Tensor:
        """Return keys and values of one layer, (2, G, S, D); raises DamagedEntry if they are not what was stored."""

    def all_layers(self) -> torch.Tensor:
        """Return all layers, (L, 2, G, S, D); raises DamagedEntry as `layer` does."""


def _is_tensor(data: torch.Tensor | KVLayers) -> TypeIs[torch.Tensor]:
    """PyTorch takes seconds to import; listing documents and answers from the cache need none of it."""
    import torch

    return isinstance(data, torch.Tensor)


@dataclass(frozen=True, slots=True)
class ChunkKV:
    """A chunk's keys and values at every layer, the keys *before* rotary positions are applied.

    The tensors may be read-only views of a mapped file, so callers do not write to them. Those from a store may not be
    verified or unpacked yet: read them with `layer`, or with `kv` for all layers at once.

    Attributes:
        token_ids: the S tokens.
        data: (L, 2, G, S, D); index 0 of the second axis are keys, index 1 values.
        entry: names the stored entry that this is: requests whose KV has the same name may share one copy. None if it is no
            entry.
    """

    token_ids: tuple[int, ...]
    data: torch.Tensor | KVLayers
    entry: str | None = field(default=None, compare=False)

    @property
    def kv(self) -> torch.Tensor:
        """All layers, (L, 2, G, S, D). Raises DamagedEntry if they are not what was stored."""
        return self.data if _is_tensor(self.data) else self.data.all_layers()

    def layer(self, index: int) -> torch.Tensor:
        """Return keys and values of one layer, (2, G, S, D). Raises DamagedEntry if they are not what was stored."""
        return self.data[index] if _is_tensor(self.data) else self.data.layer(index)

    def load(self, index: int) -> None:
        """Load and verify a layer, so that `layer` need not wait. Raises DamagedEntry as `layer` does."""
        if not _is_tensor(self.data):
            self.data.load(index)

    @property
    def layer_wait_s(self) -> float:
        """Estimated seconds to receive one more layer over a network; 0 if nothing has to be received."""
        return 0.0 if _is_tensor(self.data) else self.data.layer_wait_s

    @property
    def tokens(self) -> int:
        """S, the number of tokens."""
        return len(self.token_ids)

    @property
    def bytes(self) -> int:
        """Size in memory, in bytes."""
        return self.data.nbytes


@dataclass(frozen=True, slots=True)
class ChunkFeature:
    """What is stored about a chunk beside its KV: which tokens summarise it, how far its KV moves with context, ….

    Attributes:
        token_ids: the chunk's S tokens.
        tensors: of any shape, by name; float32, bfloat16, float16, int32, int64 or uint8. A name is a lower-case letter
            followed by lower-case letters, digits and underscores. They may be read-only views of a mapped file, so
            callers do not write to them.
    """

    token_ids: tuple[int, ...]
    tensors: Mapping[str, torch.Tensor]

    @property
    def tokens(self) -> int:
        """S, the number of tokens."""
        return len(self.token_ids)

    @property
    def bytes(self) -> int:
        """Size of the tensors in bytes."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())


@dataclass(frozen=True, slots=True)
class ModelFingerprint:
    """The properties of a model that stored KV depends on; equal digests mean interchangeable KV.

    `digest` covers all other fields but `name`, which is for people (hub id, path or "reference").
    """

    name: str
    weights: str
    configuration: str
    tokenizer: str
    dtype: str
    digest: str
    weight_bits: str = "full"


@dataclass(frozen=True, slots=True)
class KVProvenance:
    """Which forward pass computed a chunk's KV, or a feature of the chunk.

    Attributes:
        kind: bare, isolated, observed, similar-10, …: lower-case words, with digits from the second word on (the store
            checks it). For exact KV it is a label: entries of two kinds with the same context are one. All other entries
            differ by kind.
        context: digests of what preceded the chunk in that pass, from the prompt's first token: the shared system prefix,
            then one digest per earlier chunk.
        exact: the taint flag; true only if every row before the chunk in that pass was exact or freshly computed.
        rope_regime: the rotary scaling of the pass, for models whose frequencies depend on the length.
    """

    kind: str
    context: tuple[str, ...]
    exact: bool = True
    rope_regime: str = "fixed"
