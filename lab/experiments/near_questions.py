"""Fits how likely two questions ask the same (`answer_cache/english/alignment.py`), and measures the fit by cross-validation.

    .venv/bin/python lab/experiments/near_questions.py --output lab/results/near_questions.json

Fitted to the pairs of two files, and to pairs made of them: a paraphrase of a question with each look-alike of the same question. Those
ask something else in other words, and no rule about how alike two questions look tells them. Pairs that share a question stay in one
fold. The fit takes no pair that a certain veto tells apart, and no typing errors or context, which have rules of their own.
"""

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize
from sklearn.model_selection import GroupKFold

from experiment import argument_parser, command_of, environment, run_script, write_result
from kvweave.answer_cache.english.alignment import FEATURES, features
from kvweave.answer_cache.english.context import questions_in
from kvweave.answer_cache.english.normalize import clean_text
from kvweave.answer_cache.english.veto import DOUBTS, certain_veto
from kvweave.answer_cache.matching import ENGLISH
from kvweave.config import AnswersConfig
from kvweave.embedding import TextEncoder
from kvweave_lab.eval.question_matching import text_cosines, wilson_interval

QUESTIONS: Final = Path(__file__).parents[1] / "src" / "kvweave_lab" / "eval" / "data" / "questions"
FOLDS, SEEDS = 10, (0, 1, 2, 3, 4)
OWN_RULES: Final = ("typos", "context")
REGULAR: Final = 0.3
"""Inverse strength of the regularization, of features scaled to a standard deviation of 1."""

FOR: Final = ("cosine", "cosine above 0.6", "derived", "synonyms", "numbers")
SIGNS: Final = tuple((name in FOR) - (name in DOUBTS) for name in FEATURES)

Values = NDArray[np.float64]
Chosen = NDArray[np.bool_]


class Pair(NamedTuple):
    """Two questions; `question` is the one both were made from, and `crossed` whether neither is that."""

    one: str
    other: str
    same: bool
    kind: str
    question: str
    crossed: bool


def pairs_of(files: Sequence[Path]) -> list[Pair]:
    """Return the pairs of the files and those made of them."""
    rows = [json.loads(line) for file in files for line in file.read_text("utf-8").splitlines()]
    found = [Pair(row["a"], row["b"], row["same"], row["kind"], row["a"], crossed=False) for row in rows]
    made: dict[str, list[Pair]] = defaultdict(list)
    for pair in found:
        made[pair.question].append(pair)
    for question, pairs in made.items():
        found += [
            Pair(two.other, one.other, same=False, kind=one.kind, question=question, crossed=True)
            for one in pairs
            for two in pairs
            if one.same and not two.same
        ]
    return found


def fitted(values: Values, same: Chosen) -> tuple[Values, float]:
    """Return a weight for each feature and a constant; values are (pairs, features).

    A logistic regression whose weights keep the signs of SIGNS: what speaks for sameness must not come to speak against it because
    look-alikes have it too.
    """
    scale = values.std(axis=0)
    scale[scale == 0] = 1
    scaled, signs = values / scale, np.where(same, 1.0, -1.0)

    def loss(weights: Values) -> tuple[float, Values]:
        margins = signs * (scaled @ weights[:-1] + weights[-1])
        slopes = -signs / (1 + np.exp(margins))
        gradient = np.append(scaled.T @ slopes + weights[:-1] / REGULAR, slopes.sum())
        return float(np.logaddexp(0, -margins).sum() + (weights[:-1] ** 2).sum() / (2 * REGULAR)), gradient

    bounds = [(0, None) if sign > 0 else (None, 0) if sign < 0 else (None, None) for sign in SIGNS]
    found = minimize(
        loss, np.zeros(len(SIGNS) + 1), jac=True, method="L-BFGS-B", bounds=[*bounds, (None, None)]
    )
    return found.x[:-1] / scale, float(found.x[-1])


def out_of_fold(values: Values, same: Chosen, questions: Sequence[str], train: Chosen, seed: int) -> Values:
    """Return the likelihood of each pair by a fit to other questions' pairs, (pairs,)."""
    likely = np.zeros(len(values))
    folds = GroupKFold(FOLDS, shuffle=True, random_state=seed)
    for known, unknown in folds.split(values, same, questions):
        known = known[train[known]]
        weights, constant = fitted(values[known], same[known])
        likely[unknown] = 1 / (1 + np.exp(-(values[unknown] @ weights + constant)))
    return likely


def curve(
    pairs: Sequence[Pair], likely: Sequence[Values], served: Chosen, always: Chosen
) -> list[dict[str, Any]]:
    """Return shares of paraphrases, look-alikes and reworded look-alikes that are near, for each least likelihood, and by kind.

    `served` are those at once; `always` those that other rules find near. Likelihoods are one array for each seed: a mean is taken.
    """
    same, crossed = (np.array([getattr(pair, name) for pair in pairs]) for name in ("same", "crossed"))
    kinds = np.array([pair.kind for pair in pairs])
    rows = []
    for least in (1.01, *(round(0.98 - 0.02 * step, 2) for step in range(45))):
        near = np.mean([served | always | (each >= least) for each in likely], axis=0)
        lookalikes = ~same & ~crossed
        false = round(float(near[lookalikes].sum()))
        rows.append(
            {
                "least_likelihood": least,
                "hits": float(near[same].mean()),
                "false_hits": float(near[lookalikes].mean()),
                "false_hits_at_most": wilson_interval(false, int(lookalikes.sum())).high,
                "reworded_false_hits": float(near[crossed].mean()),
                "hits_by_kind": {
                    kind: float(near[same & (kinds == kind)].mean()) for kind in sorted({*kinds[same]})
                },
                "false_hits_by_kind": {
                    kind: round(float(near[lookalikes & (kinds == kind)].sum()))
                    for kind in sorted({*kinds[lookalikes]})
                },
            }
        )
    return rows


def measured(pairs: Sequence[Pair], cosines: Values) -> tuple[dict[str, Any], Values, float]:
    """Return the result, and the weights and the constant that are fitted to all pairs."""
    threshold = AnswersConfig().answer_threshold
    cleaned = [(clean_text(pair.one), clean_text(pair.other)) for pair in pairs]
    cores = [(questions_in(one)[-1], questions_in(other)[-1]) for one, other in cleaned]
    values = np.array(
        [features(*core, float(cosine)) for core, cosine in zip(cores, cosines, strict=True)], dtype=float
    )
    compared = [
        ENGLISH.compare(pair.one, pair.other, float(cosine), threshold)
        for pair, cosine in zip(pairs, cosines, strict=True)
    ]
    same = np.array([pair.same for pair in pairs])
    told = np.array([certain_veto(*core) is not None for core in cores])
    timed = np.array([each.kind == "time" for each in compared])
    served = np.array([each.sameness == "same" for each in compared])
    always = np.array([each.sameness == "near" and each.kind == "context" for each in compared])
    train = ~told & ~timed & np.array([pair.kind not in OWN_RULES for pair in pairs])
    questions = [pair.question for pair in pairs]
    likely = [np.where(told | timed, 0, out_of_fold(values, same, questions, train, seed)) for seed in SEEDS]
    weights, constant = fitted(values[train], same[train])
    rows = curve(pairs, likely, served, always)
    return {"rows": rows, "pairs": len(pairs), "fitted_to": int(train.sum())}, weights, constant


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument(
        "--pairs", type=Path, action="append", help="default: both files of pairs as people ask"
    )
    args = parser.parse_args()
    pairs = pairs_of(args.pairs or [QUESTIONS / "people_dev.jsonl", QUESTIONS / "people_dev_more.jsonl"])
    cosines = text_cosines([(pair.one, pair.other) for pair in pairs], TextEncoder())
    result, weights, constant = measured(pairs, cosines)
    for name, weight in zip(FEATURES, weights, strict=True):
        print(f"{weight:7.2f}  {name}")
    print(f"{constant:7.2f}  constant")
    for row in result["rows"]:
        print(
            *(
                f"{row[name]:.3f}"
                for name in ("least_likelihood", "hits", "false_hits", "reworded_false_hits")
            )
        )
    write_result(result | environment(command_of(args)), args.output)


if __name__ == "__main__":
    run_script(main)
