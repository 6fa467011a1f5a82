"""A tokenizer's chat template: its own text around a prompt's parts, where answers end, and how thoughts are marked.

With a chat template, a prompt's control tokens are those that the template writes, BOS included: one that writes none gets
none. transformers' `apply_chat_template` and vLLM do the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass
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

    With earlier messages, `lead` stands before the first of them, and `between` before each other one and the question.
    """

    head: str
    lead: str
    tail: str
    chat: bool
    reply: ReplyFormat
    between: tuple[str, ...] = ()


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
        earlier: Sequence[str] = (),
    ) -> Frame:
        """Return the text around the parts of a prompt after an instruction, the default one if it is None.

        `think` lets a reasoning model think before it answers, if its template has a switch for that. Without a chat
        template, the reply is one line unless `several_lines`. `earlier` are the roles of messages before the question.

        Raises UnsupportedModel if the template leaves a message out, InvalidRequest if it refuses these roles.
        """
        system, roles = DEFAULT_SYSTEM if system is None else system, [*earlier, "user"]
        if not self.exists:
            return _plain_frame(system, roles, several_lines=several_lines)
        return self._frame(system, roles, think=think)

    def chat_frame(self, roles: Sequence[str], *, think: bool = False) -> Frame:
        """Return the text around the messages of a chat without chunks and questions; the first may be a system message.

        Raises as `frame`.
        """
        if not self.exists:
            return _plain_frame("", roles, several_lines=False)
        marks = _marks(len(roles))
        first = int(roles[0] == "system")
        turns = list(zip(roles[first:], marks[first:], strict=True))
        text = self.text(turns, marks[0] if first else "", think=think)
        head, *between, tail = _around(text, marks)
        return Frame(head, "", tail, chat=True, reply=self.reply(tail, think=think), between=tuple(between))

    def text(self, messages: Sequence[tuple[str, str]], system: str = "", *, think: bool = False) -> str:
        """Return messages, each role and text, as the template prints them; raises InvalidRequest if it refuses them."""
        try:
            return self._text(
                system, [{"role": role, "content": text} for role, text in messages], think=think
            )
        except Exception as error:  # templates raise whatever their author chose
            roles = ", ".join(role for role, _ in messages)
            raise InvalidRequest(
                f"the model's chat template refuses messages of the roles {roles or 'system'} in this order: {error}"
            ) from error

    def _frame(self, system: str, roles: Sequence[str], *, think: bool) -> Frame:
        """Return the text around chunks, earlier messages and a question."""
        marks = _marks(len(roles))
        bodies = [
            f"{QUESTION_LEAD if role == 'user' else ''}{mark}"
            for role, mark in zip(roles, marks, strict=True)
        ]
        bodies[0] = _CHUNKS_MARK + bodies[0]
        text = self.text(list(zip(roles, bodies, strict=True)), system, think=think)
        head, lead, *between, tail = _around(text, [_CHUNKS_MARK, *marks])
        return Frame(head, lead, tail, chat=True, reply=self.reply(tail, think=think), between=tuple(between))

    def between_turns(self, system: str | None) -> str:
        """Return the text between an answer and the next turn."""
        if not self.exists:
            return SEPARATOR
        turns = [
            {"role": "user", "content": _QUESTION_MARK},
            {"role": "assistant", "content": _ANSWER_MARK},
            {"role": "user", "content": _CHUNKS_MARK},
        ]
        text = self._text(DEFAULT_SYSTEM if system is None else system, turns)
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


def _marks(count: int) -> list[str]:
    """Return texts that stand for messages."""
    return [f"\x02message {number}\x03" for number in range(count)]


def _around(text: str, marks: Sequence[str]) -> list[str]:
    """Return the text before each mark and after the last one; raises UnsupportedModel if a mark is not there."""
    around = []
    for mark in marks:
        before, found, text = text.partition(mark)
        if not found:
            raise UnsupportedModel("the model's chat template does not print every message as it is")
        around.append(before)
    return [*around, text]


def _plain_frame(system: str, roles: Sequence[str], *, several_lines: bool) -> Frame:
    """Return the plain layout of messages: a question and its answer are a paragraph, and so is any other message."""
    before = [_plain_lead(role, roles[number - 1] if number else "") for number, role in enumerate(roles)]
    head = f"{system}{SEPARATOR}" if system else ""
    lead, *between = before or [""]
    tail = ANSWER_LEAD if roles and roles[-1] == "user" else f"{SEPARATOR}{ANSWER_LEAD.lstrip()}"
    reply = ReplyFormat(one_line=not several_lines)
    return Frame(head, lead, tail, chat=False, reply=reply, between=tuple(between))


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
