"""The lists of words that `veto` goes by, in classes."""

import re
from collections.abc import Mapping
from itertools import combinations
from typing import Final


def classes(text: str) -> Mapping[str, str]:
    """Return each word of lines "class: word word" with its class."""
    lines = (line.partition(":") for line in text.strip().splitlines())
    return {word: name.strip() for name, _, words in lines for word in words.split()}


ORDER: Final = classes("""
1: first earliest initial initially
last: last final latest lastly
""")
SEASONS: Final = frozenset("spring summer autumn fall winter".split())
SCOPE: Final = classes("""
all: all whole entire total altogether together everybody everyone everything full
each: each every apiece
per: per
only: only just solely alone
some: some any few
half: half partly
""")
DIRECTION: Final = classes(
    """
more: more most highest high higher greatest greater largest larger large biggest bigger big longest longer long heaviest heavier best
    better fastest faster tallest taller deepest steepest thickest oldest older loudest strongest warmest hottest many much max
    maximum faster taller deeper steeper thicker louder stronger warmer hotter
less: less least fewest fewer lowest low lower smallest smaller small shortest shorter short lightest lighter worst worse slowest slower
    thinnest youngest younger quietest weakest coldest coolest little few min minimum cheapest cheaper
    slower thinner younger quieter weaker colder cooler
""".replace("\n    ", " ")
)
MEASURED: Final = classes("""
price: price cost fee fare charge charged expensive cheap pay paid
weight: weight weigh weighs heavy
length: length long
height: height high tall
width: width wide broad
depth: depth deep
thickness: thickness thick diameter
size: size large big
age: age old
colour: colour color shade hue
speed: speed fast quick pace
temperature: temperature hot warm cold
duration: duration minutes hours days weeks
frequency: often frequency
count: number count many quantity
distance: distance far
pressure: pressure bar
volume: volume loud litres capacity
shape: shape
material: material fabric made
name: name called
""")
UNIT_NAMES: Final = classes("""
millimetre: mm
centimetre: cm
metre: m meter
km: km kilometre kilometer
gram: g
milligram: mg
millilitre: ml
litre: l liter
kilowatt: kw
degree: °c
""")
UNITS: Final = frozenset(
    "millimetre centimetre metre km inch mile hectare gram kg milligram tonne litre millilitre second minute hour day week month quarter year "
    "term night percent degree bar watt kilowatt kwh mbit gb mb euro pound dollar page line row word spoonful tablet drop dose pack packet box "
    "time visit lap piece".split()
)
OPPOSED: Final = tuple(
    tuple(pair.split("/"))
    for pair in (
        "before/after before/once until/after until/once until/since if/unless when/unless next/last next/previous first/next to/from with/without "
        "over/under above/below above/beneath front/behind left/right inside/outside for/against lend/borrow buy/sell bring/take start/stop "
        "start/end begin/end open/close arrive/leave come/go give/get accept/refuse like/dislike win/lose rise/fall add/cut add/remove "
        "deposit/withdrawal entrance/exit full/empty easy/hard early/late safe/dangerous upload/download and/or may/must can/must old/new hot/cool warm/cold"
    ).split()
)
OPPOSED_PARTICLES: Final = (
    *(("in", "out"), ("into", "from"), ("up", "down"), ("on", "off")),
    *combinations(("who", "when", "where", "why", "how"), 2),
)
"""Opposed only between questions that have most words in common."""
NEGATIONS: Final = frozenset(
    "not no never none nobody nothing without neither nor hardly unless except excluding apart".split()
)
GENERIC: Final = frozenset(
    "do have get make take give put go come be say tell know find use need want kind sort type thing way name please exactly current "
    "currently actually now there then also part our my we i you it one person people somebody someone".split()
)
TITLES: Final = frozenset("mr mrs ms miss dr prof professor uncle aunt auntie kw kwh ok".split())
SENTENCE_START: Final = re.compile(r"(?:^|(?<=[.?!:] ))[^\W\d_]+")
ONE: Final = re.compile(r"(?<![\d.,:/-])1(?![\d.,:/-])")
CONDITIONS: Final = frozenset("if unless while although though except without provided".split())
COUNTED: Final = frozenset("many much number amount count quantity".split())
ASKING: Final = ("who", "whom", "whose", "what", "which", "when", "where", "why", "how")
ASKED: Final = re.compile(rf"\b(?:{'|'.join(ASKING)}|whether|if)\b", re.IGNORECASE)
NOUNS_ASKED: Final = classes("""
time: time date day month year moment hour deadline point when weekday
place: place spot location whereabouts address where
reason: reason cause purpose why
manner: way means method manner procedure
""")
HOW: Final = {"many": "count", "much": "amount", "often": "frequency", "long": "long", "come": "reason"}
EMPTY: Final = frozenset("do have please exactly current currently actually now there then also".split())
PLACING: Final = frozenset(
    "before after until since from towards without behind under below above beneath against".split()
)
