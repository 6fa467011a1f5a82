"""One fact in a haystack: a 7-digit number, a UUID or a word (RULER's single needle)."""

from kvweave_lab.eval.attributes import ASKED, IDENTIFIERS, NUMBERS, STATED, WORDS
from kvweave_lab.eval.draft import Anywhere, Draft
from kvweave_lab.eval.world import World

NAME = "single"
METRIC = "words_match_all"
DIGITS = 7


def write(world: World) -> Draft:
    """One needle of one of three kinds, and the question about it."""
    kind = world.rng.choice(("number", "uuid", "word"))
    attributes = {"number": NUMBERS, "uuid": IDENTIFIERS, "word": WORDS}[kind]
    value = {"number": lambda: world.number(DIGITS), "uuid": world.uuid, "word": world.thing}[kind]()
    attribute, name = world.rng.choice(attributes), world.name()
    draft = Draft([Anywhere(world.phrase(STATED).format(a=attribute, k=name, v=value))])
    draft.ask(NAME, world.phrase(ASKED).format(a=attribute, k=name), value)
    return draft
