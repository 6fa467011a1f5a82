"""The words of a clause in one order, however they were arranged: what belongs to a noun before it, passives as actives.

Who does what to whom shows in the order of terms alone, so a change that would lose it is not made.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

from kvweave.answer_cache.english.clause import Clause, Run
from kvweave.answer_cache.english.moments import is_moment
from kvweave.answer_cache.english.words import Lexicon, Word


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


_WHEN: Final = ("when", "time", "date")


class Phrase(NamedTuple):
    """What a preposition introduces, behind which term it stands (empty at either end of the question), its words."""

    preposition: str
    behind: str
    terms: tuple[str, ...]

    @property
    def is_moment(self) -> bool:
        """Whether it says when."""
        return bool(self.terms) and is_moment(self.terms[0])


def ordered(clause: Clause, known: Lexicon) -> tuple[tuple[str, ...], tuple[Phrase, ...]]:
    """The terms and the phrases of a clause; settles `clause.asks` where a noun says it."""
    runs = linked_runs(clause, known)
    agent = _agent(runs, clause)
    words = [word for run in runs if not run.preposition for word in run.words]
    phrases = _phrases([run for run in runs if run is not agent], clause)
    phrases = [_with_noun(phrase, words) for phrase in phrases]
    clause.supported = clause.supported or _is_embedded(words, clause, known)
    if clause.stranded:
        if not (clause.passive and clause.stranded == "by"):
            fronted = clause.fronted.words if clause.fronted else []
            phrases.append(Phrase("?" + clause.stranded, "", bases(fronted)))
    elif clause.fronted and clause.asks == "many" and clause.supported and bases(words)[-1:] == ("have",):
        phrases.append(Phrase("in", "", bases(words[:-1])))  # how many are there in it
        words = clause.fronted.words
    elif clause.fronted:
        words = _with_fronted(words, clause, known)
    words = _without_somebody(_sorted_pairs(words), clause, known)
    words = _without_events(words, clause, known, agent)
    terms = list(_active(words, agent, clause) if clause.passive else bases(words))
    terms = _settled(terms, clause, known)
    if clause.modal and not clause.generic:
        terms.insert(0, "~" + clause.modal)
    return tuple(terms), tuple(sorted(_settled_places(phrases, terms)))


def _agent(runs: Sequence[Run], clause: Clause) -> Run | None:
    """Who did it, in a passive; "by Friday" and "by paying" are no agents."""
    if not clause.passive:
        return None
    for run in runs:
        said = run.words[0]
        if run.preposition == "by" and said.form != "ing" and said.base[0] not in "@#":
            return run
    return None


def _phrases(runs: Sequence[Run], clause: Clause) -> list[Phrase]:
    """What prepositions introduce, in the order in which it is said."""
    # "the departure of the ferry from A" has at its end what "the ferry from A leaves" has inside.
    nominal = clause.copula and not clause.passive and clause.fronted is None
    bare = sum(len(run.words) for run in runs if not run.preposition)
    before, last = 0, ""
    noun = ""  # of the phrase before, which the next one may belong to: before the dinner on Tuesday
    phrases = []
    for run in runs:
        if run.preposition:
            inside = before > 0 and (before < bare or nominal)
            when = run.preposition in ("in", "on") and is_moment(run.words[0].base)
            behind = noun or (last if inside else "")
            phrases.append(Phrase("at" if when else run.preposition, behind, bases(run.words)))
            noun = run.last.base if run.article and not is_moment(run.last.base) else ""
        else:
            before, last, noun = before + len(run.words), run.last.base, ""
    return phrases


def _settled_places(phrases: Sequence[Phrase], terms: Sequence[str]) -> list[Phrase]:
    """Phrases behind the last term stand at the end; the only one that says when may stand anywhere."""
    free = sum(phrase.is_moment for phrase in phrases) == 1
    return [
        phrase._replace(behind="") if phrase.behind in terms[-1:] or (phrase.is_moment and free) else phrase
        for phrase in phrases
    ]


def _with_noun(phrase: Phrase, words: Sequence[Word]) -> Phrase:
    """What "one" stands for: is the tower taller than the one in Delft."""
    if phrase.preposition != "than" or phrase.terms[-1] != "one" or len(words) < 2:
        return phrase
    return phrase._replace(terms=(*phrase.terms[:-1], words[-2].base))


def _is_embedded(words: Sequence[Word], clause: Clause, known: Lexicon) -> bool:
    """Whether subject and verb follow what belongs to the question word, as in "which letter Anna wrote"."""
    if clause.fronted is None or not words or clause.helped or clause.passive or clause.copula:
        return False
    return not is_verb(words[0], known) and any(is_verb(word, known) for word in words)


def _with_fronted(words: list[Word], clause: Clause, known: Lexicon) -> list[Word]:
    """The terms with what belongs to the question word in its place: an object behind, a subject in front."""
    assert clause.fronted is not None
    fronted = clause.fronted.words
    held = ("have", "use") if fronted[-1].base in known.signs else ("have",)
    if clause.asks == "what" and clause.supported and words and words[-1].base in held:
        return [*words[:-1], *fronted]
    object_first = clause.supported or (clause.copula and bool(words))
    return [*words, *fronted] if object_first else [*fronted, *words]


def _without_somebody(words: list[Word], clause: Clause, known: Lexicon) -> list[Word]:
    """Did anyone pay the bill: was it paid."""
    acts = len(words) > 2 and is_verb(words[1], known) and not clause.passive
    nobody_in_particular = (
        acts
        and clause.asks != "who"
        and (words[0].base in known.somebody or (words[0].base == "they" and clause.tense == "past"))
    )
    return words[1:] if nobody_in_particular else words


def _without_events(words: list[Word], clause: Clause, known: Lexicon, agent: Run | None) -> list[Word]:
    """When is it held, when does it take place, where is it located, where can I find it: when and where is it."""
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
    """A passive as the active it stands for: whoever does it, the verb, what it is done to."""
    at = next((n for n, word in enumerate(words) if word is clause.verb), None)
    if at is None:  # the participle stands inside a phrase
        return bases([*words, *(agent.words if agent else ())])
    by = list(agent.words) if agent else []
    if clause.stranded == "by" and clause.fronted:
        by = clause.fronted.words
    return bases([*by, words[at], *words[:at], *words[at + 1 :]])


def _sorted_pairs(words: list[Word]) -> list[Word]:
    """The same choice are "Anna or Ben" and "Ben or Anna"."""
    for at, word in enumerate(words):
        if word.text in ("and", "or") and 0 < at < len(words) - 1:
            start, end = at - 1, at + 1
            while start and words[start].named and words[start - 1].named:
                start -= 1
            while end + 1 < len(words) and words[end].named and words[end + 1].named:
                end += 1
            one, two = words[start:at], words[at + 1 : end + 1]
            if bases(two) < bases(one):
                words = [*words[:start], *two, word, *one, *words[end + 1 :]]
    return words


def _settled(terms: list[str], clause: Clause, known: Lexicon) -> list[str]:
    """What the last noun says about the question: "the start time of" asks when, "the owner of" who owns."""
    if clause.asks == "what" and clause.supported and terms[-1:] == ["cost"]:
        clause.asks = "price"
        return terms[:-1]
    if clause.asks == "what" and clause.fronted is None and clause.supported and known.paying & {*terms[-1:]}:
        clause.asks = "much"  # what did she pay for it
    if len(terms) < 2 or not clause.copula:
        return terms
    last = terms[-1]
    if clause.asks == "what" and clause.fronted is None:
        if last == "name" and terms[-2] in {**known.agents, **known.makers}:
            clause.asks, terms = "who", terms[:-1]
        elif last in known.dated:
            clause.asks = "when"
        elif asked := known.asks.get(last, last if last in _measured(known) else ""):
            clause.asks = asked if asked != "who" else "what"
            return terms[:-1] if asked != "who" else terms
    return _who_does(terms, clause, known) if clause.asks == "who" else terms


def _who_does(terms: list[str], clause: Clause, known: Lexicon) -> list[str]:
    """Who is the owner of it: who owns it."""
    if terms[-1] in known.makers:
        clause.tense = "past"
    does = {**known.agents, **known.makers}.get(terms[-1])
    return [does, *terms[:-1]] if does else terms


def _measured(known: Lexicon) -> frozenset[str]:
    return frozenset((*known.measures.values(), "duration"))
