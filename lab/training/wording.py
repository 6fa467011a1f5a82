"""Rewords sentences so that they differ from all templates.

Sentences have {placeholders} and may be questions. A reworded sentence has the same meaning, apart from replaced words.
"""

import random
import re
from collections.abc import Sequence

from kvweave_lab.eval.world import Phrases, chosen
from training.phrases import further_phrases
from training.world import TrainingWorld

REWORDED_SHARE = 0.6  # of the sentences of a document with reworded sentences
VARIED_SHARE = 0.7  # share of further sentences in a varied document
_REPLACE_SHARE, _LEAD_SHARE, _TRAIL_SHARE = 0.5, 0.35, 0.35

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
_QUESTION_LEADS = (
    "please tell me,|just to be sure:|I would like to know:|one question:|who remembers:|can you tell,|quickly:|and now:|"
    "to come back to the notes:|another thing:"
).split("|")
_QUESTION_TRAILS = (
    ", by the way|, please|, if you know|, according to the notes| again|, do you think| in the end".split(
        "|"
    )
)
_WORD = re.compile(r"(?<![\w{])[a-z]{4,}(?![\w}])")


class RewordingWorld(TrainingWorld):
    """A world that rewords many of its sentences.

    Args:
        rng, words: as for TrainingWorld.
        substitutes: words that replace others.
    """

    def __init__(self, rng: random.Random, words: Sequence[str], substitutes: Sequence[str]) -> None:
        super().__init__(rng, words)
        self._substitutes = substitutes

    def phrase(self, phrases: Phrases) -> str:
        """Return one of the sentences, usually reworded."""
        sentence = super().phrase(phrases)
        return (
            reword(self.rng, sentence, self._substitutes) if self.rng.random() < REWORDED_SHARE else sentence
        )


class VariedWorld(RewordingWorld):
    """A world that mostly uses the sentences of `training.phrases`, and garbles some.

    Args:
        rng, words, substitutes: as for RewordingWorld.
        garbled: share of the sentences in which many words are replaced.
    """

    def __init__(
        self, rng: random.Random, words: Sequence[str], substitutes: Sequence[str], garbled: float
    ) -> None:
        super().__init__(rng, words, substitutes)
        self._garbled = garbled

    def phrase(self, phrases: Phrases) -> str:
        """Return one of the sentences, or a further one with the same meaning."""
        rng, others = self.rng, further_phrases(phrases)
        sentences = others if others and rng.random() < VARIED_SHARE else phrases[self.split]
        sentence = chosen(rng, rng.choice(sentences))
        if rng.random() >= self._garbled:
            return sentence
        return reword(rng, sentence, self._substitutes, share=rng.random())


def reword(rng: random.Random, sentence: str, substitutes: Sequence[str], share: float | None = None) -> str:
    """Return a sentence with a replaced word, or with words added in front or at the end.

    Placeholders and the final mark stay. `share` is the share of words to replace.
    """
    body, mark = sentence[:-1], sentence[-1]
    is_question = mark == "?"
    if share is not None:
        body = _WORD.sub(lambda word: rng.choice(substitutes) if rng.random() < share else word[0], body)
    elif rng.random() < _REPLACE_SHARE:
        body = _replace_word(rng, body, substitutes)
    if rng.random() < _TRAIL_SHARE:
        body += rng.choice(_QUESTION_TRAILS if is_question else _TRAILS)
    if rng.random() < _LEAD_SHARE and not body.startswith("{"):
        lead = rng.choice(_QUESTION_LEADS) if is_question else f"{rng.choice(_LEADS)},"
        body = f"{lead[0].upper()}{lead[1:]} {body[0].lower()}{body[1:]}"
    return body + mark


def _replace_word(rng: random.Random, body: str, substitutes: Sequence[str]) -> str:
    words = list(_WORD.finditer(body))
    if not words:
        return body
    chosen = rng.choice(words)
    return body[: chosen.start()] + rng.choice(substitutes) + body[chosen.end() :]
