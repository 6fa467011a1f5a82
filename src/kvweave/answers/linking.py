"""The runs of a clause as noun phrases and phrases: verbs out of phrases, what belongs to a noun before it.

"The report of Anna" and "Anna's report", "the office in Delft" and "the Delft office" come out the same.
"""

from collections.abc import Sequence

from kvweave.answers.clause import Clause, Run
from kvweave.answers.lexicon import Lexicon
from kvweave.answers.moments import is_moment
from kvweave.answers.words import Word


def linked_runs(clause: Clause, known: Lexicon) -> list[Run]:
    """The runs of a clause after that; settles `clause.asks` and `clause.tense` where a noun says it."""
    _count(clause)
    _predicate(clause, known)
    return _linked(_verbs_apart(clause, known), clause, known)


def is_verb(word: Word, known: Lexicon) -> bool:
    """Whether a word may be a verb, by its base form."""
    return word.base in known.verbs and not word.named


def bases(words: Sequence[Word]) -> tuple[str, ...]:
    """The base forms."""
    return tuple(word.base for word in words)


def _count(clause: Clause) -> None:
    """Read "what is the number of chairs" as "how many chairs"."""
    if clause.asks != "what" or not clause.copula or len(clause.runs) < 2:
        return
    first, second = clause.runs[:2]
    counted = second.words[-1]
    if bases(first.words) == ("number",) and second.preposition == "of" and counted.text != counted.base:
        clause.asks, clause.runs = "many", [Run(words=second.words), *clause.runs[2:]]


def _predicate(clause: Clause, known: Lexicon) -> None:
    """Read "is Anna the owner of the boat" as "does Anna own the boat"."""
    if clause.asks != "whether" or not clause.copula:
        return
    _possessed(clause, known)
    at = next((n for n, run in enumerate(clause.runs) if n and run.article and not run.preposition), 0)
    if not at or clause.runs[at - 1].preposition:
        return
    noun = clause.runs[at].words[-1]
    of = at + 1 < len(clause.runs) and clause.runs[at + 1].preposition == "of"
    does = {**known.agents, **known.makers}.get(noun.base)
    if does and of and len(clause.runs[at].words) == 1 and not noun.named:
        clause.runs[at] = Run(words=[Word(does, does), *clause.runs[at + 1].words])
        del clause.runs[at + 1]
        clause.tense = "past" if noun.base in known.makers else clause.tense


def _possessed(clause: Clause, known: Lexicon) -> None:
    """Of "is Anna Ben's teacher", where each name is one word, "does Anna teach Ben"."""
    first = clause.runs[0]
    does = known.agents.get(first.words[-1].base)
    if does and first.owners == 2 and len(first.words) == 3 and not first.preposition:
        one, other, _ = first.words
        first.words = [one, Word(does, does), other]


def _verbs_apart(clause: Clause, known: Lexicon) -> list[Run]:
    """Runs with the main verb out of a phrase: when does the manager of the office | leave."""
    runs: list[Run] = []
    parts = [part for run in clause.runs for part in _names_apart(run, known)]
    subject = int(clause.helped and not clause.generic)  # what stands first is no verb then
    bare = [word for run in parts if not run.preposition for word in run.words[subject * (run is parts[0]) :]]
    found = any(is_verb(word, known) for word in bare) or (clause.copula and not clause.helped)
    for run in reversed(parts):
        at = max((n for n, word in enumerate(run.words) if is_verb(word, known)), default=0)
        if run.preposition and clause.passive and clause.verb in run.words[1:]:
            at, found = run.words.index(clause.verb), False
        if run.preposition and at and not found:
            runs += [Run(words=run.words[at:]), Run(run.preposition, run.article, run.words[:at])]
            found = True
        else:
            runs.append(run)
    return runs[::-1]


def _names_apart(run: Run, known: Lexicon) -> list[Run]:
    """A phrase that begins with a name or a date ends with it: is the shop in Delft | open."""
    if not run.preposition or run.article or not run.words[0].named:
        return [run]
    at = next((n for n, word in enumerate(run.words) if not word.named), 0)
    if not at or run.words[at].base in known.units_of_time or run.preposition == "of":
        return [run]
    return [Run(run.preposition, run.article, run.words[:at]), Run(words=run.words[at:])]


def _linked(runs: Sequence[Run], clause: Clause, known: Lexicon) -> list[Run]:
    """As "Anna's report" also "the report of Anna": what "of" introduces stands before what it belongs to."""
    copular = clause.copula and not clause.passive
    kept: list[Run] = []
    for run in reversed(runs):
        links = ("of", "for") if copular and run.preposition in ("", "of") else ("of",)
        linked = kept and (kept[-1].preposition in links or _is_place_of(kept[-1], run, known))
        if linked and not _is_lone_verb(run, known):
            inner = kept.pop()
            at = 0
            if not run.article:
                verbs = [n for n, word in enumerate(run.words[:-1]) if is_verb(word, known)]
                at = verbs[-1] + 1 if verbs else 0
            words = [*run.words[:at], *inner.words, *run.words[at:]]
            run = Run(run.preposition, run.article, words, inner.last)
        kept.append(run)
    return kept[::-1]


def _is_place_of(phrase: Run, run: Run, known: Lexicon) -> bool:
    """As "the Delft office" also "the office in Delft": a name alone, behind a noun."""
    last = run.words[-1]
    named = all(word.named and not is_moment(word.base) and word.base[0] != "#" for word in phrase.words)
    is_name = last.named and last.base != "one"
    behind_noun = not (is_name or is_verb(last, known)) and run.preposition in ("", "of", "than")
    return phrase.preposition in ("at", "in") and not phrase.article and named and behind_noun


def _is_lone_verb(run: Run, known: Lexicon) -> bool:
    """what consists | of: the phrase does not belong to a noun."""
    return not run.article and len(run.words) == 1 and is_verb(run.words[0], known)
