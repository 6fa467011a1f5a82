"""Replies of a tiny model whose tokens are spelled as a test wants, such as one that holds the end of a line."""

ENDINGS = [
    ({0: "\n"}, 0),  # a token of its own: not in the answer
    ({0: ".\nNext"}, 1),  # in the middle of the answer's last token
    ({0: "!\n"}, 1),
    ({0: " Question", 1: ": Who?"}, 0),  # two tokens, the first of which looked like an answer
    ({0: "\n\n", 1: "Question: Who?"}, 0),
]

"""Texts of a reply's tokens, by their distance from a place, and how many of them belong to the answer."""


class Spelled:
    """A tokenizer that spells tokens as words of its own, and some as a test wants."""

    eos_token_id = None

    def __init__(self, texts):
        self._texts = texts

    def decode(self, ids, **options):
        return "".join(self._texts.get(token, f" w{token}") for token in ids)


def new_place(true, *, after=1):
    """Return a place whose token the reply has not had before, with another such token behind it."""
    fresh = [
        at
        for at in range(after, len(true) - 2)
        if true[at] not in true[:at] and true[at + 1] not in true[: at + 1]
    ]
    return fresh[0]
