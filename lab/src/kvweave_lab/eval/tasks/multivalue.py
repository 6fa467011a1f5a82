"""Several values of one name, in different places; the question asks for all of them (RULER's multi-value needle)."""

from kvweave_lab.eval.documents import Draft, InOrder
from kvweave_lab.eval.world import DEV, HIDDEN, TEST, TRAIN, Phrases, World, variants

NAME = "multivalue"
METRIC = "words_match_all"
OWNERS = 3
VALUES = 2

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

ASKED: Phrases = {
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


def write(world: World, *, owners: int = OWNERS, values: int = VALUES) -> Draft:
    """Return `owners` people with `values` things each; the question asks for the first one's, in order of appearance."""
    draft = Draft()
    for _ in range(owners):
        owner = world.person()
        things = [world.thing() for _ in range(values)]
        draft.pieces.append(InOrder(tuple(world.phrase(OWNED).format(k=owner, v=thing) for thing in things)))
        draft.ask(NAME, world.phrase(ASKED).format(k=owner), *things)
    return draft
