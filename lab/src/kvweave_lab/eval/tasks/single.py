"""One fact in a haystack: a 7-digit number, a UUID or a word (RULER's single needle).

The phrases of its facts, "the ATTRIBUTE of NAME is VALUE", are also those of other tasks.
"""

from kvweave_lab.eval.documents import Anywhere, Draft
from kvweave_lab.eval.world import DEV, HIDDEN, TEST, TRAIN, Phrases, World, variants

NUMBERS = (
    "access code", "room number", "ticket number", "badge number", "account number", "phone extension",
    "locker number", "order number", "parcel number", "member number", "vault code", "invoice number",
)  # fmt: skip
IDENTIFIERS = ("device id", "record id", "session id", "license key", "asset id")
WORDS = ("password", "code word", "nickname", "favorite word", "secret sign", "motto")

STATED: Phrases = {
    TRAIN: variants(
        "The {a} of {k} is {v}.",
        "[So the|And the|Here the] {a} [of|for|belonging to|given to|that goes with] {k} [is|reads|was|remains] {v}.",
        "The {a} [for|belonging to|given to|that goes with] {k} [is|reads|was|remains] {v}.",
        "{k} [has|got|was given|keeps|chose] the {a} {v}.",
        "[Somebody wrote|A note says|It was agreed|We know|People say|It turned out] that the {a} of {k} [is|was|reads] {v}.",
        "[Somebody wrote|A note says|We know|People say|It turned out] that {k} [has|got|uses] the {a} {v}.",
        "[The office|The manager|Somebody|The clerk] gave {k} the {a} {v}.",
        "[For|As for|In the case of] {k} the {a} is {v}.",
        "[The card|The file|The page|The entry] of {k} [shows|gives|has] the {a} {v}.",
        "[Please remember|Write down|Do not forget] the {a} of {k}: {v}.",
        "{k} [can be reached with|was told to use|is listed with] the {a} {v}.",
        "[According to the list|In the files|As far as we know], the {a} of {k} was {v}.",
        "The {a} that {k} uses is {v}.",
        "[On the card|In the book|In the notes] the {a} [of|for] {k} [is|reads] {v}.",
        "[They|We] [told|sent|handed] {k} the {a} {v}.",
    ),
    DEV: (
        "The {a} on record for {k} is {v}.",
        "According to the register, {k} has the {a} {v}.",
        "Note that {k} uses the {a} {v}.",
    ),
    TEST: (
        "The {a} assigned to {k} is {v}.",
        "Everyone knows that the {a} of {k} is {v}.",
        "In the register the {a} for {k} reads {v}.",
        "They gave {k} the {a} {v}.",
    ),
    HIDDEN: (
        "The {a} registered for {k} is {v}.",
        "It is said that {k} has the {a} {v}.",
        "On the list, the {a} of {k} is {v}.",
    ),
}

ASKED: Phrases = {
    TRAIN: variants(
        "What is the {a} of {k}?",
        "What is the {a} [belonging to|given to|used by] {k}?",
        "Which {a} [does {k} have|does {k} use|was assigned to {k}]?",
        "What {a} [does {k} have|was given to {k}]?",
        "[Tell me|Find|Look up|I need] the {a} of {k}.",
        "Find the {a} that belongs to {k}.",
        "What is the {a} that {k} uses?",
        "[Do you know|Do you remember|Do the notes give] the {a} of {k}?",
        "Under which {a} is {k} listed?",
        "[Could you|Please] [give|tell|find] me the {a} of {k}.",
        "What {a} [is on record for|is noted for|goes with] {k}?",
        "Which {a} [goes with|is noted for|did they give] {k}?",
    ),
    DEV: ("Which {a} belongs to {k}?", "Please give the {a} of {k}."),
    TEST: ("What is the {a} for {k}?", "Which {a} was given to {k}?", "Can you tell me the {a} of {k}?"),
    HIDDEN: ("Name the {a} of {k}.", "What {a} does {k} use?"),
}

NAME = "single"
METRIC = "words_match_all"
DIGITS = 7


def write(world: World) -> Draft:
    """Return one needle of one of three kinds, and the question about it."""
    kind = world.rng.choice(("number", "uuid", "word"))
    attributes = {"number": NUMBERS, "uuid": IDENTIFIERS, "word": WORDS}[kind]
    value = {"number": lambda: world.number(DIGITS), "uuid": world.uuid, "word": world.thing}[kind]()
    attribute, name = world.rng.choice(attributes), world.name()
    draft = Draft([Anywhere(world.phrase(STATED).format(a=attribute, k=name, v=value))])
    draft.ask(NAME, world.phrase(ASKED).format(a=attribute, k=name), value)
    return draft
