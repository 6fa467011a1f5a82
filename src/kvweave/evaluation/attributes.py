"""Facts of the form "the ATTRIBUTE of NAME is VALUE", which several tasks tell and ask about."""

from kvweave.evaluation.splits import DEV, HIDDEN, TEST, TRAIN, Phrases

NUMBERS = (
    "access code", "room number", "ticket number", "badge number", "account number", "phone extension",
    "locker number", "order number", "parcel number", "member number", "vault code", "invoice number",
)  # fmt: skip
IDENTIFIERS = ("device id", "record id", "session id", "license key", "asset id")
WORDS = ("password", "code word", "nickname", "favorite word", "secret sign", "motto")

STATED: Phrases = {
    TRAIN: (
        "The {a} of {k} is {v}.",
        "The {a} for {k} is {v}.",
        "For {k} the {a} is {v}.",
        "It was agreed that the {a} of {k} should be {v}.",
        "Somebody wrote that {k} has the {a} {v}.",
        "In the files {k} is listed with the {a} {v}.",
        "Please remember the {a} of {k}: {v}.",
        "The card of {k} shows the {a} {v}.",
        "{k} can be reached with the {a} {v}.",
        "We know that the {a} belonging to {k} is {v}.",
        "The office gave {k} the {a} {v}.",
        "A note says the {a} of {k} reads {v}.",
        "The {a} that {k} uses is {v}.",
        "{k} was told to use the {a} {v}.",
        "According to the list, the {a} of {k} was {v}.",
        "{k} has the {a} {v}.",
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
    TRAIN: (
        "What is the {a} of {k}?",
        "Which {a} does {k} have?",
        "What {a} was given to {k}?",
        "Tell me the {a} of {k}.",
        "Find the {a} that belongs to {k}.",
        "What is the {a} that {k} uses?",
        "Do you know the {a} of {k}?",
        "Under which {a} is {k} listed?",
    ),
    DEV: ("Which {a} belongs to {k}?", "Please give the {a} of {k}."),
    TEST: ("What is the {a} for {k}?", "Which {a} was given to {k}?", "Can you tell me the {a} of {k}?"),
    HIDDEN: ("Name the {a} of {k}.", "What {a} does {k} use?"),
}
