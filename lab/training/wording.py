"""Sentences in words that no template foresees, so that a model reads them by their shape and their names.

Works on sentences with {placeholders}, questions as well as statements; what it changes still says the same, or says it
in a word that nobody knows.
"""

import random
import re
from collections.abc import Sequence

from kvweave_lab.eval.splits import Phrases, chosen
from training.naming import TrainingWorld
from training.phrases import more

REWORDED = 0.6  # of the sentences of a document that has any
OTHERWISE = 0.7  # of the sentences of a varied document are none of the train split's own
_OTHER_WORD, _LEAD, _TRAIL = 0.5, 0.35, 0.35

_LEADS = (
    "as it happens|as everybody could see|in the end|one morning|after some time|of course|by chance|on that day|to be exact|"
    "if the list is right|as the book has it|at this point|without any doubt|much to our surprise|according to the papers|"
    "as far as we know|in those days|around noon|on the next page|so it seems|as was to be expected|once more|for all we know|"
    "strange to say|that evening|at the same time|not long ago|as before|this time|in short"
).split("|")
_TRAILS = (
    ", as it happens|, in the end|, of course|, by the way|, so it seems|, one hears| that day| in the evening|, after all|"
    ", to be exact|, as the list has it| without much ado|, and nobody was surprised|, which took a while| as usual|"
    ", if we remember well| before noon|, as was expected| once again|, and that was that| for the time being"
).split("|")
_ASKING = (
    "please tell me,|just to be sure:|I would like to know:|one question:|who remembers:|can you tell,|quickly:|and now:|"
    "to come back to the notes:|another thing:"
).split("|")
_ASKED_LAST = (
    ", by the way|, please|, if you know|, according to the notes| again|, do you think| in the end".split(
        "|"
    )
)
_WORD = re.compile(r"(?<![\w{])[a-z]{4,}(?![\w}])")


class RewordingWorld(TrainingWorld):
    """A world that says many of its sentences otherwise.

    Args:
        rng, words: as for TrainingWorld.
        strange: words that take the place of others.
    """

    def __init__(self, rng: random.Random, words: Sequence[str], strange: Sequence[str]) -> None:
        super().__init__(rng, words)
        self._strange = strange

    def phrase(self, phrases: Phrases) -> str:
        """One of the sentences, reworded as a rule."""
        sentence = super().phrase(phrases)
        return reworded(self.rng, sentence, self._strange) if self.rng.random() < REWORDED else sentence


class VariedWorld(RewordingWorld):
    """A world that says most of its sentences in ways of `training.phrases`, and garbles some.

    Args:
        rng, words, strange: as for RewordingWorld.
        garbled: share of the sentences in which many words are strange ones.
    """

    def __init__(
        self, rng: random.Random, words: Sequence[str], strange: Sequence[str], garbled: float
    ) -> None:
        super().__init__(rng, words, strange)
        self._garbled = garbled

    def phrase(self, phrases: Phrases) -> str:
        """One of the sentences or of those that say the same."""
        rng, others = self.rng, more(phrases)
        told = others if others and rng.random() < OTHERWISE else phrases[self.split]
        sentence = chosen(rng, rng.choice(told))
        if rng.random() >= self._garbled:
            return sentence
        return reworded(rng, sentence, self._strange, share=rng.random())


def reworded(rng: random.Random, sentence: str, strange: Sequence[str], share: float | None = None) -> str:
    """A sentence with another word in it, with something in front or behind; placeholders stay, and so does its mark.

    With `share`, so many of its words are other ones.
    """
    body, mark = sentence[:-1], sentence[-1]
    asked = mark == "?"
    if share is not None:
        body = _WORD.sub(lambda word: rng.choice(strange) if rng.random() < share else word[0], body)
    elif rng.random() < _OTHER_WORD:
        body = _with_another_word(rng, body, strange)
    if rng.random() < _TRAIL:
        body += rng.choice(_ASKED_LAST if asked else _TRAILS)
    if rng.random() < _LEAD and not body.startswith("{"):
        lead = rng.choice(_ASKING) if asked else f"{rng.choice(_LEADS)},"
        body = f"{lead[0].upper()}{lead[1:]} {body[0].lower()}{body[1:]}"
    return body + mark


def _with_another_word(rng: random.Random, body: str, strange: Sequence[str]) -> str:
    words = list(_WORD.finditer(body))
    if not words:
        return body
    chosen = rng.choice(words)
    return body[: chosen.start()] + rng.choice(strange) + body[chosen.end() :]
