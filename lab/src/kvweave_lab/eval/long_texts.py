"""Long texts: scripts of each kind, written out as tokens with natural text in between, and the replies that are judged.

A script is plain sentences: an opening, then turns without end, each ending in a value stated long before. A text is
decoded with teacher forcing: a wrong answer does not change what follows. Greedy decoding is still judged correctly,
because it counts as right only while every token is right.
"""

import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from kvweave.models.prompt import ANSWER_LEAD, QUESTION_LEAD, SEPARATOR, PromptTemplate
from kvweave_lab.eval.tasks import chains, needles
from kvweave_lab.eval.world import Haystack, Passages, World, nouns


@dataclass(frozen=True, slots=True)
class Turn:
    """New sentences, then one that ends in a value stated long before.

    Attributes:
        statements: sentences with new facts; natural text is put between them.
        asks: whether `lead` is a question; otherwise it is the beginning of a sentence.
        lead: the text before the reply.
        reply: the continuation that the model should give.
        value: the end of the reply, which is judged: one word that was stated before.
        rest: the end of the sentence after the reply.
    """

    statements: tuple[str, ...]
    asks: bool
    lead: str
    reply: str
    value: str
    rest: str = ""


@dataclass(frozen=True, slots=True)
class Script:
    """Sentences of the prompt, and an endless iterator of turns."""

    opening: tuple[str, ...]
    turns: Iterator[Turn]


# Reasoning: what a place holds follows from another place that was described many steps before.

CHAINS = 8
"""Chains that grow in turn; a step depends on one this many steps back."""


def write_reasoning(world: World) -> Script:
    """Write CHAINS places with their contents; each turn adds a place to one chain and concludes what it holds."""
    place = world.rng.choice(chains.PLACES)
    held = [(world.name(), world.thing()) for _ in range(CHAINS)]
    opening = []
    for name, value in held:
        opening.append(chains.capitalized(world.phrase(chains.NAMED).format(p=place, k=name)))
        opening.append(world.phrase(chains.HOLDS).format(v=value))
    return Script(tuple(opening), _reasoning_turns(world, place, held))


def _reasoning_turns(world: World, place: str, held: list[tuple[str, str]]) -> Iterator[Turn]:
    order = list(range(CHAINS))
    world.rng.shuffle(order)
    while True:
        for number in order:
            before, value = held[number]
            name = world.name()
            held[number] = name, value
            copied = chains.capitalized(world.phrase(chains.COPIES).format(p=place, k=name, j=before))
            asked = world.phrase(chains.CONTENT_ASKED).format(p=place, k=name)
            yield Turn((copied,), asks=True, lead=asked, reply=f"{before}, {value}", value=value)


# Dialogue: each turn states a new fact and asks for one from an early turn, once.

PENDING_FACTS = 6
"""Facts that were stated and not asked for yet."""

Fact = tuple[str, str, str]
"""Attribute, owner, value."""


def write_dialogue(world: World) -> Script:
    """Write PENDING_FACTS facts; each turn adds one and asks for one of the oldest pending ones."""
    facts = [_fact(world) for _ in range(PENDING_FACTS)]
    return Script(tuple(_fact_sentence(world, fact) for fact in facts), _dialogue_turns(world, facts))


def _dialogue_turns(world: World, pending: list[Fact]) -> Iterator[Turn]:
    while True:
        attribute, owner, value = pending.pop(world.rng.randrange(PENDING_FACTS // 2))
        pending.append(_fact(world))
        asked = world.phrase(needles.ASKED).format(a=attribute, k=owner)
        stated = _fact_sentence(world, pending[-1])
        yield Turn((stated,), asks=True, lead=asked, reply=value, value=value)


def _fact(world: World) -> Fact:
    return world.rng.choice(needles.NUMBERS), world.name(), world.number(world.rng.randint(3, 5))


def _fact_sentence(world: World, fact: Fact) -> str:
    attribute, owner, value = fact
    return world.phrase(needles.STATED).format(a=attribute, k=owner, v=value)


# Story: characters with a treasure each, who return long after their last appearance.

CAST, LARGEST_CAST = 8, 24
"""Characters at the beginning, and at most. Each has a treasure of its own, and a split has few treasures."""


def write_story(world: World) -> Script:
    """Write CAST characters; each turn brings one of the longest absent back, and sometimes a new one."""
    cast = [(world.person(), world.thing()) for _ in range(CAST)]
    return Script(tuple(_treasure(world, person, thing) for person, thing in cast), _story_turns(world, cast))


def _story_turns(world: World, cast: list[tuple[str, str]]) -> Iterator[Turn]:
    while True:
        person, thing = cast.pop(world.rng.randrange(CAST // 2))
        cast.append((person, thing))
        introduced: tuple[str, ...] = ()
        if len(cast) < LARGEST_CAST and world.rng.random() < 0.5:
            cast.append((world.person(), world.thing()))
            introduced = (_treasure(world, *cast[-1]),)
        lead, rest = world.phrase(chains.COLLECTS).split("{v}")
        yield Turn(introduced, asks=False, lead=lead.format(p=person), reply=thing, value=thing, rest=rest)


def _treasure(world: World, person: str, thing: str) -> str:
    return world.phrase(chains.COLLECTS).format(p=person, v=thing)


LONG_TASKS: Mapping[str, Callable[[World], Script]] = MappingProxyType(
    {"reasoning": write_reasoning, "dialogue": write_dialogue, "story": write_story}
)
"""Every kind of long text by name, in table order."""


# Texts: a script as tokens.

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
