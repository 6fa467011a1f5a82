"""A tokenizer's chat template: its own text around a prompt's parts, where answers end, and how thoughts are marked.

With a chat template, a prompt's control tokens are those that the template writes, BOS included: one that writes none gets
none. transformers' `apply_chat_template` and vLLM do the same.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

from kvweave.errors import InvalidRequest, UnsupportedModel
from kvweave.types import ReplyFormat, ThoughtMode, ThoughtTags

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DEFAULT_SYSTEM = "Read the notes below and answer the questions."
SEPARATOR = "\n\n"
QUESTION_LEAD = "Question: "
ANSWER_LEAD = " Answer:"
MARKER_SIGNS = frozenset("<>[]{}|")
# Some templates write today's date at the start of every prompt, so that stored KV would not fit tomorrow. This
# macro replaces their clock and always gives the date that they use where there is none.
_FIXED_CLOCK = (
    "{%- macro strftime_now(form) -%}{{ form | replace('%d', '26') | replace('%b', 'Jul') | replace('%B', 'July')"
    " | replace('%m', '07') | replace('%Y', '2024') | replace('%y', '24') | replace('%A', 'Friday')"
    " | replace('%H', '12') | replace('%M', '00') | replace('%S', '00') }}{%- endmacro %}"
)
_CHUNKS_MARK, _QUESTION_MARK, _ANSWER_MARK = "\x02chunks\x03", "\x02question\x03", "\x02answer\x03"
_TAGS: Final = (
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("<thought>", "</thought>"),
    ("<reasoning>", "</reasoning>"),
    ("<seed:think>", "</seed:think>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|inner_prefix|>", "<|inner_suffix|>"),
)
"""How reasoning models mark their thoughts; the first is the most usual."""


@dataclass(frozen=True, slots=True)
class Frame:
    """The text around a prompt's parts: before the chunks, before the question, after the question; and the reply's format.

    `turns` are the earlier messages, each as the template's text before it and its own, which comes from outside.
    """

    head: str
    lead: str
    tail: str
    chat: bool
    reply: ReplyFormat
    turns: tuple[tuple[str, str], ...] = ()


class ChatTemplate:
    """The chat template of a tokenizer, or the plain layout of a tokenizer without one."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._tokenizer = tokenizer
        self._end_tokens_of: dict[
            str, frozenset[int]
        ] = {}  # by the template's text, which a caller may replace

    @property
    def exists(self) -> bool:
        """Whether the tokenizer has one; else the prompt has the plain layout."""
        return bool(getattr(self._tokenizer, "chat_template", None))

    def frame(
        self,
        system: str | None,
        *,
        think: bool = False,
        several_lines: bool = False,
        earlier: Sequence[tuple[str, str]] = (),
    ) -> Frame:
        """Return the text around the parts of a prompt after an instruction, the default one if it is None.

        `think` lets a reasoning model think before it answers, if its template has a switch for that. Without a chat
        template, the reply is one line unless `several_lines`. `earlier` are the role and text of messages before the question.
        Thoughts in them stay or go as the template does it, but never stand before the chunks.

        Raises UnsupportedModel if the template leaves a message out, InvalidRequest if it refuses these roles.
        """
        system, messages = DEFAULT_SYSTEM if system is None else system, [*earlier, ("user", _QUESTION_MARK)]
        if self.exists:
            frame = self._frame(system, messages, think=think)
        else:
            frame = _plain_frame(system, messages, several_lines=several_lines)
        *turns, (lead, _) = frame.turns
        return replace(frame, lead=lead, turns=tuple(turns))

    def chat_frame(self, messages: Sequence[tuple[str, str]], *, think: bool = False) -> Frame:
        """Return the text around the messages of a chat, each role and text, without chunks and questions: all are `turns`.

        The first may be a system message.

        Raises as `frame`.
        """
        if not self.exists:
            return _plain_frame("", messages, several_lines=False)
        marked = self._marked(messages)
        first = int(marked[0].role == "system")
        bodies = [(each.role, each.body) for each in marked[first:]]
        text = self.text(bodies, marked[0].body if first else "", think=think)
        turns, tail = _split_at_marks(text, marked)
        return Frame("", "", tail, chat=True, reply=self.reply(tail, think=think), turns=turns)

    def text(self, messages: Sequence[tuple[str, str]], system: str = "", *, think: bool = False) -> str:
        """Return messages, each role and text, as the template prints them; raises InvalidRequest if it refuses them."""
        try:
            return self._text(
                system, [{"role": role, "content": text} for role, text in messages], think=think
            )
        except Exception as error:  # templates raise whatever their author chose
            roles, why = ", ".join(role for role, _ in messages), " ".join(str(error).split())[:300]
            raise InvalidRequest(
                f"the model's chat template refuses messages of the roles {roles or 'system'} in this order: {why}"
            ) from error

    def _frame(self, system: str, messages: Sequence[tuple[str, str]], *, think: bool) -> Frame:
        """Return the text around chunks and messages, which are all `turns`."""
        marked = self._marked(messages)
        *thoughts, (_, answer) = marked[0].parts
        if thoughts:
            marked[0].parts = [("", answer.lstrip())]
        bodies = [
            (each.role, f"{QUESTION_LEAD if each.role == 'user' else ''}{each.body}") for each in marked
        ]
        bodies[0] = bodies[0][0], f"{_CHUNKS_MARK}{bodies[0][1]}"
        head, _, rest = self.text(bodies, system, think=think).partition(_CHUNKS_MARK)
        turns, tail = _split_at_marks(rest, marked)
        return Frame(head, "", tail, chat=True, reply=self.reply(tail, think=think), turns=turns)

    def _marked(self, messages: Sequence[tuple[str, str]]) -> list["_Marked"]:
        return [_Marked(role, self._parts(role, text), n) for n, (role, text) in enumerate(messages)]

    def _parts(self, role: str, text: str) -> list[tuple[str, str]]:
        """Return a message as its own text in parts, each with the tag before it: the thoughts of a reply, and its answer."""
        tags = self._tags if role == "assistant" else None
        if tags is None or tags.closing not in text:
            return [("", text)]
        thoughts, _, answer = text.rpartition(tags.closing)
        opening = tags.opening if thoughts.lstrip().startswith(tags.opening) else ""
        return [(opening, thoughts.lstrip().removeprefix(opening)), (tags.closing, answer)]

    def between_turns(self, system: str | None) -> str:
        """Return the text between an answer and the next turn; raises InvalidRequest if the template refuses a second turn."""
        if not self.exists:
            return SEPARATOR
        turns = [("user", _QUESTION_MARK), ("assistant", _ANSWER_MARK), ("user", _CHUNKS_MARK)]
        text = self.text(turns, DEFAULT_SYSTEM if system is None else system)
        return text.partition(_ANSWER_MARK)[2].partition(_CHUNKS_MARK)[0]

    @property
    def end_tokens(self) -> frozenset[int]:
        """The control token that the template writes right after an answer, such as `<|im_end|>`; none if it writes text.

        Where the template does not end an answer, it is the token that begins the user's next turn: the model writes it
        too.
        """
        if not self.exists:
            return frozenset()
        template = str(self._tokenizer.get_chat_template())
        if template not in self._end_tokens_of:
            self._end_tokens_of[template] = self._find_end_tokens()
        return self._end_tokens_of[template]

    def _find_end_tokens(self) -> frozenset[int]:
        try:
            behind = self.between_turns(None)
        except Exception:  # a template for one turn only raises whatever its author chose
            return frozenset()
        control = control_tokens(self._tokenizer)
        for token in self._tokenizer(behind, add_special_tokens=False, verbose=False)["input_ids"]:
            if token in control:
                return frozenset({token})
            if str(self._tokenizer.decode([token])).strip():
                break
        return frozenset()

    @property
    def _tags(self) -> ThoughtTags | None:
        """The tags that the vocabulary or the template names; None if neither names any."""
        added = self._tokenizer.get_added_vocab()
        template = str(self._tokenizer.get_chat_template())
        for opening, closing in _TAGS:
            if opening in added and closing in added:
                return ThoughtTags(opening, closing, added[opening], added[closing])
        for opening, closing in _TAGS:
            if opening in template or closing in template:
                return ThoughtTags(opening, closing, added.get(opening), added.get(closing))
        return None

    def reply(self, tail: str, *, think: bool) -> ReplyFormat:
        """Return the format of the reply to a prompt that ends with `tail`."""
        tags = self._tags
        if tags is None:
            return ReplyFormat()
        opened, closed = tail.rfind(tags.opening), tail.rfind(tags.closing)
        mode: ThoughtMode = "opened" if opened > closed else "tagged"
        if think and opened < 0 and closed < 0:
            mode = "unmarked"
        return ReplyFormat(thoughts=mode, tags=tags)

    def _text(self, system: str, turns: list[dict[str, str]], *, think: bool = False) -> str:
        """Apply the template to turns after a system instruction.

        A template without a system role, or that leaves the instruction out, gets it in the first turn.
        """
        if not system:
            return self._apply(turns, think=think)
        try:
            text = self._apply([{"role": "system", "content": system}, *turns], think=think)
            if system.strip() in text:
                return text
        except Exception:  # templates refuse a system role by raising whatever their author chose
            pass
        first, *rest = turns or [{"role": "user", "content": ""}]
        return self._apply(
            [{**first, "content": f"{system}{SEPARATOR}{first['content']}"}, *rest], think=think
        )

    def _apply(self, messages: list[dict[str, str]], *, think: bool) -> str:
        with _bounded():
            text = self._tokenizer.apply_chat_template(
                messages,
                tokenize=False,
                add_generation_prompt=True,
                # The names that reasoning models' templates give the switch; other templates ignore them.
                enable_thinking=think,
                thinking=think,
                chat_template=_FIXED_CLOCK + self._tokenizer.get_chat_template(),
                date_string="26 Jul 2024",
            )
        return str(text)


_MAX_STEPS: Final = 1_000_000
"""Lines of Python that a template, which Jinja compiles to Python, may run, and calls that they may make; families' templates
run some 20 lines for a message."""


@contextmanager
def _bounded() -> Iterator[None]:
    """Stop a template that loops without end in this thread; Jinja's sandbox bounds what a template reaches, not its time."""
    left, runs, earlier = _MAX_STEPS, False, sys.gettrace()

    def count(frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        nonlocal left, runs
        own = frame.f_code.co_filename == "<template>"  # Jinja's name for a template from a text
        runs |= own
        left -= runs  # not what Jinja's compiler calls before
        if left < 0:
            raise InvalidRequest(f"it runs for more than {_MAX_STEPS:,} lines and calls")
        return count if own else None

    sys.settrace(count)
    try:
        yield
    finally:
        sys.settrace(earlier)


@dataclass(slots=True)
class _Marked:
    """A message while a template is applied: marks stand for its text, since a template's own text may have control tokens.

    The template sees tags of thoughts and white space around the parts as they are: it may cut at the one and strip the other.
    """

    role: str
    parts: list[tuple[str, str]]
    number: int

    @property
    def body(self) -> str:
        """The content that the template gets."""
        return "".join(
            f"{tag}{text[: len(text) - len(text.lstrip())]}{mark}{text[len(text.rstrip()) :] if mark else ''}"
            for (tag, text), mark in zip(self.parts, self.marks, strict=True)
        )

    @property
    def marks(self) -> list[str]:
        """The mark of each part, empty for a part without text."""
        return [
            f"\x02message {self.number}.{part}\x03" if text.strip() else ""
            for part, (_, text) in enumerate(self.parts)
        ]


def _split_at_marks(text: str, messages: Sequence[_Marked]) -> tuple[tuple[tuple[str, str], ...], str]:
    """Return the template's text before each part of the messages that it printed, with the part, and what follows them.

    Raises UnsupportedModel if it has left out more than thoughts.
    """
    turns = []
    for message in messages:
        for (_, own), mark in zip(message.parts, message.marks, strict=True):
            before, found, rest = text.partition(mark) if mark else ("", "", "")
            if found:
                turns.append((before, own.strip()))
                text = rest
            elif mark and mark == message.marks[-1]:
                raise UnsupportedModel("the model's chat template does not print every message as it is")
    return tuple(turns), text


def _plain_frame(system: str, messages: Sequence[tuple[str, str]], *, several_lines: bool) -> Frame:
    """Return the plain layout of messages: a question and its answer are a paragraph, and so is any other message."""
    roles = [role for role, _ in messages]
    before = [_plain_lead(role, roles[number - 1] if number else "") for number, role in enumerate(roles)]
    head = f"{system}{SEPARATOR}" if system else ""
    tail = ANSWER_LEAD if roles and roles[-1] == "user" else f"{SEPARATOR}{ANSWER_LEAD.lstrip()}"
    turns = tuple((lead, text) for lead, (_, text) in zip(before, messages, strict=True))
    return Frame(head, "", tail, chat=False, reply=ReplyFormat(one_line=not several_lines), turns=turns)


def _plain_lead(role: str, before: str) -> str:
    """Return the plain layout's text before a message of a role, after one of the role `before`."""
    if role == "assistant" and before == "user":
        return f"{ANSWER_LEAD} "
    lead = QUESTION_LEAD if role == "user" else f"{ANSWER_LEAD.lstrip()} " if role == "assistant" else ""
    return f"{SEPARATOR}{lead}" if before else lead


def control_tokens(tokenizer: Any) -> dict[int, str]:
    """Return a tokenizer's special tokens, and its added tokens that look like a marker, by their ids."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    markers = {
        n: token.content for n, token in added.items() if is_control(token.content, special=token.special)
    }
    return dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True)) | markers


def is_control(content: str, *, special: bool) -> bool:
    """Return whether an added token of this text controls the model, rather than being a word or white space."""
    return bool(content.strip()) and (special or not MARKER_SIGNS.isdisjoint(content))
