"""Answers generated samples by reading them: finds the sentences that a split's phrases make and thinks about them.

Knows the phrases and nothing of how a task writes its document; that is what makes it a check.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

from kvweave_lab.eval.samples import Sample
from kvweave_lab.eval.tasks import chains, coref, needles, order, word_counts
from kvweave_lab.eval.world import Phrases
from lab_support.pools import pattern

Solver = Callable[[Sample, str], tuple[str, ...]]


class FoundSentence(NamedTuple):
    """A sentence of the context: its chunk, its place in it, and the values of its placeholders."""

    chunk: int
    start: int
    end: int
    kind: str
    filled: Mapping[str, str]


def find_sentences(sample: Sample, split: str, **kinds: Phrases) -> list[FoundSentence]:
    """Return all sentences of some kinds, in reading order; of two that end at the same place only the longer."""
    found: dict[tuple[int, int], FoundSentence] = {}
    for chunk, text in enumerate(sample.chunks):
        for kind, phrases in kinds.items():
            for match in (match for phrase in phrases[split] for match in pattern(phrase).finditer(text)):
                sentence = FoundSentence(chunk, match.start(), match.end(), kind, match.groupdict())
                longest = found.setdefault((chunk, match.end()), sentence)
                if sentence.start < longest.start:
                    found[chunk, match.end()] = sentence
    return [found[at] for at in sorted(found)]


def asked(sample: Sample, split: str, phrases: Phrases) -> Mapping[str, str]:
    """Return the values of the question's placeholders."""
    (filled,) = {
        tuple(match.groupdict().items())
        for phrase in phrases[split]
        if (match := pattern(phrase).fullmatch(sample.question))
    }
    return dict(filled)


def _stated(sample: Sample, split: str) -> dict[tuple[str, str], str]:
    facts = [sentence.filled for sentence in find_sentences(sample, split, stated=needles.STATED)]
    values = {(fact["a"], fact["k"]): fact["v"] for fact in facts}
    assert len(values) == len(facts), "a fact occurs twice"
    return values


def needle(sample: Sample, split: str) -> tuple[str, ...]:
    """single, multikey: the one value of the attribute of the name."""
    question = asked(sample, split, needles.ASKED)
    return (_stated(sample, split)[question["a"], question["k"]],)


def two_needles(sample: Sample, split: str) -> tuple[str, ...]:
    """multiquery: both values, in the question's order."""
    question = asked(sample, split, needles.TWO_ASKED)
    facts = _stated(sample, split)
    return tuple(facts[question["a"], question[name]] for name in ("j", "k"))


def belongings(sample: Sample, split: str) -> tuple[str, ...]:
    """multivalue: every thing of the owner, in order of appearance."""
    owner = asked(sample, split, needles.OWNED_ASKED)["k"]
    owned = find_sentences(sample, split, owned=needles.OWNED)
    return tuple(sentence.filled["v"] for sentence in owned if sentence.filled["k"] == owner)


def content(sample: Sample, split: str) -> tuple[str, ...]:
    """vartrack: follow the copies back to the place whose content follows the cut."""
    found = find_sentences(sample, split, named=chains.NAMED, holds=chains.HOLDS, copies=chains.COPIES)
    name = asked(sample, split, chains.CONTENT_ASKED)["k"]
    later = len(sample.chunks)
    while copies := [s for s in found if s.kind == "copies" and s.filled["k"] == name]:
        (copy,) = copies
        assert copy.chunk < later or sample.placement.endswith("permuted"), (
            "a link is no later than the one before"
        )
        name, later = copy.filled["j"], copy.chunk
    (at,) = (number for number, s in enumerate(found) if s.kind == "named" and s.filled["k"] == name)
    assert found[at + 1].kind == "holds"
    _check_related(sample, found[at], found[at + 1])
    return (found[at + 1].filled["v"],)


def second_hop(sample: Sample, split: str) -> tuple[str, ...]:
    """twohop: find the person, then what that person keeps; the two are in different chunks."""
    question = asked(sample, split, chains.TREASURE_ASKED)
    (relation,) = (relation for relation in chains.RELATIONS if relation.role == question["r"])
    found = find_sentences(sample, split, link=relation.phrases, fact=chains.COLLECTS)
    (link,) = (s for s in found if s.kind == "link" and s.filled["q"] == question["q"])
    (fact,) = (s for s in found if s.kind == "fact" and s.filled["p"] == link.filled["p"])
    assert link.chunk != fact.chunk
    return (fact.filled["v"],)


def antecedent(sample: Sample, split: str) -> tuple[str, ...]:
    """coref: what the sentence after the cut says, which refers to the name before it."""
    for kind in (coref.GUEST, coref.TOWN):
        if any(pattern(phrase).fullmatch(sample.question) for phrase in kind.asked[split]):
            name = asked(sample, split, kind.asked)["k"]
            break
    found = find_sentences(
        sample,
        split,
        guest=coref.GUEST.named,
        town=coref.TOWN.named,
        he=coref.GUEST.referring,
        it=coref.TOWN.referring,
    )
    found = [s for s in found if s.kind != "he" or s.filled["s"] in ("He", "She")]
    (at,) = (number for number, s in enumerate(found) if s.filled.get("k") == name)
    named, then = found[at : at + 2]
    assert (named.kind, then.kind) in (("guest", "he"), ("town", "it")), "something stands between"
    _check_related(sample, named, then)
    return (then.filled["v"],)


def latest(sample: Sample, split: str) -> tuple[str, ...]:
    """contradiction: facts after the last sentence."""
    facts: dict[str, str] = {}
    chunks: dict[str, list[int]] = {}
    found = find_sentences(sample, split, stated=needles.STATED, corrected=order.CORRECTED)
    for at, s in enumerate(found):
        if s.kind == "stated":
            name = s.filled["k"]
        else:  # of the fact before it
            name = found[at - 1].filled["k"]
            _check_related(sample, found[at - 1], s)
        facts[name] = s.filled["v"]
        chunks.setdefault(name, []).append(s.chunk)
    asked_for = asked(sample, split, needles.ASKED)["k"]
    stated = 1 if sample.placement.startswith("not retrieved") else 2
    assert len(set(chunks[asked_for])) == stated, "the statements are not in chunks of their own"
    return (facts[asked_for],)


def first(sample: Sample, split: str) -> tuple[str, ...]:
    """order: which of the two is mentioned first."""
    question = asked(sample, split, order.FIRST_ASKED)
    happened = [s.filled["v"] for s in find_sentences(sample, split, happened=order.HAPPENED)]
    return (min(question["x"], question["y"], key=happened.index),)


def most_common(sample: Sample, split: str) -> tuple[str, ...]:
    """commonwords: three words that are more common than every other; in which order does not count."""
    lists = find_sentences(sample, split, listed=word_counts.LISTED)
    return _top(Counter(word for s in lists for word in s.filled["w"].split(", ")), sample, in_order=False)


def most_frequent(sample: Sample, split: str) -> tuple[str, ...]:
    """frequentwords: the three most frequent codes, the most frequent first."""
    lines = find_sentences(sample, split, coded=word_counts.CODED)
    return _top(Counter(word for s in lines for word in s.filled["w"].split()), sample, in_order=True)


def _check_related(sample: Sample, first: FoundSentence, then: FoundSentence) -> None:
    """A sentence ends its chunk, the other starts the next; where the placement is drawn, it follows somewhere."""
    after = sample.chunks[first.chunk][first.end :]
    if sample.placement:
        if then.chunk == first.chunk:
            assert after[: then.start - first.end] == " ", "something stands inside the pair"
        else:
            assert then.chunk - first.chunk in (1, 2), "the cut lies elsewhere"
            assert after == "", "something stands before the cut"
        return
    assert then.chunk == first.chunk + 1, "the cut lies elsewhere"
    assert (after, sample.chunks[then.chunk][: then.start]) == ("", ""), "something stands at the cut"


def _in_text_order(solve: Solver) -> Solver:
    """…-permuted: read the chunks that are there in the order of their documents."""

    def solved(sample: Sample, split: str) -> tuple[str, ...]:
        texts = (text for document in sample.documents for text in document)
        return solve(replace(sample, chunks=tuple(text for text in texts if text in sample.chunks)), split)

    return solved


def _top(counts: Counter[str], sample: Sample, *, in_order: bool) -> tuple[str, ...]:
    top = counts.most_common(4)
    assert top[2][1] > top[3][1], "the third is not more common than the fourth"
    words = tuple(word for word, _ in top[:3])
    return words if in_order else tuple(sorted(words, key=lambda word: _place(word, sample.answers)))


def _place(word: str, answers: tuple[str, ...]) -> int:
    return answers.index(word) if word in answers else len(answers)


SOLVERS: Mapping[str, Solver] = {
    "single": needle,
    "multikey": needle,
    "multivalue": belongings,
    "multiquery": two_needles,
    "vartrack": content,
    "commonwords": most_common,
    "frequentwords": most_frequent,
    "twohop": second_hop,
    "coref": antecedent,
    "contradiction": latest,
    "order": first,
    "coref-mixed": antecedent,
    "vartrack-mixed": content,
    "contradiction-mixed": latest,
    "coref-permuted": _in_text_order(antecedent),
    "vartrack-permuted": _in_text_order(content),
    "contradiction-permuted": _in_text_order(latest),
}
