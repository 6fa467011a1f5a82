"""Puts the words of a clause into one canonical order, so that rearranged questions get equal terms.

What belongs to a noun precedes it, and passives become actives. The order of terms is all that shows who does what to
whom, so a rearrangement that would lose it is not made.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

from kvweave.answer_cache.english.dates import is_date
from kvweave.answer_cache.english.lexicon import Lexicon
from kvweave.answer_cache.english.parse import Clause, Run
from kvweave.answer_cache.english.words import Word

_WHEN: Final = ("when", "time", "date")


class Phrase(NamedTuple):
    """A preposition, the term that the phrase follows (empty at either end of the question), and its words."""

    preposition: str
    after: str
    terms: tuple[str, ...]

    @property
    def is_date(self) -> bool:
        """Whether it is a date or time."""
        return bool(self.terms) and is_date(self.terms[0])


def canonical_terms(clause: Clause, known: Lexicon) -> tuple[tuple[str, ...], tuple[Phrase, ...]]:
    """Return the terms and the phrases of a clause; updates `clause.asks` and `clause.tense` where a noun decides them."""
    _resolve_count(clause)
    _resolve_predicate(clause, known)
    runs = _join_of_phrases(_split_verbs(clause, known), clause, known)
    agent = _agent(runs, clause)
    words = [word for run in runs if not run.preposition for word in run.words]
    phrases = _phrases([run for run in runs if run is not agent], clause)
    phrases = [_with_noun(phrase, words) for phrase in phrases]
    clause.do_support = clause.do_support or _is_embedded(words, clause, known)
    if clause.stranded:
        if not (clause.passive and clause.stranded == "by"):
            fronted = clause.fronted.words if clause.fronted else []
            phrases.append(Phrase("?" + clause.stranded, "", _bases(fronted)))
    elif clause.fronted and clause.asks == "many" and clause.do_support and _bases(words)[-1:] == ("have",):
        phrases.append(Phrase("in", "", _bases(words[:-1])))  # how many are there in it
        words = clause.fronted.words
    elif clause.fronted:
        words = _with_fronted(words, clause, known)
    words = _without_indefinite(_sorted_pairs(words), clause, known)
    words = _without_light_verb(words, clause, known, agent)
    terms = list(_active(words, agent, clause) if clause.passive else _bases(words))
    terms = _resolve_last_noun(terms, clause, known)
    if clause.modal and not clause.generic:
        terms.insert(0, "~" + clause.modal)
    return tuple(terms), tuple(sorted(_unplaced(phrases, terms)))


def _is_verb(word: Word, known: Lexicon) -> bool:
    """Return whether a word may be a verb, by its base form."""
    return word.base in known.verbs and not word.named


def _bases(words: Sequence[Word]) -> tuple[str, ...]:
    return tuple(word.base for word in words)


# Runs: resolved, split and joined


def _resolve_count(clause: Clause) -> None:
    """Treat "what is the number of chairs" as "how many chairs"."""
    if clause.asks != "what" or not clause.copula or len(clause.runs) < 2:
        return
    first, second = clause.runs[:2]
    counted = second.words[-1]
    if _bases(first.words) == ("number",) and second.preposition == "of" and counted.text != counted.base:
        clause.asks, clause.runs = "many", [Run(words=second.words), *clause.runs[2:]]


def _resolve_predicate(clause: Clause, known: Lexicon) -> None:
    """Treat "is Anna the owner of the boat" as "does Anna own the boat"."""
    if clause.asks != "whether" or not clause.copula or not clause.runs:
        return
    _resolve_possessive(clause, known)
    at = next((n for n, run in enumerate(clause.runs) if n and run.article and not run.preposition), 0)
    if not at or clause.runs[at - 1].preposition:
        return
    noun = clause.runs[at].words[-1]
    of = at + 1 < len(clause.runs) and clause.runs[at + 1].preposition == "of"
    verb = known.nouns_to_verbs.get(noun.base)
    if verb and of and len(clause.runs[at].words) == 1 and not noun.named:
        clause.runs[at] = Run(words=[Word(verb, verb), *clause.runs[at + 1].words])
        del clause.runs[at + 1]
        clause.tense = "past" if noun.base in known.makers else clause.tense


def _resolve_possessive(clause: Clause, known: Lexicon) -> None:
    """Treat "is Anna Ben's teacher" as "does Anna teach Ben", where each name is one word."""
    first = clause.runs[0]
    verb = known.agents.get(first.words[-1].base)
    if verb and first.owners == 2 and len(first.words) == 3 and not first.preposition:
        one, other, _ = first.words
        first.words = [one, Word(verb, verb), other]


def _split_verbs(clause: Clause, known: Lexicon) -> list[Run]:
    """Split the main verb off a phrase: when does the manager of the office | leave."""
    runs: list[Run] = []
    parts = [part for run in clause.runs for part in _split_names(run, known)]
    subject = int(clause.has_helper and not clause.generic)  # the first word is no verb then
    bare = [word for run in parts if not run.preposition for word in run.words[subject * (run is parts[0]) :]]
    found = any(_is_verb(word, known) for word in bare) or (clause.copula and not clause.has_helper)
    for run in reversed(parts):
        at = max((n for n, word in enumerate(run.words) if _is_verb(word, known)), default=0)
        if run.preposition and clause.passive and clause.verb in run.words[1:]:
            at, found = run.words.index(clause.verb), False
        if run.preposition and at and not found:
            runs += [Run(words=run.words[at:]), Run(run.preposition, run.article, run.words[:at])]
            found = True
        else:
            runs.append(run)
    return runs[::-1]


def _split_names(run: Run, known: Lexicon) -> list[Run]:
    """Split a phrase after the name or date that it starts with: is the shop in Delft | open."""
    if not run.preposition or run.article or not run.words[0].named:
        return [run]
    at = next((n for n, word in enumerate(run.words) if not word.named), 0)
    if not at or run.words[at].base in known.units_of_time or run.preposition == "of":
        return [run]
    return [Run(run.preposition, run.article, run.words[:at]), Run(words=run.words[at:])]


def _join_of_phrases(runs: Sequence[Run], clause: Clause, known: Lexicon) -> list[Run]:
    """Move an "of" phrase before its noun: "the report of Anna" becomes "Anna's report"."""
    copular = clause.copula and not clause.passive
    joined: list[Run] = []
    for run in reversed(runs):
        links = ("of", "for") if copular and run.preposition in ("", "of") else ("of",)
        linked = joined and (joined[-1].preposition in links or _is_place_of(joined[-1], run, known))
        if linked and not _is_lone_verb(run, known):
            inner = joined.pop()
            at = 0
            if not run.article:
                verbs = [n for n, word in enumerate(run.words[:-1]) if _is_verb(word, known)]
                at = verbs[-1] + 1 if verbs else 0
            words = [*run.words[:at], *inner.words, *run.words[at:]]
            run = Run(run.preposition, run.article, words, inner.last)
        joined.append(run)
    return joined[::-1]


def _is_place_of(phrase: Run, run: Run, known: Lexicon) -> bool:
    """Return whether a phrase is a bare place name after a noun: "the office in Delft", like "the Delft office"."""
    last = run.words[-1]
    named = all(word.named and not is_date(word.base) and word.base[0] != "#" for word in phrase.words)
    is_name = last.named and last.base != "one"
    after_noun = not (is_name or _is_verb(last, known)) and run.preposition in ("", "of", "than")
    return phrase.preposition in ("at", "in") and not phrase.article and named and after_noun


def _is_lone_verb(run: Run, known: Lexicon) -> bool:
    """Return whether a phrase after this run belongs to a verb: what consists | of."""
    return not run.article and len(run.words) == 1 and _is_verb(run.words[0], known)


def _agent(runs: Sequence[Run], clause: Clause) -> Run | None:
    """Return who did it, in a passive; "by Friday" and "by paying" are no agents."""
    if not clause.passive:
        return None
    for run in runs:
        first = run.words[0]
        if run.preposition == "by" and first.form != "ing" and first.base[0] not in "@#":
            return run
    return None


# Phrases


def _phrases(runs: Sequence[Run], clause: Clause) -> list[Phrase]:
    """Return what prepositions introduce, in the order of the question."""
    # "the departure of the ferry from A" has at its end what "the ferry from A leaves" has inside.
    nominal = clause.copula and not clause.passive and clause.fronted is None
    bare = sum(len(run.words) for run in runs if not run.preposition)
    before, last = 0, ""
    noun = ""  # of the previous phrase, which the next one may belong to: before the dinner on Tuesday
    phrases = []
    for run in runs:
        if run.preposition:
            inside = before > 0 and (before < bare or nominal)
            when = run.preposition in ("in", "on") and is_date(run.words[0].base)
            after = noun or (last if inside else "")
            phrases.append(Phrase("at" if when else run.preposition, after, _bases(run.words)))
            noun = run.last.base if run.article and not is_date(run.last.base) else ""
        else:
            before, last, noun = before + len(run.words), run.last.base, ""
    return phrases


def _unplaced(phrases: Sequence[Phrase], terms: Sequence[str]) -> list[Phrase]:
    """Drop a phrase's place if it follows the last term, or is the only date: that may be anywhere in a question."""
    free = sum(phrase.is_date for phrase in phrases) == 1
    return [
        phrase._replace(after="") if phrase.after in terms[-1:] or (phrase.is_date and free) else phrase
        for phrase in phrases
    ]


def _with_noun(phrase: Phrase, words: Sequence[Word]) -> Phrase:
    """Replace "one" by its noun: is the tower taller than the one in Delft."""
    if phrase.preposition != "than" or phrase.terms[-1] != "one" or len(words) < 2:
        return phrase
    return phrase._replace(terms=(*phrase.terms[:-1], words[-2].base))


# Terms


def _is_embedded(words: Sequence[Word], clause: Clause, known: Lexicon) -> bool:
    """Return whether subject and verb follow the noun of the question word, as in "which letter Anna wrote"."""
    if clause.fronted is None or not words or clause.has_helper or clause.passive or clause.copula:
        return False
    return not _is_verb(words[0], known) and any(_is_verb(word, known) for word in words)


def _with_fronted(words: list[Word], clause: Clause, known: Lexicon) -> list[Word]:
    """Return the words with the noun of the question word in its place: an object at the end, a subject in front."""
    assert clause.fronted is not None
    fronted = clause.fronted.words
    held = ("have", "use") if fronted[-1].base in known.identifiers else ("have",)
    if clause.asks == "what" and clause.do_support and words and words[-1].base in held:
        return [*words[:-1], *fronted]
    object_first = clause.do_support or (clause.copula and bool(words))
    return [*words, *fronted] if object_first else [*fronted, *words]


def _without_indefinite(words: list[Word], clause: Clause, known: Lexicon) -> list[Word]:
    """Drop a subject that names no one: "did anyone pay the bill" asks whether it was paid."""
    acts = len(words) > 2 and _is_verb(words[1], known) and not clause.passive
    no_one_in_particular = (
        acts
        and clause.asks != "who"
        and (words[0].base in known.indefinite or (words[0].base == "they" and clause.tense == "past"))
    )
    return words[1:] if no_one_in_particular else words


def _without_light_verb(words: list[Word], clause: Clause, known: Lexicon, agent: Run | None) -> list[Word]:
    """Drop a verb that adds nothing to "when" or "where": when is it held, where is it located, where can I find it."""
    light = known.events if clause.asks in _WHEN else known.placed if clause.asks == "where" else frozenset()
    has_agent = agent is not None or clause.stranded == "by"
    if clause.passive and clause.verb is not None and clause.verb.base in light and not has_agent:
        clause.passive = False
        return [word for word in words if word is not clause.verb]
    if light and len(words) > 1 and words[-1].base == "happen":
        return words[:-1]
    if clause.asks == "where" and clause.generic and len(words) > 1 and words[0].base in ("find", "receive"):
        return words[1:]
    return words


def _active(words: Sequence[Word], agent: Run | None, clause: Clause) -> tuple[str, ...]:
    """Return a passive as the active: the agent, the verb, its object."""
    at = next((n for n, word in enumerate(words) if word is clause.verb), None)
    if at is None:  # the participle is inside a phrase
        return _bases([*words, *(agent.words if agent else ())])
    by = list(agent.words) if agent else []
    if clause.stranded == "by" and clause.fronted:
        by = clause.fronted.words
    return _bases([*by, words[at], *words[:at], *words[at + 1 :]])


def _sorted_pairs(words: list[Word]) -> list[Word]:
    """Sort the sides of "and" and "or": "Anna or Ben" is the same choice as "Ben or Anna"."""
    for at, word in enumerate(words):
        if word.text in ("and", "or") and 0 < at < len(words) - 1:
            start, end = at - 1, at + 1
            while start and words[start].named and words[start - 1].named:
                start -= 1
            while end + 1 < len(words) and words[end].named and words[end + 1].named:
                end += 1
            one, two = words[start:at], words[at + 1 : end + 1]
            if _bases(two) < _bases(one):
                words = [*words[:start], *two, word, *one, *words[end + 1 :]]
    return words


def _resolve_last_noun(terms: list[str], clause: Clause, known: Lexicon) -> list[str]:
    """Apply what the last noun asks for: "the start time of" asks when, "the owner of" who owns."""
    if clause.asks == "what" and clause.do_support and terms[-1:] == ["cost"]:
        clause.asks = "price"
        return terms[:-1]
    if (
        clause.asks == "what"
        and clause.fronted is None
        and clause.do_support
        and known.paying & {*terms[-1:]}
    ):
        clause.asks = "much"  # what did she pay for it
    if len(terms) < 2 or not clause.copula:
        return terms
    last = terms[-1]
    if clause.asks == "what" and clause.fronted is None:
        if last == "name" and terms[-2] in known.nouns_to_verbs:
            clause.asks, terms = "who", terms[:-1]
        elif last in known.dated:
            clause.asks = "when"
        elif asked := known.asks.get(last, last if last in (*known.measures.values(), "duration") else ""):
            clause.asks = asked if asked != "who" else "what"
            return terms[:-1] if asked != "who" else terms
    return _resolve_agent(terms, clause, known) if clause.asks == "who" else terms


def _resolve_agent(terms: list[str], clause: Clause, known: Lexicon) -> list[str]:
    """Treat "who is the owner of it" as "who owns it"."""
    if terms[-1] in known.makers:
        clause.tense = "past"
    verb = known.nouns_to_verbs.get(terms[-1])
    return [verb, *terms[:-1]] if verb else terms
