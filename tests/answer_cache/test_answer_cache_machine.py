"""Any order of changes to the answer cache leaves what a dictionary of questions would hold."""

import json
import tempfile
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvweave.answer_cache.cache import AnswerCache
from kvweave.answer_cache.records import AnswerProvenance
from kvweave.database import Database
from kvweave.options import AskOptions
from kvweave.results import Source

QUESTIONS = (
    "Who paid Anna?",
    "When does the library close?",
    "How deep is the lake near Bern?",
)
OPTIONS = {"reuse": AskOptions("reuse", 4), "full": AskOptions("full", 4)}
QUESTION, OTHER = st.sampled_from(QUESTIONS), st.sampled_from(QUESTIONS)
RECIPE = st.sampled_from(["reuse", "reuse", "reuse", "full"])
VERSIONS = st.frozensets(st.sampled_from(["v1", "v2", "v3"]), min_size=1, max_size=2)
TEXT = st.sampled_from(["", "Ben", "Noon ä", "Nobody knows it exactly."])


def vector(question):
    """Each question's vector is at right angles to the others', so that no question is near another."""
    return np.eye(len(QUESTIONS), dtype=np.float32)[QUESTIONS.index(question)]


@dataclass
class Stored:
    """A question in the cache: with an answer, or pending for a reason."""

    reason: str | None = None
    text: str | None = None
    versions: frozenset[str] = frozenset()
    promoted_from: str = ""
    sources: list[Source] = field(default_factory=list)

    def size(self, question):
        listed = json.dumps([astuple(source) for source in self.sources])
        chunks = json.dumps([f"{version}:0" for version in sorted(self.versions)] if self.text else [])
        texts = sum(len(part.encode()) for part in (question, self.text or "", listed, chunks))
        return 512 + vector(question).nbytes + texts

    def without_answer(self, reason):
        return Stored(reason) if self.text else self


class Broken(Exception):
    """Ends a transaction in its middle."""


class AnswerCacheMachine(RuleBasedStateMachine):
    """The answer cache beside a dictionary. Nothing is evicted from it."""

    limit_bytes = 10**9

    def __init__(self):
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.stored: dict[tuple[str, str], Stored] = {}
        self.shared: dict[tuple[str, str], bool] = {}  # asked, stored for → rejected
        self.given = self.promoted = self.rejected = self.changes = 0
        self.open()

    def open(self):
        self.database = Database(Path(self.folder.name) / "catalog.sqlite")
        self.cache = AnswerCache(self.database, self.limit_bytes)

    def teardown(self):
        self.database.close()
        self.folder.cleanup()

    def answer(self, question, recipe):
        return self.cache.stored(question, OPTIONS[recipe])

    def share(self, asked, stored):
        self.shared.setdefault((asked, stored), False)

    def entry(self, text, versions, promoted_from=""):
        return Stored(None, text, versions, promoted_from, [Source("/a.txt", 0, 4, "Ben paid Anna.", 0.5)])

    def provenance(self, versions):
        return AnswerProvenance(
            versions, tuple(f"{version}:0" for version in sorted(versions)), self.cache.epoch
        )

    @rule(question=QUESTION, recipe=RECIPE, text=TEXT, versions=VERSIONS, asked=st.booleans())
    def put(self, question, recipe, text, versions, asked):
        entry = self.entry(text, versions)
        arguments = (entry.text, entry.sources, self.provenance(versions))
        kept = self.cache.put(
            question, vector(question), OPTIONS[recipe], *arguments, asked=asked, ahead_s=2.0
        )
        assert kept == bool(text)
        if text:
            self.stored[question, recipe] = entry
            self.see_evictions()
            if found := self.answer(question, recipe):
                assert self.cache.ahead_s(found) == (None if asked else 2.0)

    @rule(question=QUESTION, recipe=RECIPE, asked=st.booleans())
    def add(self, question, recipe, asked):
        (self.cache.add_asked if asked else self.cache.add_predicted)(
            question, vector(question), OPTIONS[recipe]
        )
        self.stored.setdefault((question, recipe), Stored("asked" if asked else "predicted"))
        self.see_evictions()

    @rule(question=QUESTION, recipe=RECIPE)
    def mark_prefilled(self, question, recipe):
        self.cache.mark_prefilled(question, OPTIONS[recipe])
        entry = self.stored.get((question, recipe))
        if entry and entry.reason == "predicted":
            entry.reason = "prefilled"

    @rule(question=QUESTION, recipe=RECIPE, asked=OTHER)
    def record_hit(self, question, recipe, asked):
        if found := self.answer(question, recipe):
            self.cache.record_hit(found, asked, lambda: vector(asked))
            self.given += 1
            if asked != found.stored_for:
                self.share(asked, found.stored_for)
            self.stored.setdefault((asked, recipe), Stored("matched"))
            self.see_evictions()

    @rule(question=QUESTION, recipe=RECIPE, other=OTHER)
    def promote(self, question, recipe, other):
        found = self.answer(question, recipe)
        if found and other not in (question, found.stored_for):
            versions = self.stored[question, recipe].versions | {"v3"}
            judged = replace(found, judged=0.9)
            kept = self.cache.promote(other, vector(other), judged, self.provenance(versions), 1.0)
            entry = self.entry(found.text, versions, found.stored_for)
            self.stored[other, recipe] = replace(entry, sources=list(found.sources))
            self.see_evictions()
            assert kept == ((other, recipe) in self.stored)
            if kept:
                self.share(other, found.stored_for)
                self.promoted += 1

    @rule(asked=QUESTION)
    def reject(self, asked):
        expected = sorted(stored for (one, stored), no in self.shared.items() if one == asked and not no)
        assert sorted(self.cache.reject(asked)) == expected
        self.rejected += len(expected)
        self.shared |= {(asked, stored): True for stored in expected}
        for key, entry in self.stored.items():
            if key[0] == asked and entry.promoted_from:
                self.stored[key] = entry.without_answer("asked")

    @rule(gone=st.frozensets(st.sampled_from(["v1", "v2", "v3"]), max_size=1))
    def documents_changed(self, gone):
        lost = [key for key, entry in self.stored.items() if entry.versions & gone]
        assert self.cache.documents_changed(gone) == len(lost)
        self.changes += 1
        self.stored |= {key: self.stored[key].without_answer("changed") for key in lost}

    @rule(question=QUESTION, recipe=RECIPE)
    def invalidate(self, question, recipe):
        if found := self.answer(question, recipe):
            self.cache.invalidate(found)
            self.stored[question, recipe] = self.stored[question, recipe].without_answer("stale")

    @rule(questions=st.lists(QUESTION, max_size=2), recipe=st.none() | RECIPE)
    def delete(self, questions, recipe):
        self.cache.delete(questions, recipe and OPTIONS[recipe])
        for key in [(one, of) for one, of in self.stored if one in questions and recipe in (None, of)]:
            del self.stored[key]
        if recipe is None:
            self.shared = {key: no for key, no in self.shared.items() if key[1] not in questions}

    @precondition(lambda self: len(self.stored) > 3)
    @rule()
    def clear(self):
        self.cache.clear()
        self.stored, self.shared = {}, {}

    @rule(question=QUESTION, recipe=RECIPE)
    def fail_in_a_transaction(self, question, recipe):
        try:
            with self.cache.transaction():
                self.cache.documents_changed(["v1", "v2", "v3"])
                self.cache.clear()
                self.cache.add_asked(question, vector(question), OPTIONS[recipe])
                raise Broken
        except Broken:
            pass

    @rule()
    def reopen(self):
        self.database.close()
        self.open()

    def see_evictions(self):
        """Forget what the cache had no room for; here it has room for all."""

    @invariant()
    def answers_and_pending_questions_are_those_of_the_dictionary(self):
        for question in QUESTIONS:
            for recipe, options in OPTIONS.items():
                entry = self.stored.get((question, recipe), Stored())
                stored = self.answer(question, recipe)
                assert (stored and stored.text) == entry.text
                found = self.cache.find(question, lambda one=question: vector(one), options, 0.85)
                assert (found and found.text) == entry.text
                if stored:
                    assert stored.promoted_from == entry.promoted_from
                    assert {chunk.split(":")[0] for chunk in stored.chunks} == entry.versions
        waiting = {(each.question, each.options.recipe): each.reason for each in self.cache.pending()}
        assert waiting == {key: entry.reason for key, entry in self.stored.items() if entry.reason}
        answered = {(question, options.recipe) for question, options in self.cache.most_used()}
        assert answered == {key for key, entry in self.stored.items() if entry.text}

    @invariant()
    def totals_are_right(self):
        totals = self.cache.totals()
        assert totals.questions == len(self.stored) == totals.answered + totals.waiting
        counts = (totals.given, totals.promoted, totals.rejected, self.cache.epoch)
        assert counts == (self.given, self.promoted, self.rejected, self.changes)
        assert totals.bytes == sum(entry.size(question) for (question, _), entry in self.stored.items())
        assert totals.bytes <= self.limit_bytes


class SmallAnswerCacheMachine(AnswerCacheMachine):
    """The same with room for two questions or three."""

    limit_bytes = 2_000

    def see_evictions(self):
        left = {
            (question, recipe)
            for question, recipe in self.stored
            if self.database.query(
                "SELECT 1 FROM banked_questions WHERE question = ? AND circumstances = ?",
                (question, OPTIONS[recipe].cache_key()),
            )
        }
        if left != self.stored.keys():
            assert self.stored.keys() - left
            self.stored = {key: self.stored[key] for key in left}
            kept = {question for question, _ in left}
            promoted = {(key[0], entry.promoted_from) for key, entry in self.stored.items()}
            self.shared = {
                pair: no
                for pair, no in self.shared.items()
                if no or set(pair) <= kept or (pair[0] in kept and pair in promoted)
            }


HOW = settings(max_examples=20, stateful_step_count=40, deadline=None)
TestAnswerCache, TestSmallAnswerCache = AnswerCacheMachine.TestCase, SmallAnswerCacheMachine.TestCase
TestAnswerCache.settings = TestSmallAnswerCache.settings = HOW
