"""A prompt as token ids, cut where storage needs it: system / chunks / question.

The text comes from the tokenizer's own chat template where it has one, else from a plain layout. Every
part, and the separator after a chunk, is tokenized on its own and the ids are concatenated: a chunk has the
same ids wherever it stands, so what is stored always fits, and a prefix match needs no care at merges.
Text from documents and users never becomes control tokens.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from kvweave.types import Prompt, Span, TokenizedPrompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


MARKER_SIGNS = frozenset("<>[]{}|")


class PlainTokenizer:
    """Tokenizes text without adding or recognising control tokens.

    Control tokens are the tokenizer's special tokens and every other added token that looks like a marker
    (some families list `<|user|>` or `<think>` as ordinary added tokens). Added runs of white space and
    added words keep their ids. The wrapped tokenizer is left as it is.

    Args:
        tokenizer: a transformers tokenizer, with or without a fast backend.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._backend: Tokenizer | None = None
        self._within_reach: frozenset[int] = frozenset()
        if isinstance(backend, Tokenizer):
            self._backend, self._within_reach = _without_control(backend)

    def ids(self, text: str) -> tuple[int, ...]:
        """The ids of `text` on its own; nothing is added before or after it."""
        if self._backend is None:
            given = self._tokenizer(text, add_special_tokens=False, split_special_tokens=True, verbose=False)
            return tuple(given["input_ids"])
        pieces = self._pieces(text, 0)
        return tuple(token for piece, _ in pieces for token in piece.ids if token not in self._within_reach)

    def offsets(self, text: str) -> tuple[tuple[int, int], ...] | None:
        """The first character of each of `ids(text)` and the one after its last; None if the tokenizer cannot tell."""
        if self._backend is None:
            return None
        return tuple(
            (behind + start, behind + end)
            for piece, behind in self._pieces(text, 0)
            for token, (start, end) in zip(piece.ids, piece.offsets, strict=True)
            if token not in self._within_reach
        )

    def text(self, ids: Sequence[int]) -> str:
        """What ids stand for, control tokens spelled out."""
        return str(
            self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        )

    def count(self, text: str) -> int:
        """How many ids `text` has."""
        return len(self.ids(text))

    def _pieces(self, text: str, behind: int) -> list[tuple[Any, int]]:
        """Encodings that make up a text, each with the number of characters before it.

        A marker that the vocabulary itself holds is broken after its first character; one of a single character
        cannot be, and stands in the encoding still: it is to be left out.
        """
        assert self._backend is not None
        encoding = self._backend.encode(text, add_special_tokens=False)
        whole = [(encoding, behind)]
        if self._within_reach.isdisjoint(encoding.ids):
            return whole
        cuts = {0, len(text)}
        dropped = 0
        for token, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if token in self._within_reach:
                cuts.add(start + 1)
                dropped += end - start < 2
        if dropped or len(cuts) == 2:
            return whole
        cut = pairwise(sorted(cuts))
        return [piece for start, end in cut for piece in self._pieces(text[start:end], behind + start)]


def _without_control(backend: Tokenizer) -> tuple[Tokenizer, frozenset[int]]:
    """A copy that splits control tokens, and the control ids its vocabulary could still produce."""
    description = json.loads(backend.to_str())
    description["truncation"] = description["padding"] = None
    control = [token for token in description["added_tokens"] if _is_control(token)]
    for token in control:
        token["special"] = True  # what encode_special_tokens then takes as plain text
    for token in description["added_tokens"]:
        token["special"] = token in control
    plain = Tokenizer.from_str(json.dumps(description))
    plain.encode_special_tokens = True
    vocabulary = plain.get_vocab(with_added_tokens=False)
    model = description["model"]  # Unigram names its unknown token by id, the others by text
    unknown = model.get(
        "unk_token", plain.id_to_token(model["unk_id"]) if model.get("unk_id") is not None else None
    )
    reach = {
        token["id"] for token in control if token["content"] in vocabulary and token["content"] != unknown
    }
    return plain, frozenset(reach)


def _is_control(token: dict[str, Any]) -> bool:
    content: str = token["content"]
    if not content.strip():
        return False
    return bool(token["special"]) or not MARKER_SIGNS.isdisjoint(content)


DEFAULT_SYSTEM = "Read the notes below and answer the questions."
SEPARATOR = "\n\n"
QUESTION_LEAD = "Question: "
ANSWER_LEAD = " Answer:"
# Some templates write today's date in front of everything: tomorrow no stored KV would fit any more. This
# stands in for their clock and always tells the date that they fall back to where there is none.
_FIXED_CLOCK = (
    "{%- macro strftime_now(form) -%}{{ form | replace('%d', '26') | replace('%b', 'Jul') | replace('%B', 'July')"
    " | replace('%m', '07') | replace('%Y', '2024') | replace('%y', '24') | replace('%A', 'Friday')"
    " | replace('%H', '12') | replace('%M', '00') | replace('%S', '00') }}{%- endmacro %}"
)
_CHUNKS_MARK, _QUESTION_MARK, _ANSWER_MARK = "\x02chunks\x03", "\x02question\x03", "\x02answer\x03"


@dataclass(frozen=True, slots=True)
class _Frame:
    """The template's own text around what changes: before the chunks, before and after the question."""

    head: str
    lead: str
    tail: str
    chat: bool


class PromptTemplate:
    """Renders prompts for one tokenizer."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._tokenizer = tokenizer
        self._plain = PlainTokenizer(tokenizer)  # text from outside never becomes control tokens
        self._separator = self._plain.ids(SEPARATOR)

    def prefix_ids(self, system: str | None) -> tuple[int, ...]:
        """The ids that every prompt with this instruction starts with: S, the shared prefix."""
        frame = self._frame(system)
        return self._template_ids(frame.head, starts=True, chat=frame.chat)

    def chunk_ids(self, text: str) -> tuple[int, ...]:
        """A chunk's ids as they stand in a prompt: its text, then the separator."""
        return self.framed(self._plain.ids(text))

    def text_ids(self, text: str) -> tuple[int, ...]:
        """The ids of a text on its own; whatever it says, none of them is a control token."""
        return self._plain.ids(text)

    def framed(self, text_ids: Sequence[int]) -> tuple[int, ...]:
        """A chunk's ids as they stand in a prompt, from the ids of its text."""
        return (*text_ids, *self._separator)

    def chunk_offsets(self, text: str) -> tuple[tuple[int, int], ...] | None:
        """The first character of each of a chunk's ids and the one after its last, counted in text and separator.

        None if the tokenizer cannot tell.
        """
        own, between = self._plain.offsets(text), self._plain.offsets(SEPARATOR)
        if own is None or between is None:
            return None
        return (*own, *((len(text) + start, len(text) + end) for start, end in between))

    def context_offsets(self, chunks: Sequence[str]) -> list[tuple[int, int]] | None:
        """`chunk_offsets` of a prompt's chunks, counted through all of them and the separators behind them."""
        offsets: list[tuple[int, int]] = []
        before = 0
        for text in chunks:
            found = self.chunk_offsets(text)
            if found is None:
                return None
            offsets += [(before + start, before + end) for start, end in found]
            before += len(text) + len(SEPARATOR)
        return offsets

    def align(self, chunk_ids: Sequence[int], text: str) -> tuple[tuple[int, int], ...]:
        """The characters of each of a chunk's ids, counted in its text and separator; always something."""
        offsets = self.chunk_offsets(text)
        if offsets is not None and self.chunk_ids(text) == tuple(chunk_ids):
            return offsets
        # Other tokens than the tokenizer would make of the text, or one that does not tell where they stand: as if
        # all were equally long. Neighbours stay neighbours, and what is lost is a few characters' exactness.
        tokens = len(chunk_ids) - len(self._separator)
        return (
            *_evenly(tokens, 0, len(text)),
            *_evenly(len(self._separator), len(text), len(text) + len(SEPARATOR)),
        )

    def chunk_text(self, chunk_ids: Sequence[int]) -> str:
        """The text that a chunk's ids stand for, its separator left out."""
        return self.text(chunk_ids[: len(chunk_ids) - len(self._separator)])

    def text(self, ids: Sequence[int]) -> str:
        """The text that ids stand for."""
        return self._plain.text(ids)

    def render(self, prompt: Prompt) -> TokenizedPrompt:
        """Token ids and spans of a prompt; the system span may be empty, the question span never is."""
        frame = self._frame(prompt.system)
        return self._behind(self._template_ids(frame.head, starts=True, chat=frame.chat), prompt, frame)

    def turn(self, prompt: Prompt) -> TokenizedPrompt:
        """What a further turn adds behind an answer, as a prompt whose system span is what ends that answer."""
        frame = self._frame(prompt.system)
        between = self._template_ids(self._between(prompt.system), starts=False, chat=frame.chat)
        return self._behind(between, prompt, frame)

    def _behind(self, head: Sequence[int], prompt: Prompt, frame: _Frame) -> TokenizedPrompt:
        """Chunks and question behind what a prompt or a turn starts with."""
        ids = list(head)
        spans = [Span("system", 0, len(ids))]
        for number, text in enumerate(prompt.chunks):
            start = len(ids)
            ids += self.chunk_ids(text)
            spans.append(Span("chunk", start, len(ids), number))
        start = len(ids)
        ids += self._template_ids(frame.lead, starts=False, chat=frame.chat)
        asked = len(ids)
        ids += self._plain.ids(prompt.question)
        answered = len(ids)
        ids += self._template_ids(frame.tail, starts=False, chat=frame.chat)
        spans.append(Span("question", start, len(ids)))
        return TokenizedPrompt(tuple(ids), tuple(spans), (asked, answered))

    def _between(self, system: str | None) -> str:
        """The template's own text between an answer and the next turn."""
        if not getattr(self._tokenizer, "chat_template", None):
            return SEPARATOR
        system = DEFAULT_SYSTEM if system is None else system
        turns = [
            {"role": "user", "content": _QUESTION_MARK},
            {"role": "assistant", "content": _ANSWER_MARK},
            {"role": "user", "content": _CHUNKS_MARK},
        ]
        text = self._with_instruction(system, turns)
        return text.partition(_ANSWER_MARK)[2].partition(_CHUNKS_MARK)[0]

    def _frame(self, system: str | None) -> _Frame:
        system = DEFAULT_SYSTEM if system is None else system
        if not getattr(self._tokenizer, "chat_template", None):
            head = f"{system}{SEPARATOR}" if system else ""
            return _Frame(head, QUESTION_LEAD, ANSWER_LEAD, chat=False)
        body = f"{_CHUNKS_MARK}{QUESTION_LEAD}{_QUESTION_MARK}"
        text = self._chat_text(system, body)
        head, _, rest = text.partition(_CHUNKS_MARK)
        lead, _, tail = rest.partition(_QUESTION_MARK)
        return _Frame(head, lead, tail, chat=True)

    def _chat_text(self, system: str, body: str) -> str:
        return self._with_instruction(system, [{"role": "user", "content": body}])

    def _with_instruction(self, system: str, turns: list[dict[str, str]]) -> str:
        """Turns behind an instruction, which stands in the first of them where the template takes none."""
        instruction = [{"role": "system", "content": system}] if system else []
        try:
            return self._apply([*instruction, *turns])
        except Exception:  # templates refuse a system role by raising whatever their author chose
            if not instruction:
                raise
            first, *rest = turns
            return self._apply([{**first, "content": f"{system}{SEPARATOR}{first['content']}"}, *rest])

    def _apply(self, messages: list[dict[str, str]]) -> str:
        text = self._tokenizer.apply_chat_template(
            messages,
            tokenize=False,
            add_generation_prompt=True,
            # Reasoning models that know the switch answer directly; other templates ignore it.
            enable_thinking=False,
            chat_template=_FIXED_CLOCK + self._tokenizer.get_chat_template(),
            date_string="26 Jul 2024",
        )
        return str(text)

    def _template_ids(self, text: str, *, starts: bool, chat: bool) -> tuple[int, ...]:
        """Ids of the template's own text, control tokens included; a plain prompt's start gets the model's BOS."""
        tokenizer = self._tokenizer
        if not starts or chat:
            return tuple(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
        ids = list(tokenizer(text, add_special_tokens=True, verbose=False)["input_ids"])
        plain = list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
        bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
        if len(ids) > len(plain) and eos is not None and ids[-1] == eos:
            ids.pop()  # some tokenizers close every text; the prompt goes on
        # A separate BOS that the tokenizer leaves to its caller (one shared with EOS is no start mark).
        if bos is not None and bos != eos and ids[:1] != [bos]:
            ids.insert(0, bos)
        return tuple(ids)


def _evenly(tokens: int, start: int, end: int) -> tuple[tuple[int, int], ...]:
    """Characters start … end dealt out to so many tokens."""
    edges = [start + (end - start) * number // max(1, tokens) for number in range(tokens + 1)]
    return tuple(pairwise(edges))
