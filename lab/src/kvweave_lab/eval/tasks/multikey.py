"""One fact among similar ones: the same attribute of several names (RULER's multi-key needle)."""

from kvweave_lab.eval.documents import Anywhere, Draft
from kvweave_lab.eval.tasks.single import ASKED, NUMBERS, STATED, WORDS
from kvweave_lab.eval.world import World

NAME = "multikey"
METRIC = "words_match_all"
KEYS = 4
DIGITS = 7


def write(world: World, *, keys: int = KEYS, digits: int = DIGITS) -> Draft:
    """Return `keys` needles that differ in name and value only; the question asks for the first one."""
    numeric = world.rng.random() < 0.5
    attribute = world.rng.choice(NUMBERS if numeric else WORDS)
    draft = Draft()
    for _ in range(keys):
        name, value = world.name(), world.number(digits) if numeric else world.thing()
        draft.pieces.append(Anywhere(world.phrase(STATED).format(a=attribute, k=name, v=value)))
        draft.ask(NAME, world.phrase(ASKED).format(a=attribute, k=name), value)
    return draft
