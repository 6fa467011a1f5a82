"""Long texts as tokens: scripts written out with natural text in between, and which replies are judged.

A text is decoded with teacher forcing: a wrong answer does not change what follows. Greedy decoding is still judged
correctly, because it counts as right only while every token is right.
"""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

from kvweave.models.prompt import ANSWER_LEAD, QUESTION_LEAD, SEPARATOR, PromptTemplate
from kvweave_lab.eval.longtext.tasks import LONG_TASKS, Script, Turn
from kvweave_lab.eval.world import Haystack, Passages, World, nouns

MIN_DISTANCE = 128
"""Tokens since the last mention of a value from which an answer is judged; nearer ones are in the recent window."""
_NATURAL = (30, 90)  # tokens of natural text in a turn
_WORD = re.compile(r"\w+")


@dataclass(frozen=True, slots=True)
class Reply:
    """Tokens `start` … `end` − 1 of a text, an answer to the text before; from `value_start` on they are the value.

    `distance` is the number of tokens since the last mention of the value, counted from the end of that passage.
    """

    start: int
    value_start: int
    end: int
    distance: int

    @property
    def is_far(self) -> bool:
        """Whether the evidence is outside the recent window."""
        return self.distance >= MIN_DISTANCE


@dataclass(frozen=True, slots=True)
class LongText:
    """Tokens of a whole text. The first `prompt_tokens` are the prompt, the others are decoded.

    `free_tokens`: how many tokens the model writes by itself after the prompt, before it is given the rest.
    """

    name: str
    task: str
    seed: int
    token_ids: tuple[int, ...]
    prompt_tokens: int
    replies: tuple[Reply, ...] = ()
    free_tokens: int = 0

    @property
    def decode_tokens(self) -> int:
        """Tokens after the prompt."""
        return len(self.token_ids) - self.prompt_tokens + self.free_tokens


def long_text(
    task: str,
    template: PromptTemplate,
    haystack: Haystack,
    split: str,
    *,
    seed: int,
    number: int,
    prompt_tokens: int,
    decode_tokens: int,
) -> LongText:
    """Return the text with this number of a kind.

    Equal arguments give equal texts. A text with fewer `decode_tokens` is the beginning of a longer one.
    """
    name = f"{task}/{split}/{prompt_tokens}/{seed}-{number}"
    rng = random.Random(name)
    script = LONG_TASKS[task](World(rng, split))
    writer = TextWriter(template, haystack, split, rng)
    ids, prompt, replies = writer.write(script, prompt_tokens, decode_tokens)
    return LongText(name, task, seed, tuple(ids), prompt, tuple(replies))


class TextWriter:
    """Writes scripts out as tokens of one tokenizer.

    Args:
        template: of the tokenizer.
        haystack: natural text; sentences that hold a value of the split are left out.
        split: the split that the values come from.
        rng: the source of every choice.
    """

    def __init__(self, template: PromptTemplate, haystack: Haystack, split: str, rng: random.Random) -> None:
        self._template, self._rng = template, rng
        self._passages = Passages(
            rng, haystack.without(nouns(split)), lambda text: len(template.tokenize(text))
        )
        self._adds_space = adds_leading_space(template)
        self._ids: list[int] = []
        self._last_mention: dict[str, int] = {}  # of each word, the token position after its passage
        self._replies: list[Reply] = []

    def write(
        self, script: Script, prompt_tokens: int, decode_tokens: int
    ) -> tuple[list[int], int, list[Reply]]:
        """Return the token ids, the number of prompt tokens, and the replies.

        The prompt is longer than asked for if its sentences need more. Exactly `decode_tokens` follow it.
        """
        self._ids, self._last_mention, self._replies = list(self._template.prefix_ids(None)), {}, []
        self._write_passage(script.opening, prompt_tokens - len(self._ids))
        prompt = len(self._ids)
        total = prompt + decode_tokens
        while len(self._ids) < total:
            turn = next(script.turns)
            self._write_passage(turn.statements, self._rng.randint(*_NATURAL))
            self._write_reply(turn)
        return self._ids[:total], prompt, [reply for reply in self._replies if reply.end <= total]

    def _write_passage(self, sentences: Sequence[str], tokens: int) -> None:
        """Write sentences in their order among natural ones, about `tokens` tokens in all."""
        own = sum(len(self._template.tokenize(text)) for text in sentences)
        natural, _ = self._passages.draw(max(0, tokens - own))
        places = sorted(self._rng.randint(0, len(natural)) for _ in sentences)
        texts = list(natural)
        for place, text in reversed(list(zip(places, sentences, strict=True))):
            texts.insert(place, text)
        if texts:
            self._add(" ".join(texts))
            self._ids += self._template.tokenize(SEPARATOR)

    def _write_reply(self, turn: Turn) -> None:
        if turn.asks:
            self._write_answer(turn)
        else:
            self._write_continuation(turn)
        self._ids += self._template.tokenize(SEPARATOR)

    def _write_answer(self, turn: Turn) -> None:
        self._add(QUESTION_LEAD)
        self._add(turn.lead)
        self._add(ANSWER_LEAD)
        steps = turn.reply[: len(turn.reply) - len(turn.value)].rstrip()
        start, distance = len(self._ids), len(self._ids) - self._last_mention[turn.value]
        if steps:
            self._add(self._continued(steps))
        value_start = len(self._ids)
        self._add(self._continued(turn.value))
        self._replies.append(Reply(start, value_start, len(self._ids), distance))

    def _write_continuation(self, turn: Turn) -> None:
        """Write a sentence whose middle is the reply; it is tokenized as a whole, since nothing divides it."""
        text = turn.lead + turn.reply + turn.rest
        ids = self._template.tokenize(text)
        first, last = len(turn.lead), len(turn.lead) + len(turn.reply)
        offsets = self._template.token_offsets(self._template.with_separator(ids), text)[: len(ids)]
        inside = [place for place, (start, end) in enumerate(offsets) if end > first and start < last]
        at = len(self._ids)
        start, end = at + inside[0], at + inside[-1] + 1
        self._replies.append(Reply(start, start, end, start - self._last_mention[turn.value]))
        self._add(text)

    def _add(self, text: str) -> None:
        self._ids += self._template.tokenize(text)
        self._last_mention |= dict.fromkeys(_WORD.findall(text), len(self._ids))

    def _continued(self, text: str) -> str:
        """Return a text as it is spelled after another word."""
        return text if self._adds_space else " " + text


def adds_leading_space(template: PromptTemplate) -> bool:
    """Return whether a word has the same tokens alone as after another word."""
    one, both = template.tokenize("one"), template.tokenize("one two")
    return both == (*one, *template.tokenize("two"))
