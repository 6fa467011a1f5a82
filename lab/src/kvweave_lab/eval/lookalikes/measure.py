"""Pairs through every matcher at every threshold: how many paraphrases hit, how many look-alikes do."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvweave.embedding import TextEncoder
from kvweave.engine.state import Progress
from kvweave.errors import InvalidRequest
from kvweave_lab.eval.lookalikes.matchers import MATCHERS, Matcher, Scores
from kvweave_lab.eval.lookalikes.pairs import Pair, make_pairs
from kvweave_lab.eval.results import Estimate

THRESHOLDS: Final = tuple(round(0.5 + 0.01 * step, 2) for step in range(50))
_Z: Final = 1.959964  # of a 95 % interval
_BATCH: Final = 512


@dataclass(frozen=True, slots=True)
class MatcherRow:
    """One matcher at one threshold; `is_default` is the one it comes with. Rates 0..1 with Wilson's 95 % intervals."""

    matcher: str
    threshold: float
    is_default: bool
    hit_rate: Estimate
    false_hit_rate: Estimate


@dataclass(frozen=True, slots=True)
class KindRow:
    """How many pairs of one kind a matcher lets through at the threshold it comes with."""

    matcher: str
    kind: str
    pairs: int
    accepted: int


@dataclass(frozen=True, slots=True)
class Lookalikes:
    """A whole evaluation: what was compared, the rows, and those by kind at each matcher's own threshold."""

    split: str
    seed: int
    embedding: str
    paraphrases: int
    lookalikes: int
    rows: tuple[MatcherRow, ...]
    kinds: tuple[KindRow, ...]

    def default(self, matcher: str) -> MatcherRow:
        """A matcher's row at the threshold it comes with."""
        return next(row for row in self.rows if row.matcher == matcher and row.is_default)


def run_lookalikes(
    encoder: TextEncoder,
    *,
    split: str,
    paraphrases: int,
    lookalikes: int,
    seed: int,
    progress: Progress = lambda stage, done, total: None,
) -> Lookalikes:
    """Make pairs and measure every matcher on them.

    Each pair is a bank of one question and one that is asked. Raises InvalidRequest for a split without a pool or
    without pairs of either sort, ModelNotFound for an embedding model that is not there.
    """
    if paraphrases < 1 or lookalikes < 1:
        raise InvalidRequest(
            f"{paraphrases} paraphrases and {lookalikes} look-alikes: at least one of each is needed"
        )
    pairs = make_pairs(split, paraphrases, lookalikes, seed)
    cosines = _cosines(pairs, encoder, progress)
    rows: list[MatcherRow] = []
    kinds: list[KindRow] = []
    for matcher in MATCHERS:
        scores = matcher.score(pairs, cosines)
        rows += _rows(matcher, pairs, scores)
        kinds += _kinds(matcher, pairs, scores)
    return Lookalikes(split, seed, encoder.name, paraphrases, lookalikes, tuple(rows), tuple(kinds))


def _cosines(pairs: Sequence[Pair], encoder: TextEncoder, progress: Progress) -> Scores:
    texts = list(dict.fromkeys(text for pair in pairs for text in (pair.cache_hit, pair.asked)))
    vectors = []
    for start in range(0, len(texts), _BATCH):
        progress("embedding questions", start, len(texts))
        vectors.append(encoder.encode(texts[start : start + _BATCH]))
    progress("embedding questions", len(texts), len(texts))
    stacked = np.concatenate(vectors)  # (texts, dimensions)
    places = {text: place for place, text in enumerate(texts)}
    cache_hit = stacked[[places[pair.cache_hit] for pair in pairs]]
    asked = stacked[[places[pair.asked] for pair in pairs]]
    cosines: Scores = np.einsum("pd,pd->p", cache_hit, asked).astype(np.float64)
    return cosines


def _rows(matcher: Matcher, pairs: Sequence[Pair], scores: Scores) -> list[MatcherRow]:
    same = np.array([pair.is_paraphrase for pair in pairs])
    rows = []
    for threshold in sorted({*THRESHOLDS, matcher.threshold}):
        hits = scores >= threshold
        rows.append(
            MatcherRow(
                matcher.name,
                threshold,
                threshold == matcher.threshold,
                share(int(hits[same].sum()), int(same.sum())),
                share(int(hits[~same].sum()), int((~same).sum())),
            )
        )
    return rows


def _kinds(matcher: Matcher, pairs: Sequence[Pair], scores: Scores) -> list[KindRow]:
    hits = scores >= matcher.threshold
    named = np.array([pair.kind for pair in pairs])
    return [
        KindRow(matcher.name, str(kind), int((named == kind).sum()), int(hits[named == kind].sum()))
        for kind in dict.fromkeys(pair.kind for pair in pairs)
    ]


def share(accepted: int, of: int) -> Estimate:
    """A share with Wilson's 95 % interval, which keeps its width where nothing or everything was accepted."""
    value = accepted / of
    middle = (value + _Z**2 / (2 * of)) / (1 + _Z**2 / of)
    half = _Z / (1 + _Z**2 / of) * math.sqrt(value * (1 - value) / of + _Z**2 / (4 * of**2))
    return Estimate(value, max(0.0, middle - half), min(1.0, middle + half))
