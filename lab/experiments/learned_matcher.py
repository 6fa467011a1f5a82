"""Measures whether a learned matcher serves more paraphrases than kvweave's at so few false hits: trained on two hands, tested on the third.

    .venv/bin/python lab/experiments/learned_matcher.py --likelihoods likelihoods.jsonl --output lab/results/learned_matcher.json

The three files of pairs as people ask have an author each, a hand. A matcher gives every pair a score, from groups of features:

- cosine: of the two vectors.
- words: how much the texts have in common, word by word and letter by letter, and whether numbers and names are equal.
- reading: what kvweave says, each verdict and veto as a feature of its own, and the features of its near stage.
- model: how much likelier a language model finds one question after the other one than alone, both ways (`question_likelihood.py`).

A threshold is chosen twice. *others*: on the two training files, by cross-validation, so that at most the wanted share of their look-alikes
passes; this is what a product could do. *own*: on the tested file itself, the most that any threshold could reach; no product can.

A fourth set is only tested on: the questions of `reader_predictions.py`, each with the nearest wording of the NEAREST predictions that are
nearest to it, as a cache would compare them. There most pairs are look-alikes that nobody made.

In the files most look-alikes keep the words of a question and most paraphrases do not, so a learned matcher may take other words for a
sign of the same meaning. Reworded look-alikes, a paraphrase beside a look-alike of the same question, show whether it does
(`near_questions.py` makes them). Some matchers are trained with them too.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GroupKFold
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from experiment import (
    add_model,
    argument_parser,
    command_of,
    environment,
    model_of,
    rounded,
    run_script,
    write_result,
)
from kvweave.answer_cache.english.alignment import FEATURES, features
from kvweave.answer_cache.english.context import questions_in
from kvweave.answer_cache.english.normalize import clean_text, difference, normalize
from kvweave.answer_cache.english.spelling import NUMBERS_AND_DATES
from kvweave.answer_cache.english.veto import certain_veto, kind_of_pair, veto
from kvweave.answer_cache.evidence import content_stems
from kvweave.answer_cache.matching import ENGLISH, plain_words
from kvweave.config import AnswersConfig
from kvweave.embedding import TextEncoder
from kvweave.models.loading import load_model
from kvweave_lab.eval.natural.questions import shipped_set
from kvweave_lab.eval.prediction.run import Request, choose
from kvweave_lab.eval.question_matching import text_cosines, wilson_interval
from near_questions import QUESTIONS, Pair, pairs_of
from question_likelihood import Likelihoods
from reader_predictions import DOCUMENTS, read_predictions

HANDS: Final = ("people_dev", "people_dev_more", "people_test")
READER: Final = "reader"
TESTED: Final = (*HANDS, READER)
NEAREST: Final = 3
RATES: Final = (0.001, 0.002, 0.005, 0.01)
"""Wanted shares of look-alikes that pass."""
FOLDS: Final = 10
SEED: Final = 0

Values = NDArray[np.float64]
Chosen = NDArray[np.bool_]


class Learned(NamedTuple):
    """A way to learn: the groups of features, the model, and whether reworded look-alikes are trained with."""

    groups: tuple[str, ...]
    make: Callable[[], Any]
    reworded: bool = False


def logistic() -> Any:
    """Return a logistic regression with an L2 penalty on standardised features."""
    return make_pipeline(StandardScaler(), LogisticRegression(C=0.3, max_iter=2000))


def boosting() -> Any:
    """Return gradient boosting of small trees."""
    return HistGradientBoostingClassifier(
        learning_rate=0.05,
        max_iter=200,
        max_leaf_nodes=8,
        min_samples_leaf=15,
        l2_regularization=1.0,
        random_state=SEED,
    )


_ALL: Final = ("cosine", "words", "reading", "model")
LEARNED: Final = {
    "logistic: cosine, words": Learned(_ALL[:2], logistic),
    "logistic: cosine, words, reading": Learned(_ALL[:3], logistic),
    "logistic: cosine, model": Learned(("cosine", "model"), logistic),
    "logistic: all": Learned(_ALL, logistic),
    "boosting: cosine, words, reading": Learned(_ALL[:3], boosting),
    "boosting: all": Learned(_ALL, boosting),
    "logistic: all, reworded look-alikes too": Learned(_ALL, logistic, reworded=True),
    "boosting: all, reworded look-alikes too": Learned(_ALL, boosting, reworded=True),
}


class Pool(NamedTuple):
    """All pairs, (pairs,), with their features, (pairs, features) by group."""

    same: Chosen
    reworded: Chosen
    hand: NDArray[np.str_]
    kind: NDArray[np.str_]
    question: NDArray[np.str_]
    features: dict[str, Values]
    at_once: Chosen
    near: Chosen

    @property
    def lookalike(self) -> Chosen:
        return ~self.same & ~self.reworded

    def others(self, hand: str) -> Chosen:
        """Return the pairs that a matcher is trained on which is tested on a hand."""
        others: Chosen = np.isin(self.hand, HANDS) & (self.hand != hand)
        return others


def readers_pairs(encoder: TextEncoder) -> list[Pair]:
    """Return each question of the set with the nearest wordings of a reader's predictions."""
    predicted = read_predictions()
    _, asked = choose(shipped_set(), Request(DOCUMENTS, len(predicted), "test"))
    texts = np.array([each.wordings for each in predicted])  # (predictions, wordings)
    vectors = encoder.encode(texts.ravel().tolist()).reshape(*texts.shape, -1)
    found = []
    for question, vector in zip(asked, encoder.encode([each.text for each in asked]), strict=True):
        cosines = vectors @ vector  # (predictions, wordings)
        for place in np.argsort(-cosines.max(axis=1))[:NEAREST]:
            stored = str(texts[place, cosines[place].argmax()])
            same = question.id in predicted[place].asked_by
            found.append(Pair(stored, question.text, same, READER, question.text, crossed=False))
    return found


def word_features(one: str, other: str) -> list[float]:
    """Return how much two cleaned questions have in common; symmetric."""
    words = [plain_words(text) for text in (one, other)]
    sets = [set(each) for each in words]
    stems = [set(content_stems([text])) for text in (one, other)]
    letters = [{text[at : at + 3] for at in range(len(text) - 2)} for text in (one.lower(), other.lower())]
    numbers = [{word for word in each if any(map(str.isdigit, word))} for each in sets]
    spelled = [each & NUMBERS_AND_DATES for each in sets]
    names = [{word for word in text.split()[1:] if word[:1].isupper()} for text in (one, other)]
    lengths = sorted(len(each) for each in words)
    return [
        *(_common(*each) for each in (sets, stems, letters)),
        *(_contained(*each) for each in (sets, stems)),
        *(float(len(each[0] ^ each[1])) for each in (sets, stems)),
        edits(one.lower(), other.lower()),
        edits(*words),
        *(float(each[0] == each[1]) for each in (numbers, spelled, names)),
        *(float(len(each[0] ^ each[1])) for each in (numbers, spelled, names)),
        lengths[0] / max(1, lengths[1]),
        float(lengths[1] - lengths[0]),
    ]


def _common(one: set[str], other: set[str]) -> float:
    return len(one & other) / max(1, len(one | other))


def _contained(one: set[str], other: set[str]) -> float:
    return len(one & other) / max(1, min(len(one), len(other)))


def edits(one: Sequence[str], other: Sequence[str]) -> float:
    """Return the Levenshtein distance of two sequences over the length of the longer one, 0..1."""
    row = list(range(len(other) + 1))
    for at, item in enumerate(one, 1):
        before, row[0] = row[0], at
        for place, there in enumerate(other, 1):
            before, row[place] = (
                row[place],
                min(row[place] + 1, row[place - 1] + 1, before + (item != there)),
            )
    return row[-1] / max(1, len(one), len(other))


def one_hot(values: Sequence[str]) -> Values:
    """Return a column for each value that occurs, (values, different values)."""
    names = sorted(set(values))
    return np.array([[value == name for name in names] for value in values], dtype=float)


def pool_of(pairs: Sequence[tuple[str, Pair]], likelihoods: Likelihoods) -> Pool:
    """Return the features of pairs, each with its hand."""
    threshold = AnswersConfig().answer_threshold
    texts = [(pair.one, pair.other) for _, pair in pairs]
    cosines = text_cosines(texts, TextEncoder())
    cleaned = [(clean_text(one), clean_text(other)) for one, other in texts]
    cores = [(questions_in(one)[-1], questions_in(other)[-1]) for one, other in cleaned]
    compared = [
        ENGLISH.compare(*both, float(cosine), threshold) for both, cosine in zip(texts, cosines, strict=True)
    ]
    aligned = [features(*core, float(cosine)) for core, cosine in zip(cores, cosines, strict=True)]
    own = [name not in ("cosine", "cosine above 0.6") for name in FEATURES]
    reading = [
        one_hot([f"{each.sameness}: {each.kind}" for each in compared]),
        *(one_hot([str(said(*core)) for core in cores]) for said in (certain_veto, veto, kind_of_pair)),
        one_hot([str(difference(*map(normalize, both))) for both in texts]),
        np.array(aligned)[:, own],
    ]
    return Pool(
        np.array([pair.same for _, pair in pairs]),
        np.array([pair.crossed for _, pair in pairs]),
        np.array([hand for hand, _ in pairs]),
        np.array([pair.kind for _, pair in pairs]),
        np.array([pair.question for _, pair in pairs]),
        {
            "cosine": cosines[:, None],
            "words": np.array([word_features(*both) for both in cleaned]),
            "reading": np.hstack(reading),
            "model": model_features(texts, likelihoods),
        },
        np.array([each.sameness == "same" for each in compared]),
        np.array([each.sameness != "different" for each in compared]),
    )


def model_features(texts: Sequence[tuple[str, str]], likelihoods: Likelihoods) -> Values:
    """Return symmetric features of each pair, (pairs, 8): likelihoods after the other question, and their gains over those alone."""
    keys = [key for one, other in texts for key in ((one, other), (other, one), ("", other), ("", one))]
    found = np.array(likelihoods.of(keys)).reshape(-1, 4)
    after, alone = found[:, :2], found[:, 2:]
    gained = after - alone
    return np.hstack([function(each) for each in (after, gained) for function in (_ends, _means)])


def _ends(values: Values) -> Values:
    return np.stack([values.min(axis=1), values.max(axis=1)], axis=1)


def _means(values: Values) -> Values:
    return np.stack([values.mean(axis=1), np.abs(values[:, 0] - values[:, 1])], axis=1)


def scores(pool: Pool, learned: Learned, hand: str) -> tuple[Values, Values]:
    """Return a score of a hand's pairs by a fit to the others, and of those by cross-validation; NaN elsewhere."""
    values = np.hstack([pool.features[group] for group in learned.groups])
    tested, others = pool.hand == hand, pool.others(hand)
    trained = others & (learned.reworded | ~pool.reworded)
    unseen, own = np.full(len(values), np.nan), np.full(len(values), np.nan)
    unseen[tested] = _fitted(learned, values[trained], pool.same[trained], values[tested])
    places = np.flatnonzero(others)
    folds = GroupKFold(FOLDS, shuffle=True, random_state=SEED)
    for known, held in folds.split(places, groups=pool.question[places]):
        rows = places[known][trained[places[known]]]
        own[places[held]] = _fitted(learned, values[rows], pool.same[rows], values[places[held]])
    return unseen, own


def _fitted(learned: Learned, values: Values, same: Chosen, asked: Values) -> Values:
    model = learned.make().fit(values, same)
    found: Values = model.decision_function(asked)
    return found


def threshold(values: Values, rate: float) -> float:
    """Return the threshold above which at most this share of look-alikes, with scores `values`, passes."""
    allowed = math.floor(rate * len(values))
    return float(np.sort(values)[::-1][allowed])


def passed(pool: Pool, accepted: Chosen, tested: Chosen) -> dict[str, Any]:
    """Return how many pairs of each sort are accepted among the tested ones, with Wilson's 95 % intervals."""
    found: dict[str, Any] = {}
    sorts = {"hits": pool.same, "false_hits": pool.lookalike, "reworded_false_hits": pool.reworded}
    for name, sort in sorts.items():
        of = int((sort & tested).sum())
        if of:
            count = int((accepted & sort & tested).sum())
            estimate = wilson_interval(count, of)
            found[name] = {
                "count": count,
                "of": of,
                "share": estimate.value,
                "interval": [estimate.low, estimate.high],
            }
    return found


def by_kind(pool: Pool, accepted: Chosen, tested: Chosen) -> dict[str, dict[str, list[int]]]:
    """Return of each kind of paraphrase and look-alike how many are accepted, and of how many."""
    return {
        f"{name}_by_kind": {
            str(kind): [int((accepted & chosen).sum()), int(chosen.sum())]
            for kind in dict.fromkeys(pool.kind[sort & tested])
            for chosen in [sort & tested & (pool.kind == kind)]
        }
        for name, sort in (("hits", pool.same), ("false_hits", pool.lookalike))
    }


def rows_of(pool: Pool, name: str, hand: str, unseen: Values, own: Values) -> list[dict[str, Any]]:
    """Return a matcher's rows for a tested hand: one for each wanted rate and each way to choose the threshold."""
    tested = pool.hand == hand
    rows = []
    for rate in RATES:
        for chosen, values, among in (("others", own, pool.others(hand)), ("own", unseen, tested)):
            least = threshold(values[among & pool.lookalike], rate)
            accepted = tested & (np.nan_to_num(unseen, nan=-np.inf) > least)
            row = {"tested": hand, "matcher": name, "rate": rate, "threshold_from": chosen}
            row |= passed(pool, accepted, tested)
            rows.append(row | (by_kind(pool, accepted, tested) if rate == RATES[0] else {}))
    return rows


def measured(pool: Pool) -> dict[str, Any]:
    """Return the rows of all matchers, and what so many pairs can show."""
    rows: list[dict[str, Any]] = []
    for hand in TESTED:
        tested = pool.hand == hand
        for name, accepted in (("kvweave, at once", pool.at_once), ("kvweave, near too", pool.near)):
            rows.append(
                {"tested": hand, "matcher": name, "rate": None, "threshold_from": "fixed"}
                | passed(pool, accepted, tested)
            )
        cosines = pool.features["cosine"][:, 0]
        rows += rows_of(pool, "cosine", hand, cosines, cosines)
        for name, learned in LEARNED.items():
            rows += rows_of(pool, name, hand, *scores(pool, learned, hand))
    return {
        "pairs": {
            hand: {
                "paraphrases": int((pool.same & (pool.hand == hand)).sum()),
                "lookalikes": int((pool.lookalike & (pool.hand == hand)).sum()),
                "reworded_lookalikes": int((pool.reworded & (pool.hand == hand)).sum()),
            }
            for hand in TESTED
        },
        "features": {name: values.shape[1] for name, values in pool.features.items()},
        "rows": rows,
    }


def main() -> None:
    """Score the pairs, train and test, and write the result."""
    parser = argument_parser(__doc__)
    add_model(parser)
    parser.add_argument(
        "--likelihoods", type=Path, default=Path("likelihoods.jsonl"), help="where an interrupted run resumes"
    )
    options = parser.parse_args()
    pairs = [(hand, pair) for hand in HANDS for pair in pairs_of([QUESTIONS / f"{hand}.jsonl"])]
    pairs += [(READER, pair) for pair in readers_pairs(TextEncoder())]
    pool = pool_of(pairs, Likelihoods(load_model(model_of(options)), options.likelihoods))
    write_result({**environment(command_of(options)), **rounded(measured(pool))}, options.output)


if __name__ == "__main__":
    run_script(main)
