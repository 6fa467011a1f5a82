"""A prompt as token ids, cut where storage needs it: system / chunks / question.

The text comes from the tokenizer's chat template if it has one, else from a plain layout. Every part, and the separator
after a chunk, is tokenized on its own and the ids are concatenated. So a chunk has the same ids at every place, stored KV
always fits, and prefix matching needs no care for merges. A tokenizer that puts a space before each text, as SentencePiece
does, puts it before the prompt alone. Text from documents and users never becomes control tokens.
A chat, or a text as it is, has no chunks: it is cut into blocks of a fixed length instead.
"""

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

from tokenizers import AddedToken, Tokenizer
from tokenizers.models import Unigram

from kvweave.errors import InvalidRequest, PromptTooLong
from kvweave.models.chat_template import (
    ANSWER_LEAD,
    DEFAULT_SYSTEM,
    QUESTION_LEAD,
    SEPARATOR,
    ChatTemplate,
    Frame,
    control_tokens,
    is_control,
)
from kvweave.models.text_prefix import Parts, without_prefix
from kvweave.types import Message, Prompt, ReplyFormat, Span, TokenizedPrompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


__all__ = ["ANSWER_LEAD", "DEFAULT_SYSTEM", "QUESTION_LEAD", "SEPARATOR", "PlainTokenizer", "PromptTemplate"]


_SYSTEM_MARK: Final = "\x02system\x03"


class PromptTemplate:
    """Renders prompts for one tokenizer."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._tokenizer = tokenizer
        self._chat = ChatTemplate(tokenizer)
        self._plain = PlainTokenizer(tokenizer)  # for text from outside
        self._continuing = _Continuing.of(tokenizer)
        self._separator = self._plain.ids(SEPARATOR)
        self._control = tuple(control_tokens(tokenizer).values())

    def render(self, prompt: Prompt) -> TokenizedPrompt:
        """Return the token ids and spans of a prompt; the system span may be empty, the question span never is."""
        frame = self._frame(prompt)
        return self._render_after(self._head_ids(frame, prompt.system), prompt, frame)

    def render_chat(
        self, messages: Sequence[Message], *, think: bool = False
    ) -> tuple[tuple[int, ...], ReplyFormat]:
        """Return the ids of a chat, as `tokenizer.apply_chat_template` gives them, and the format of the reply.

        Only where a message spells a control token are its ids others: the text of a message never becomes one. The template
        sees the tags of thoughts in replies all the same, and leaves out what it always does.
        Raises InvalidRequest if the chat template refuses the messages.
        """
        count = next((n for n, message in enumerate(messages) if message.role != "system"), len(messages))
        system, turns = SEPARATOR.join(text for _, text in messages[:count]), messages[count:]
        if self._chat.exists and not any(self._spells_control(text) for _, text in messages):
            text = self._chat.text(turns, system, think=think)
            return self._template_ids(text, starts=True, chat=True), self._chat.reply(text, think=think)
        whole = [Message("system", system), *turns] if system else turns
        frame = self._chat.chat_frame(whole, think=think)
        ids = list(self._template_ids(frame.head, starts=True, chat=frame.chat))
        self._append_turns(ids, frame)
        self._append(ids, frame.tail)
        return tuple(ids), frame.reply

    def text_ids(self, text: str) -> tuple[int, ...]:
        """Return the ids of a whole text that begins a prompt: after the model's BOS, control tokens that it spells included."""
        return self._template_ids(text, starts=True, chat=False)

    def render_turn(self, prompt: Prompt) -> TokenizedPrompt:
        """Render a further turn of a chat. Its system span holds the template's text between the last answer and the turn."""
        frame = self._frame(prompt)
        text = self._chat.between_turns(prompt.system)
        return self._render_after(self._template_ids(text, starts=False, chat=frame.chat), prompt, frame)

    def prefix_ids(self, system: str | None, *, think: bool = False) -> tuple[int, ...]:
        """Return the ids that every prompt with this system instruction starts with, the shared prefix.

        A few templates write there whether the model may `think`.
        """
        return self._head_ids(self._chat.frame(self._or_mark(system), think=think), system)

    @property
    def is_chat(self) -> bool:
        """Whether the tokenizer has a chat template: the model follows instructions, and is no base model."""
        return self._chat.exists

    @property
    def end_tokens(self) -> frozenset[int]:
        """The token with which the chat template ends an answer, if it does."""
        return self._chat.end_tokens

    def tokenize(self, text: str) -> tuple[int, ...]:
        """Return the ids of a text on its own; none of them is a control token."""
        return self._plain.ids(text)

    def chunk_ids(self, text: str) -> tuple[int, ...]:
        """Return a chunk's ids in a prompt: those of its text, then the separator's."""
        return self.with_separator(self._plain.ids(text))

    def with_separator(self, text_ids: Sequence[int]) -> tuple[int, ...]:
        """Return a chunk's ids in a prompt, from the ids of its text."""
        return (*text_ids, *self._separator)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids."""
        return self._plain.decode(ids)

    def chunk_text(self, chunk_ids: Sequence[int]) -> str:
        """Return the text of a chunk's ids, without its separator."""
        return self.decode(chunk_ids[: len(chunk_ids) - len(self._separator)])

    def chunk_offsets(self, text: str) -> tuple[tuple[int, int], ...] | None:
        """Return (first, end) characters of each of a chunk's ids, counted in text and separator.

        None if the tokenizer has no offsets.
        """
        own, between = self._plain.offsets(text), self._plain.offsets(SEPARATOR)
        if own is None or between is None:
            return None
        return (*own, *((len(text) + start, len(text) + end) for start, end in between))

    def token_offsets(self, chunk_ids: Sequence[int], text: str) -> tuple[tuple[int, int], ...]:
        """Return (first, end) characters of each of a chunk's ids, estimated if the tokenizer cannot give them."""
        offsets = self.chunk_offsets(text)
        if offsets is not None and self.chunk_ids(text) == tuple(chunk_ids):
            return offsets
        # The ids are not those of the tokenizer, or it has no offsets: treat all as equally long. Neighbours stay
        # neighbours, and offsets are wrong by a few characters.
        tokens = len(chunk_ids) - len(self._separator)
        return (
            *_split_evenly(tokens, 0, len(text)),
            *_split_evenly(len(self._separator), len(text), len(text) + len(SEPARATOR)),
        )

    def _render_after(self, head: Sequence[int], prompt: Prompt, frame: Frame) -> TokenizedPrompt:
        """Render chunks and question after the ids that a prompt or a turn starts with."""
        ids = list(head)
        spans = [Span("system", 0, len(ids))]
        for number, text in enumerate(prompt.chunks):
            start = len(ids)
            ids += self.chunk_ids(text)
            spans.append(Span("chunk", start, len(ids), number))
        start = len(ids)
        if prompt.instruction:
            ids += self.chunk_ids(prompt.instruction)
        self._append_turns(ids, frame, start)
        self._append(ids, frame.lead, start)
        user_start = len(ids)
        user_start -= self._append(ids, prompt.question, start, plain=True)
        user_end = len(ids)
        self._append(ids, frame.tail, start)
        spans.append(Span("question", start, len(ids)))
        return TokenizedPrompt(tuple(ids), tuple(spans), (user_start, user_end), frame.reply)

    def _append_turns(self, ids: list[int], frame: Frame, kept: int = 0) -> None:
        for before, text in frame.turns:
            self._append(ids, before, kept)
            self._append(ids, text, kept, plain=True)

    def _append(self, ids: list[int], text: str, kept: int = 0, *, plain: bool = False) -> int:
        """Append the ids of a text that follows `ids`, `plain` if it comes from outside; return how many ids it replaced.

        These are the ids of one piece wherever the tokenizer puts a space before a text: there is none between two parts,
        and one that ends the part before joins the text, unless it is among the first `kept` ids.
        """
        way, replaced = self._continuing, 0
        if way is None:
            ids += self._plain.ids(text) if plain else self._template_ids(text, starts=False, chat=True)
            return 0
        begins = not ids or ids == [self._tokenizer.bos_token_id] or way.spaced_after(ids[-1])
        if not begins and len(ids) > kept and ids[-1] == way.space and text[:1].strip():
            begins, replaced = True, 1
            ids.pop()
        ids += self._plain.ids(text, begins=begins) if plain else way.ids(text, begins=begins)
        return replaced

    def _frame(self, prompt: Prompt) -> Frame:
        return self._chat.frame(
            self._or_mark(prompt.system),
            think=prompt.think,
            several_lines=prompt.several_lines,
            earlier=prompt.earlier,
        )

    def _spells_control(self, text: str) -> bool:
        """Return whether the tokenizer may read a control token in a text, before or after normalising it: "＜eos＞" too."""
        normalizer = getattr(getattr(self._tokenizer, "backend_tokenizer", None), "normalizer", None)
        read = (text, normalizer.normalize_str(text)) if normalizer is not None else (text,)
        return any(token in each for token in self._control for each in read)

    def _or_mark(self, system: str | None) -> str | None:
        """Return an instruction, or the mark that stands for it in a frame if it spells a control token."""
        return _SYSTEM_MARK if system is not None and self._spells_control(system) else system

    def _head_ids(self, frame: Frame, system: str | None) -> tuple[int, ...]:
        """Return the ids before the chunks. A control token that the instruction spells stays text."""
        before, mark, after = frame.head.partition(_SYSTEM_MARK)
        ids = list(self._template_ids(before, starts=True, chat=frame.chat))
        if mark and system is not None:
            self._append(ids, system, plain=True)
            self._append(ids, after)
        return tuple(ids)

    def _template_ids(self, text: str, *, starts: bool, chat: bool) -> tuple[int, ...]:
        """Tokenize the template's own text, control tokens included; a plain prompt that `starts` gets the model's BOS."""
        tokenizer = self._tokenizer
        if not starts and self._continuing is not None:
            return self._continuing.ids(text, begins=False)
        if not starts or chat:
            return tuple(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
        ids = list(tokenizer(text, add_special_tokens=True, verbose=False)["input_ids"])
        plain = list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
        bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
        if len(ids) > len(plain) and eos is not None and ids[-1] == eos:
            ids.pop()  # some tokenizers end every text with EOS, but the prompt continues
        # Some tokenizers leave BOS to their caller. One that is also the EOS is no start mark.
        if bos is not None and bos != eos and ids[:1] != [bos]:
            ids.insert(0, bos)
        return tuple(ids)


class PlainTokenizer:
    """Tokenizes text without adding or recognising control tokens.

    Control tokens are the tokenizer's special tokens and every other added token that looks like a marker
    (some families list `<|user|>` or `<think>` as ordinary added tokens). Added runs of white space and
    added words keep their ids. The wrapped tokenizer is not changed. A text continues another one: a tokenizer that puts a
    space before each text puts none here.

    Args:
        tokenizer: a transformers tokenizer, with or without a fast backend.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._backend: Tokenizer | None = None
        self._beginning: Tokenizer | None = None
        self._leftover_control: frozenset[int] = frozenset()
        if isinstance(backend, Tokenizer):
            self._backend, self._leftover_control = _without_control(backend)
            self._beginning = self._backend
            if (parts := without_prefix(backend)) is not None:
                self._backend, _ = _without_control(backend)
                self._backend.normalizer, self._backend.pre_tokenizer = parts

    def ids(self, text: str, *, begins: bool = False) -> tuple[int, ...]:
        """Return the ids of `text` on its own; if it `begins` a prompt, with the space that the tokenizer may put before it."""
        if self._backend is None:
            encoded = self._tokenizer(
                text, add_special_tokens=False, split_special_tokens=True, verbose=False
            )
            return tuple(encoded["input_ids"])
        pieces = self._encodings(self._beginning if begins else self._backend, text, 0)
        return tuple(
            token for piece, _ in pieces for token in piece.ids if token not in self._leftover_control
        )

    def count(self, text: str) -> int:
        """Count the ids of `text`."""
        return len(self.ids(text))

    def offsets(self, text: str) -> tuple[tuple[int, int], ...] | None:
        """Return (first, end) characters of each of `ids(text)`; None if the tokenizer has no offsets."""
        if self._backend is None:
            return None
        return tuple(
            (before + start, before + end)
            for piece, before in self._encodings(self._backend, text, 0)
            for token, (start, end) in zip(piece.ids, piece.offsets, strict=True)
            if token not in self._leftover_control
        )

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, control tokens spelled out."""
        return str(
            self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        )

    def _encodings(self, backend: Tokenizer | None, text: str, before: int) -> list[tuple[Any, int]]:
        """Encode a text in pieces; return each with the number of characters before it.

        A control token that the vocabulary itself can produce is split after its first character. If it has one
        character, it stays in the encoding, and the caller has to drop it.
        """
        assert backend is not None
        encoding = backend.encode(text, add_special_tokens=False)
        whole = [(encoding, before)]
        if self._leftover_control.isdisjoint(encoding.ids):
            return whole
        cuts = {0, len(text)}
        single = 0
        for token, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if token in self._leftover_control:
                cuts.add(start + 1)
                single += end - start < 2
        if single or len(cuts) == 2:
            return whole
        pieces = pairwise(sorted(cuts))
        return [
            each
            for start, end in pieces
            for each in self._encodings(self._backend if start else backend, text[start:end], before + start)
        ]


class _Continuing:
    """Tokenizes the template's own text behind other text, for a tokenizer that puts a space before a text.

    Attributes:
        space: the id of a space alone, None if it has none.
    """

    def __init__(self, tokenizer: Any, backend: Tokenizer, parts: Parts) -> None:
        self._tokenizer = tokenizer
        added = backend.get_added_tokens_decoder()
        self._added = frozenset(added)
        self._inside = _with_special_tokens(
            backend, frozenset(t.content for t in added.values() if t.special)
        )
        self._inside.normalizer, self._inside.pre_tokenizer = parts
        spaces = self._inside.encode(" ", add_special_tokens=False).ids
        self.space = spaces[0] if len(spaces) == 1 else None
        # Most put the space behind every added token too, some before the first text alone.
        mark = next((t.content for t in added.values() if t.special), None)
        self._every = mark is not None and (
            self._whole(f"{mark}a")["input_ids"][1:] != self._inside.encode("a", add_special_tokens=False).ids
        )

    @classmethod
    def of(cls, tokenizer: Any) -> "_Continuing | None":
        """Return one for a transformers tokenizer, None if it puts no space before a text."""
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if not isinstance(backend, Tokenizer) or (parts := without_prefix(backend)) is None:
            return None
        return cls(tokenizer, backend, parts)

    def spaced_after(self, token: int) -> bool:
        """Whether the tokenizer puts a space between this token and a text."""
        return self._every and token in self._added

    def ids(self, text: str, *, begins: bool) -> tuple[int, ...]:
        """Return the ids of a text, added tokens included; `begins`: with a space before it."""
        whole = self._whole(text)
        if begins:
            return tuple(whole["input_ids"])
        places = zip(whole["input_ids"], whole["offset_mapping"], strict=True)
        cut = next((start for token, (start, _) in places if token in self._added), len(text))
        first = self._inside.encode(text[:cut], add_special_tokens=False).ids
        return (*first, *self._whole(text[cut:])["input_ids"])

    def _whole(self, text: str) -> Any:
        return self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)


def _without_control(backend: Tokenizer) -> tuple[Tokenizer, frozenset[int]]:
    """Return a tokenizer that splits control tokens, and the control ids that its vocabulary can still produce.

    It shares the vocabulary and its merges with `backend`, so it costs milliseconds at any size; a copy of a vocabulary of
    262,144 words takes seconds.
    """
    added = dict(sorted(backend.get_added_tokens_decoder().items()))
    control = {
        number: token.content
        for number, token in added.items()
        if is_control(token.content, special=token.special)
    }
    plain = _with_special_tokens(backend, frozenset(control.values()))
    plain.encode_special_tokens = True  # special tokens are then plain text
    unknown = _unknown_token(backend)
    return plain, frozenset(
        number
        for number, content in control.items()
        if content != unknown and backend.model.token_to_id(content) is not None
    )


def _with_special_tokens(backend: Tokenizer, special: frozenset[str]) -> Tokenizer:
    """Return a tokenizer with the vocabulary of `backend` in which the added tokens in `special` and no others are special."""
    added = dict(sorted(backend.get_added_tokens_decoder().items()))
    found = _sharing_vocabulary(
        backend, [_with_special(each, each.content in special) for each in added.values()]
    )
    if {number: token.content for number, token in found.get_added_tokens_decoder().items()} == {
        number: token.content for number, token in added.items()
    }:
        return found
    return _copied(backend, special)  # ids with gaps, which only a whole copy keeps


def _sharing_vocabulary(backend: Tokenizer, added: list[AddedToken]) -> Tokenizer:
    """Return a tokenizer with the parts of `backend`, not copied, and these added tokens, in the order of their ids."""
    plain = Tokenizer(backend.model)
    if backend.normalizer is not None:
        plain.normalizer = backend.normalizer
    if backend.pre_tokenizer is not None:
        plain.pre_tokenizer = backend.pre_tokenizer
    plain.add_tokens(added)
    return plain


def _copied(backend: Tokenizer, control: frozenset[str]) -> Tokenizer:
    """Return a copy without truncation and padding, in which the added tokens in `control` and no others are special."""
    description = json.loads(backend.to_str())
    description["truncation"] = description["padding"] = None
    for token in description["added_tokens"]:
        token["special"] = token["content"] in control
    return Tokenizer.from_str(json.dumps(description))


def _with_special(token: AddedToken, special: bool) -> AddedToken:
    return AddedToken(
        token.content,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized,
        special=special,
    )


def _unknown_token(backend: Tokenizer) -> str | None:
    """Return the token that stands for text outside the vocabulary; Unigram models name it by id, the others by text."""
    if not isinstance(backend.model, Unigram):
        return getattr(backend.model, "unk_token", None)
    number = json.loads(backend.to_str())["model"].get("unk_id")
    return None if number is None else backend.id_to_token(number)


def _split_evenly(tokens: int, start: int, end: int) -> tuple[tuple[int, int], ...]:
    """Divide characters start … end evenly among a number of tokens."""
    edges = [start + (end - start) * number // max(1, tokens) for number in range(tokens + 1)]
    return tuple(pairwise(edges))


def check_length(context_tokens: int, model: str, prompt_tokens: int, new_tokens: int = 0) -> None:
    """Raise PromptTooLong if prompt and answer do not fit the context of the model of this name; the message says by how much."""
    over = prompt_tokens + new_tokens - context_tokens
    if over > 0:
        raise PromptTooLong(
            f"the prompt has {prompt_tokens} tokens and the answer may take {new_tokens}: {over} more than the "
            f"{context_tokens} of {model}; shorten the question, use fewer or shorter "
            "chunks (top_k, drop_chunks), or allow fewer answer tokens (max_new_tokens, in OpenAI's API max_tokens)"
        )


_BLOCK_TOKENS: Final = 128
"""Tokens of a block. A block is one entry of the store: smaller ones find more, and cost more look-ups and writes."""


def chat_in_blocks(
    template: PromptTemplate, messages: Sequence[Message], *, think: bool = False
) -> TokenizedPrompt:
    """Return a chat as blocks; raises InvalidRequest if there is nothing to answer or the template refuses the messages.

    Blocks have a fixed length, so that a later prompt that begins with the same tokens finds their KV, whatever the tokens
    mean (vLLM's automatic prefix caching, with larger blocks).
    """
    if not messages or messages[-1].role == "assistant":
        raise InvalidRequest("the chat has nothing to answer: let its last message be the user's")
    ids, reply = template.render_chat(messages, think=think)
    return _in_blocks(ids, reply)


def text_in_blocks(template: PromptTemplate, text: str) -> TokenizedPrompt:
    """Return a text as blocks, its reply to be read as it is; raises InvalidRequest if there is nothing to continue."""
    ids = template.text_ids(text)
    if not ids:
        raise InvalidRequest(
            "the prompt is empty, and the model has no token that begins a text: give some text"
        )
    return _in_blocks(ids, ReplyFormat(thoughts="none"))


def _in_blocks(ids: Sequence[int], reply: ReplyFormat) -> TokenizedPrompt:
    """Return ids, one at least, cut into blocks; the last one, which always has tokens, is the question span."""
    last = (len(ids) - 1) // _BLOCK_TOKENS * _BLOCK_TOKENS
    blocks = [
        Span("chunk", start, start + _BLOCK_TOKENS, number)
        for number, start in enumerate(range(0, last, _BLOCK_TOKENS))
    ]
    spans = (Span("system", 0, 0), *blocks, Span("question", last, len(ids)))
    return TokenizedPrompt(tuple(ids), spans, (last, len(ids)), reply)
