"""Facts in a haystack: one, one among similar ones, several of one name, two in one question (RULER's needles).

Most facts are "the ATTRIBUTE of NAME is VALUE"; other tasks use these phrases too.
"""

from kvweave_lab.eval.documents import Anywhere, Draft, InOrder, Task
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


def write_single(world: World) -> Draft:
    """Return one needle of one of three kinds, and the question about it."""
    kind = world.rng.choice(("number", "uuid", "word"))
    attributes = {"number": NUMBERS, "uuid": IDENTIFIERS, "word": WORDS}[kind]
    value = {"number": lambda: world.number(7), "uuid": world.uuid, "word": world.thing}[kind]()
    attribute, name = world.rng.choice(attributes), world.name()
    draft = Draft([Anywhere(world.phrase(STATED).format(a=attribute, k=name, v=value))])
    draft.ask("single", world.phrase(ASKED).format(a=attribute, k=name), value)
    return draft


def write_multikey(world: World, *, keys: int = 4, digits: int = 7) -> Draft:
    """Return `keys` needles that differ in name and value only; the question asks for the first one."""
    numeric = world.rng.random() < 0.5
    attribute = world.rng.choice(NUMBERS if numeric else WORDS)
    draft = Draft()
    for _ in range(keys):
        name, value = world.name(), world.number(digits) if numeric else world.thing()
        draft.pieces.append(Anywhere(world.phrase(STATED).format(a=attribute, k=name, v=value)))
        draft.ask("multikey", world.phrase(ASKED).format(a=attribute, k=name), value)
    return draft


OWNED: Phrases = {
    TRAIN: variants(
        "{k} owns a {v}.",
        "[It turned out that |They say |Everybody knows that |By then |Of course ]{k} [owns|has|bought|got|keeps] a {v}.",
        "{k} [has|bought|got|keeps] a {v}.",
        "One day {k} [brought home|found|picked up] a {v}.",
        "Later {k} also [bought|got|wanted] a {v}.",
        "[Somebody|A friend|An uncle] gave {k} a {v}.",
        "[Among the things of|In the house of|In the room of] {k} [there is|they found|one sees] a {v}.",
        "The [belongings|possessions] of {k} include a {v}.",
        "For [many|some] years {k} has had a {v}.",
        "[In the kitchen|At work|In a chest|Upstairs|Among other things] {k} [has|keeps|got] a {v}.",
        "[In the morning|At the market|In the summer|Before that] {k} [bought|got|found] a {v}.",
        "[It is clear|It was no secret|One hears] that {k} [has|owns|bought] a {v}.",
    ),
    DEV: ("They say that {k} has a {v}.", "The things of {k} include a {v}."),
    TEST: ("It is known that {k} owns a {v}.", "In the end {k} bought a {v}.", "At home {k} has a {v}."),
    HIDDEN: ("People say that {k} owns a {v}.", "One day {k} bought the {v}."),
}

OWNED_ASKED: Phrases = {
    TRAIN: variants(
        "What [belongs to {k}|is owned by {k}|are the belongings of {k}]?",
        "Which things [does {k} own|belong to {k}|are owned by {k}]?",
        "[Name|List|Tell me] all things [that {k} owns|that belong to {k}|of {k}].",
        "What does {k} [keep at home|call his own|possess]?",
        "What [things |all ]does {k} [possess|have at home]?",
        "What [has {k} got|did {k} bring home|did {k} get]?",
        "Which [objects|belongings] does {k} [have|own|keep]?",
        "[Say|I want to know] [what|which things] {k} [has|owns|got].",
    ),
    DEV: ("Tell me which things {k} owns.",),
    TEST: ("What does {k} own?", "Which things does {k} have?"),
    HIDDEN: ("Name the belongings of {k}.",),
}


def write_multivalue(world: World, *, owners: int = 3, values: int = 2) -> Draft:
    """Return `owners` people with `values` things each; the question asks for the first one's, in order of appearance."""
    draft = Draft()
    for _ in range(owners):
        owner = world.person()
        things = [world.thing() for _ in range(values)]
        draft.pieces.append(InOrder(tuple(world.phrase(OWNED).format(k=owner, v=thing) for thing in things)))
        draft.ask("multivalue", world.phrase(OWNED_ASKED).format(k=owner), *things)
    return draft


TWO_ASKED: Phrases = {
    TRAIN: variants(
        "What are the {a}s [of|belonging to|given to] {j} and {k}?",
        "Which {a}s do {j} and {k} [have|use]?",
        "[Tell me|Look up|I need] the {a}s of {j} and {k}.",
        "Find the {a}s that belong to {j} and {k}.",
        "What is the {a} of {j} and that of {k}?",
    ),
    DEV: ("Please give the {a}s of {j} and {k}.",),
    TEST: ("What are the {a}s for {j} and {k}?", "Do you know the {a}s of {j} and {k}?"),
    HIDDEN: ("Which {a}s belong to {j} and {k}?",),
}


def write_multiquery(world: World, *, keys: int = 4, digits: int = 5) -> Draft:
    """Return `keys` needles that differ in name and value; each question asks for two of them."""
    attribute = world.rng.choice(NUMBERS)
    facts = [(world.name(), world.number(digits)) for _ in range(keys)]
    draft = Draft()
    for name, value in facts:
        draft.pieces.append(Anywhere(world.phrase(STATED).format(a=attribute, k=name, v=value)))
    for _ in range(keys // 2):
        (j, v), (k, w) = world.rng.sample(facts, 2)
        text = world.phrase(TWO_ASKED).format(a=attribute, j=j, k=k)
        draft.ask("multiquery", text, v, w, reply=f"{j} {v}, {k} {w}")
    return draft


TASKS = (
    Task("single", "words_match_all", write_single),
    Task("multikey", "words_match_all", write_multikey),
    Task("multivalue", "words_match_all", write_multivalue),
    Task("multiquery", "words_match_all", write_multiquery),
)
