"""Pairs of questions, seeded: paraphrases that should share an answer, look-alikes that must not."""

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from kvweave_lab.eval.lookalikes.pool import Family, families
from kvweave_lab.eval.lookalikes.values import MOMENTS, NAMES, NUMBERS, Value, another, value
from kvweave_lab.eval.world import World

PARAPHRASE: Final = "paraphrase"
BY_SLOT: Final[Mapping[str, frozenset[str]]] = {"renamed": NAMES, "renumbered": NUMBERS, "redated": MOMENTS}
EXCHANGED: Final = "exchanged"
BY_PHRASING: Final = ("negated", "compared", "asked", "topic")
LOOKALIKES: Final = (*BY_SLOT, EXCHANGED, *BY_PHRASING)
"""Kinds of look-alikes: another name, number or date; roles exchanged; negation, direction, question word, or topic
changed."""

_TRIES: Final = 50  # for a pair that was not drawn yet


@dataclass(frozen=True, slots=True)
class Pair:
    """A question in the bank, one that is asked, what they are to each other, and the family they come from."""

    kind: str
    family: str
    cache_hit: str
    asked: str

    @property
    def is_paraphrase(self) -> bool:
        """Whether both ask the same."""
        return self.kind == PARAPHRASE


def make_pairs(split: str, paraphrases: int, lookalikes: int, seed: int) -> list[Pair]:
    """So many pairs of different questions; equal arguments give equal pairs.

    Kinds of look-alikes come in equal numbers, families of a kind by turns. Raises InvalidRequest for a split
    without a pool.
    """
    rng = random.Random(f"{split} {seed}")
    drawn: set[frozenset[str]] = set()
    kinds = [PARAPHRASE] * paraphrases + [LOOKALIKES[n % len(LOOKALIKES)] for n in range(lookalikes)]
    turns = {kind: _turns(kind, split, rng) for kind in dict.fromkeys(kinds)}
    pairs = []
    for kind in kinds:
        for _ in range(_TRIES):
            family = next(turns[kind])
            pair = _pair(kind, family, World(rng, split))
            texts = frozenset((pair.cache_hit, pair.asked))
            if len(texts) == 2 and texts not in drawn:
                break
        else:
            raise AssertionError(f"the pool of {split} has too few pairs of kind {kind}")
        drawn.add(texts)
        pairs.append(pair)
    return pairs


def _turns(kind: str, split: str, rng: random.Random) -> Iterator[Family]:
    usable = [family for family in families(split) if _offers(family, kind)]
    while True:
        rng.shuffle(usable)
        yield from usable


def _offers(family: Family, kind: str) -> bool:
    if kind == PARAPHRASE:
        return True
    if kind in BY_SLOT:
        return any(slot in BY_SLOT[kind] for slot in family.slots.values())
    if kind == EXCHANGED:
        return bool(family.exchange) or "reversed" in family.unlike
    return kind in family.unlike


def _pair(kind: str, family: Family, world: World) -> Pair:
    rng = world.rng
    values = {slot: value(of, world) for slot, of in family.slots.items()}
    cache_hit, other = rng.sample(list(family.alike), 2)
    if kind != PARAPHRASE and rng.random() < 0.5:
        other = cache_hit  # the words alike, one of them changed: the hardest
    changed = dict(values)
    if kind in BY_SLOT:
        slot = rng.choice([slot for slot, of in family.slots.items() if of in BY_SLOT[kind]])
        changed[slot] = another(family.slots[slot], values[slot], world)
    elif kind == EXCHANGED and family.exchange:
        one, two = tuple(family.exchange)
        changed[one], changed[two] = values[two], values[one]
    elif kind != PARAPHRASE:
        other = rng.choice(list(family.unlike["reversed" if kind == EXCHANGED else kind]))
    return Pair(kind, family.name, _filled(cache_hit, values, rng), _filled(other, changed, rng))


def _filled(phrasing: str, values: Mapping[str, Value], rng: random.Random) -> str:
    said = phrasing.format(**{slot: rng.choice(spellings) for slot, spellings in values.items()})
    return said[0].upper() + said[1:]
