"""A script becomes tokens: natural text between its sentences, as many turns as fit, and which answers count.

A text is taught or decoded as it stands here, a wrong answer does not change what follows (teacher forcing): whether
the greedy answer is right can be told all the same, since it is as long as it is right. Knows nothing of models.
"""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

from kvweave.models.prompt import ANSWER_LEAD, QUESTION_LEAD, SEPARATOR, PromptTemplate
from kvweave_lab.eval.haystack import Haystack, Passages
from kvweave_lab.eval.longtext import LONG_TASKS
from kvweave_lab.eval.longtext.script import Script, Turn
from kvweave_lab.eval.splits import nouns
from kvweave_lab.eval.world import World

MIN_DISTANCE = 128
"""Tokens between an answer and the last mention of its value below which it is not judged: the recent window sees it."""
_NATURAL = (30, 90)  # tokens of natural text in a turn
_WORD = re.compile(r"\w+")


@dataclass(frozen=True, slots=True)
class Reply:
    """Tokens `start` … `end` − 1 of a text answer what stands before; from `judged` on they are the value.

    `distance`: tokens since the value was last said, counted from the end of that passage.
    """

    start: int
    judged: int
    end: int
    distance: int

    @property
    def far(self) -> bool:
        """Whether the evidence lies outside the recent window."""
        return self.distance >= MIN_DISTANCE


@dataclass(frozen=True, slots=True)
class LongText:
    """Tokens of a whole text, the first `prompt_tokens` of which are the prompt; the others are decoded.

    `free_tokens`: how many tokens the model writes by itself behind the prompt, before it is given the rest.
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
        """Tokens behind the prompt."""
        return len(self.token_ids) - self.prompt_tokens + self.free_tokens


class Teller:
    """Writes scripts out as tokens of one tokenizer.

    Args:
        template: of the tokenizer.
        haystack: natural text; sentences that hold a value of the split are left out.
        split: whose values these are.
        rng: the source of every choice.
    """

    def __init__(self, template: PromptTemplate, haystack: Haystack, split: str, rng: random.Random) -> None:
        self._template, self._rng = template, rng
        self._passages = Passages(
            rng, haystack.without(nouns(split)), lambda text: len(template.text_ids(text))
        )
        self._spaced = spaces_by_itself(template)
        self._ids: list[int] = []
        self._said: dict[str, int] = {}
        self._replies: list[Reply] = []

    def tell(
        self, script: Script, prompt_tokens: int, decode_tokens: int
    ) -> tuple[list[int], int, list[Reply]]:
        """Token ids, how many of them are the prompt's (some more than asked, if its sentences need it), and the replies.

        There are exactly `decode_tokens` behind the prompt.
        """
        self._ids, self._said, self._replies = list(self._template.prefix_ids(None)), {}, []
        self._tell(script.opening, prompt_tokens - len(self._ids))
        prompt = len(self._ids)
        whole = prompt + decode_tokens
        while len(self._ids) < whole:
            turn = next(script.turns)
            self._tell(turn.told, self._rng.randint(*_NATURAL))
            self._reply(turn)
        return self._ids[:whole], prompt, [reply for reply in self._replies if reply.end <= whole]

    def _tell(self, sentences: Sequence[str], tokens: int) -> None:
        """Sentences in their order among natural ones, about `tokens` tokens in all."""
        own = sum(len(self._template.text_ids(text)) for text in sentences)
        natural, _ = self._passages.draw(max(0, tokens - own))
        places = sorted(self._rng.randint(0, len(natural)) for _ in sentences)
        texts = list(natural)
        for place, text in reversed(list(zip(places, sentences, strict=True))):
            texts.insert(place, text)
        if texts:
            self._add(" ".join(texts))
            self._ids += self._template.text_ids(SEPARATOR)

    def _reply(self, turn: Turn) -> None:
        if turn.asks:
            self._add(QUESTION_LEAD)
            self._add(turn.lead)
            self._add(ANSWER_LEAD)
            steps = turn.reply[: len(turn.reply) - len(turn.value)].rstrip()
            start, distance = len(self._ids), len(self._ids) - self._said[turn.value]
            if steps:
                self._add(self._behind(steps))
            judged = len(self._ids)
            self._add(self._behind(turn.value))
            self._replies.append(Reply(start, judged, len(self._ids), distance))
        else:
            self._say_on(turn)
        self._ids += self._template.text_ids(SEPARATOR)

    def _say_on(self, turn: Turn) -> None:
        """A sentence whose middle is the reply: tokenized as a whole, since nothing divides it."""
        text = turn.lead + turn.reply + turn.rest
        ids = self._template.text_ids(text)
        first, last = len(turn.lead), len(turn.lead) + len(turn.reply)
        offsets = self._template.align(self._template.framed(ids), text)[: len(ids)]
        inside = [place for place, (start, end) in enumerate(offsets) if end > first and start < last]
        at = len(self._ids)
        start, end = at + inside[0], at + inside[-1] + 1
        self._replies.append(Reply(start, start, end, start - self._said[turn.value]))
        self._add(text)

    def _add(self, text: str) -> None:
        self._ids += self._template.text_ids(text)
        self._said |= dict.fromkeys(_WORD.findall(text), len(self._ids))

    def _behind(self, text: str) -> str:
        return text if self._spaced else " " + text


def spaces_by_itself(template: PromptTemplate) -> bool:
    """Whether a word alone has the tokens that it has behind another one."""
    one, both = template.text_ids("one"), template.text_ids("one two")
    return both == (*one, *template.text_ids("two"))


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
    """The text with this number of a kind: a function of its arguments, a shorter one the beginning of a longer one."""
    name = f"{task}/{split}/{prompt_tokens}/{seed}-{number}"
    rng = random.Random(name)
    script = LONG_TASKS[task](World(rng, split))
    teller = Teller(template, haystack, split, rng)
    ids, prompt, replies = teller.tell(script, prompt_tokens, decode_tokens)
    return LongText(name, task, seed, tuple(ids), prompt, tuple(replies))
