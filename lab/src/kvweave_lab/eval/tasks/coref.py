"""A document cut between a name and the sentence that refers back to it: "He ordered the soup"."""

from collections.abc import Sequence
from typing import NamedTuple

from kvweave_lab.eval.documents import AcrossCut, Draft, Related, Task, Together
from kvweave_lab.eval.world import DEV, HIDDEN, TEST, TRAIN, Phrases, World, variants


class Reference(NamedTuple):
    """A sentence with a name, one that refers to it, and the question that needs both."""

    named: Phrases
    referring: Phrases
    asked: Phrases


GUEST = Reference(
    named={
        TRAIN: variants(
            "The [next|second|other|new] guest was {k}.",
            "[Then|After a while|At last|Soon] they [greeted|met|saw|called] {k}.",
            "At the [door|table|counter] [stood|sat|was] {k}.",
            "[After that|Later] it was the turn of {k}.",
            "The last one to [arrive|come|sit down] was {k}.",
            "Everyone [looked at|waited for|knew] {k}.",
        ),
        DEV: ("The first one to arrive was {k}.",),
        TEST: ("Then it was the turn of {k}.", "The last guest was {k}."),
        HIDDEN: ("At the door they greeted {k}.",),
    },
    referring={
        TRAIN: variants(
            "{s} [ordered|asked for|chose|took|wanted|picked] the {v}.",
            "{s} [wanted to have|decided to order|asked to have|would rather have|was glad to get] the {v}.",
            "{s} [later|soon|at once] [ordered|asked for|took|picked] the {v}.",
        ),
        DEV: ("{s} decided to ask for the {v}.",),
        TEST: ("{s} wanted to order the {v}.", "{s} then chose the {v}."),
        HIDDEN: ("{s} then asked for the {v}.",),
    },
    asked={
        TRAIN: variants(
            "What was [ordered|taken|picked|wanted] by {k}?",
            "What did {k} [order|ask for|take|want|pick]?",
            "What was the [choice|order|wish] of {k}?",
            "Which [dish|thing|one] did {k} [take|want|pick]?",
            "What [did {k} decide|was ordered by {k}|did {k} get]?",
        ),
        DEV: ("What did {k} choose?",),
        TEST: ("Which thing did {k} order?", "What was chosen by {k}?"),
        HIDDEN: ("Which thing did {k} ask for?",),
    },
)

TOWN = Reference(
    named={
        TRAIN: variants(
            "The [road|path|train|river] then [leads|goes|comes] to {k}.",
            "The next [stop|place|town|village] is {k}.",
            "From there one [reaches|comes to|sees] {k}.",
            "[Not far away|Behind the hill|Further on] lies {k}.",
            "On the map one finds {k}.",
        ),
        DEV: ("The next place on the map is {k}.",),
        TEST: ("From there the road leads to {k}.", "The last stop is {k}."),
        HIDDEN: ("Not far from there lies {k}.",),
    },
    referring={
        TRAIN: variants(
            "[It|The place|This town] is [famous for|visited for|proud of|loved for] the {v}.",
            "The same place is [famous for|proud of|loved for] the {v}.",
            "This place is known for the {v}.",
            "[People|Many] [come here|know it|go there] for the {v}.",
        ),
        DEV: ("The same place is visited for the {v}.",),
        TEST: ("This place is famous for the {v}.", "The same place is known for the {v}."),
        HIDDEN: ("It is known for the {v}.",),
    },
    asked={
        TRAIN: variants(
            "What is {k} [famous for|known for|loved for|proud of]?",
            "For what do people [visit|love|praise] {k}?",
            "What makes people [visit|love] {k}?",
            "What do people [visit|love|praise] {k} for?",
            "For what is {k} [visited|loved|praised]?",
        ),
        DEV: ("For what is {k} famous?",),
        TEST: ("For what is {k} known?", "What do people know {k} for?"),
        HIDDEN: ("What has made {k} famous?",),
    },
)


def write_coref(
    world: World,
    *,
    cut: int = 2,
    whole: int = 1,
    people: Sequence[Reference] = (GUEST,),
    towns: Sequence[Reference] = (TOWN,),
    related: Related = AcrossCut,
) -> Draft:
    """Return `cut` pairs with the end of a chunk between them and `whole` inside one; the question is about a cut one.

    The kinds of a pair are those of `people` and those of `towns`. `related` makes the pieces of those with a cut.
    """
    draft = Draft()
    for number in range(cut + whole):
        town = world.rng.random() < 0.4
        kinds, name = (towns, world.town()) if town else (people, world.person())
        kind = kinds[0] if len(kinds) == 1 else world.rng.choice(kinds)  # one kind alone takes no draw
        value, pronoun = world.thing(), world.rng.choice(("He", "She"))
        first = world.phrase(kind.named).format(k=name)
        then = world.phrase(kind.referring).format(s=pronoun, v=value)
        is_cut = number < cut
        draft.refers[then] = name
        draft.belongs[then] = (value, name)
        draft.pieces.append(related(first, then) if is_cut else Together((first, then)))
        draft.ask("coref" if is_cut else "coref_whole", world.phrase(kind.asked).format(k=name), value)
    return draft


TASKS = (Task("coref", "exact_match", write_coref),)
