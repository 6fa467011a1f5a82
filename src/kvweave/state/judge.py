"""Judges with the model whether two questions ask the same, and finds from labelled pairs how sure of it the model must be.

A guard of words (`answer_cache/guard.py`) comes first. What it lets pass is put to the model behind worked examples, whose KV is
computed once. `judged_pairs.jsonl` has pairs of questions that pass the guard, each with its label; the threshold is set from the
model's scores of them.
"""

import hashlib
import json
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from kvweave.files import write_atomically
from kvweave.once import once
from kvweave.state.knowledge_base_state import Progress, no_progress
from kvweave.types import Message
from kvweave.version import __version__

if TYPE_CHECKING:
    from kvweave.models.adapter import Adapter
    from kvweave.models.fused_cache import FusedCache

_QUESTION: Final = "Is a correct answer to one always a correct answer to the other?"
_EXAMPLES: Final = (
    ("When does the library close on Saturdays?", "Until what time is the library open on a Saturday?", True),
    ("Who paid for the new roof?", "Who repaired the new roof?", False),
    ("How many chairs are in the hall?", "number of chairs hall", True),
    ("What does the visa cost for students?", "What is the fee of the visa for tourists?", False),
    (
        "Which medicine does the cat get in the evening?",
        "what's the stuff the cat has to take at night?",
        True,
    ),
    ("Where do the trains to Leeds stop?", "From where do trains come that stop in Leeds?", False),
)
"""Worked examples: two questions, and whether they ask the same."""

LOOKALIKES_PER_PARAPHRASE: Final = 0.2
"""How many look-alikes are taken to pass the guard for each paraphrase that does. Of 347 paraphrases and 1,106 look-alikes by another
author, 86 and 10 come to the judge, which is 0.12 (lab/docs/answer-cache.md)."""


@cache
def labelled_pairs() -> tuple[tuple[str, str, bool], ...]:
    """Return the pairs of questions that come with kvweave, and whether they ask the same."""
    found = (json.loads(line) for line in _pairs_text().splitlines())
    return tuple((each["a"], each["b"], each["same"]) for each in found)


def _pairs_text() -> str:
    return (resources.files(__package__) / "judged_pairs.jsonl").read_text("utf-8")


@cache
def _version() -> str:
    """Return a digest of all that a fit depends on besides the model."""
    text = json.dumps([_QUESTION, _EXAMPLES, __version__]) + _pairs_text()
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


class ScoredPair(NamedTuple):
    """The score of a labelled pair, and whether its questions ask the same."""

    score: float
    same: bool


@dataclass(frozen=True, slots=True)
class JudgeFit:
    """How a model scores the labelled pairs; no pairs if it cannot judge. `seconds` is how long that took."""

    model: str
    pairs: tuple[ScoredPair, ...]
    seconds: float

    @property
    def auc(self) -> float:
        """How often a pair that asks the same has a higher score than one that does not, 0..1; 0.5 is chance."""
        same, different = self._scores(same=True), self._scores(same=False)
        above = sum((one > other) + (one == other) / 2 for one in same for other in different)
        return above / max(1, len(same) * len(different))

    def threshold(self, bound: float, rejected: Sequence[float] = ()) -> float | None:
        """Return the least score at which the expected share of wrong answers is at most `bound`, 0..1, or None.

        It is the share among the answers that are given on the judge's word. One more look-alike has a higher score than `k` of `n`
        known ones with a probability of at most (k + 1)/(n + 1): a conformal bound, which holds for few pairs too. `rejected` are scores
        of answers that users said no to, which are known look-alikes as well.
        """
        same, different = self._scores(same=True), [*self._scores(same=False), *rejected]
        for number, least in enumerate(same):
            higher = sum(score >= least for score in different)
            wrong = LOOKALIKES_PER_PARAPHRASE * (higher + 1) / (len(different) + 1)
            right = (len(same) - number) / len(same)
            if wrong <= bound * (wrong + right):
                return least
        return None

    def summary(self, bound: float, rejected: Sequence[float] = ()) -> str:
        """Return one line about it for users."""
        if not self.pairs:
            return f"none: {self.model} has no tokens for Yes and No that can be told apart, or no room for worked examples"
        least = self.threshold(bound, rejected)
        if least is None:
            return (
                f"none: {self.model} does not judge well enough: AUC {self.auc:.2f}, and more than {bound:.1%} of the answers might be "
                "wrong (answer_error_bound)"
            )
        same = self._scores(same=True)
        taken = sum(score >= least for score in same)
        return (
            f"where {self.model} judges that they ask the same: AUC {self.auc:.2f}, {taken} of {len(same)} paraphrases; at most "
            f"{bound:.1%} of the answers are expected to be wrong (answer_error_bound)"
        )

    def _scores(self, *, same: bool) -> list[float]:
        """Return the scores of the pairs with this label, the lowest first."""
        return sorted(pair.score for pair in self.pairs if pair.same is same)


UNFITTED: Final = "none, until `kvweave calibrate` or idle time finds how well the model judges"


class JudgeFits:
    """The fits of all models that were tried, as files in `home`; a fit by other pairs or another wording does not count."""

    def __init__(self, home: Path) -> None:
        self._folder = home / "judges"

    def find(self, digest: str) -> JudgeFit | None:
        """Return the fit of the model with this digest of its fingerprint, or None."""
        try:
            stored = json.loads((self._folder / f"{digest}.json").read_bytes())
            if stored["version"] != _version():
                return None
            pairs = tuple(ScoredPair(*pair) for pair in stored["pairs"])
            return JudgeFit(stored["model"], pairs, stored["seconds"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def put(self, digest: str, fit: JudgeFit) -> None:
        """Store a fit; raises OSError."""
        stored = {"version": _version(), **asdict(fit)}
        write_atomically(self._folder / f"{digest}.json", [json.dumps(stored).encode()])


class Judge:
    """Scores pairs of questions with a model; threads may share it. `home` has the fits."""

    def __init__(self, adapter: "Adapter", home: Path) -> None:
        self._adapter, self._fits = adapter, JudgeFits(home)
        self._home, self._lock = home, threading.Lock()
        self._kept: tuple[str, FusedCache] | None = None  # of these weights
        self._scored: dict[int, float] = {}  # labelled pairs, by number, until all of them are

    @property
    def found(self) -> JudgeFit | None:
        """The fit of the model, or None before there is one."""
        return self._fits.find(self._adapter.fingerprint.digest)

    def apart(self) -> "Judge":
        """Return a judge with KV of its own, for work that yields to requests: these would wait for ever for KV that it uses."""
        return Judge(self._adapter, self._home)

    def fit(self, progress: Progress = no_progress, between: Callable[[], None] = lambda: None) -> JudgeFit:
        """Score the labelled pairs and store the fit, unless there is one; `between` is called before each pair.

        Stopped by an error, it continues with the pair it has come to.
        """
        if (known := self.found) is not None:
            return known
        own, scored = self.apart(), self._scored
        began, pairs = time.perf_counter(), labelled_pairs() if self.can_judge else ()
        for number, (one, other, _) in enumerate(pairs):
            if number not in scored:
                progress("judging pairs of questions", number, len(pairs))
                between()
                scored[number] = own.score(one, other)
        progress("judging pairs of questions", len(pairs), len(pairs))
        found = tuple(ScoredPair(scored[number], same) for number, (_, _, same) in enumerate(pairs))
        fingerprint = self._adapter.fingerprint
        made = JudgeFit(fingerprint.name, found, time.perf_counter() - began)
        self._fits.put(fingerprint.digest, made)
        return made

    @once
    def _examples(self) -> tuple[int, ...]:
        """The ids that all prompts begin with."""
        return _common(self.prompt_ids("Who?", "When?"), self.prompt_ids("Where?", "Why?"))

    @once
    def answer_ids(self) -> tuple[int, int] | None:
        """The ids that a "Yes" and a "No" begin with; None if the tokenizer does not tell these apart."""
        no, yes = (self.prompt_ids("Who?", "When?", last=answer) for answer in (False, True))
        at = len(_common(no, yes))
        return (yes[at], no[at]) if at < len(self._examples) else None

    @property
    def can_judge(self) -> bool:
        """Whether the model's tokens for "Yes" and "No" differ, and the worked examples leave room for questions."""
        room = self._adapter.geometry.context_tokens
        return self.answer_ids is not None and 2 * len(self._examples) <= room

    def score(self, one: str, other: str) -> float:
        """Return logit(yes) − logit(no) of the model, asked whether two questions ask the same; −∞ if they are too long for it."""
        import torch

        adapter, start, ids = self._adapter, self._examples, self.prompt_ids(one, other)
        assert self.answer_ids is not None
        if len(ids) > adapter.geometry.context_tokens:
            return -math.inf
        with self._lock:
            if self._kept is None or self._kept[0] != adapter.fingerprint.digest:
                kv_cache = adapter.new_cache(len(start), share=False)
                adapter.compute(kv_cache, start, adapter.rows(torch.arange(len(start))))
                self._kept = adapter.fingerprint.digest, kv_cache
            kept = self._kept[1]
            same_angles = adapter.rope_regime(len(start)) == adapter.rope_regime(len(ids))
            if same_angles and ids[: len(start)] == start:
                try:
                    logits = adapter.append(kept, ids[len(start) :])
                finally:
                    kept.truncate_appended(len(start))
            else:  # the frequencies depend on the length, or the tokenizer joins the questions to what stands before them
                whole = adapter.new_cache(len(ids), share=False)
                logits = adapter.compute(whole, ids, adapter.rows(torch.arange(len(ids))))
        yes, no = (float(logits[0, answer]) for answer in self.answer_ids)
        return yes - no

    def prompt_ids(self, one: str, other: str, last: bool = _EXAMPLES[-1][2]) -> tuple[int, ...]:
        """Return the ids of the prompt for two questions, in which the last worked example has the answer `last`."""
        *examples, (first, second, _) = _EXAMPLES
        messages = []
        for here, there, same in (*examples, (first, second, last)):
            messages += [Message("user", _asked(here, there)), Message("assistant", "Yes" if same else "No")]
        return self._adapter.template.render_chat([*messages, Message("user", _asked(one, other))])[0]


def _asked(one: str, other: str) -> str:
    return f"1. {one}\n2. {other}\n{_QUESTION}"


def _common(one: Sequence[int], other: Sequence[int]) -> tuple[int, ...]:
    """Return what two sequences begin with."""
    same = next(
        (n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )
    return tuple(one[:same])
