"""The generated parts of lab/docs/answer-cache.md about upper limits: predictions by a reader, and learned matchers."""

import math
from collections.abc import Iterable, Sequence

from markdown_parts import Result, if_measured, table

from kvweave_lab.eval.question_matching import wilson_interval

AIM_SERVED, AIM_HITS, AIM_FALSE = 0.15, 0.45, 0.001
DOUBT = 0.05
_OWN, _OTHERS = "own", "others"


@if_measured
def reader_predictions(result: Result) -> str:
    """Return how many questions a reader's predictions meet and serve (`lab/experiments/reader_predictions.py`)."""
    questions, even = result["questions"], result["drawn_evenly"]
    stored = list(dict.fromkeys(each["stored"] for each in result["rows"]))
    rows = {(each["stored"], each["way"]): each for each in result["rows"]}
    ways = dict.fromkeys(each["way"] for each in result["rows"])
    needed = math.ceil(AIM_SERVED * questions)
    pairs = result["right_pairs"]
    said = ", ".join(f"{number} {sameness}" for sameness, number in pairs["matcher_says"].items())
    kinds = ", ".join(f"{kind} {met} of {of}" for kind, (met, of) in result["expected_by_kind"].items())
    points = [
        f"**{_share(result['expected'])} of the {questions} questions ask what one of the {result['predictions']} predictions asks**; "
        f"{result['predictions_asked']} predictions are asked. That is the most that a perfect matcher could serve; {needed} of them would "
        f"reach {AIM_SERVED:.0%}. Another {result['turned']['count']} questions ask for another part of the same statement. By kind: {kinds}.",
        f"Without judgement: {_share(result['same_answer_in_the_document'])} of the questions have the answer of a prediction about their "
        f"document, {_share(result['evidence_overlaps'])} rest on words that one rests on too, {_share(result['either'])} either.",
        f"Of the {result['expected']['count']} right pairs, with the wording that suits best, the matcher says: {said}. Their cosine is "
        f"{pairs['median_cosine']:.2f} (median); {pairs['within_threshold']} reach τ.",
        f"Drawn evenly from the {even['sentences']} sentences, {result['predictions']} predictions meet {even['share_met']:.1%} at most, if "
        f"each asks what people ask of its sentence; {AIM_SERVED:.0%} takes {even['draws_for_target']}.",
    ]
    names = ("", *(f"{number} stored: {sort}" for number in stored for sort in ("right", "wrong")))
    met = result["expected"]["count"]
    cells: list[Sequence[str]] = [
        ("every right pair is seen", *(cell for _ in stored for cell in (_cell(met, questions), "0")))
    ]
    for way in ways:
        own = [rows[number, way] for number in stored]
        cells.append(
            (
                way,
                *(
                    cell
                    for each in own
                    for cell in (_cell(each["right"]["count"], questions), str(each["wrong"]["count"]))
                ),
            )
        )
    return "\n\n".join(
        (
            "\n".join(f"- {point}" for point in points),
            "\n".join(table(names, cells)),
            f"*right*: the stored question asks the same. {stored[0]}: the predictions; {stored[-1]}: two other wordings of each too. "
            f"*evidence checked*: kvweave's check that the passages found for the question hold the answer, with no bound on errors. "
            f"`{result['command']}`, {result['date']}, {result['commit']}.",
        )
    )


@if_measured
def learned_matchers(result: Result) -> str:
    """Return the rates of learned matchers on question authors not seen in training (`lab/experiments/learned_matcher.py`)."""
    rows = result["rows"]
    rates = sorted({each["rate"] for each in rows if each["rate"] is not None})
    parts = ["\n".join(f"- {point}" for point in _findings(result))]
    for hand, pairs in result["pairs"].items():
        own = [each for each in rows if each["tested"] == hand]
        reworded = pairs["reworded_lookalikes"]
        names = (
            f"tested on {hand}",
            *(f"{rate:.1%}, others" for rate in (rates[0], rates[-1])),
            *(["reworded"] if reworded else []),
            *(f"{rate:.1%}, own" for rate in rates),
        )
        parts.append("\n".join(table(names, _matchers(own, rates, reworded > 0))))
    sizes = "; ".join(
        f"{hand} {each['paraphrases']} paraphrases, {each['lookalikes']} look-alikes and {each['reworded_lookalikes']} reworded ones"
        for hand, each in result["pairs"].items()
    )
    parts.append(
        f"{sizes}. Cells: hits / false hits. *others*: the threshold that passes this share of the look-alikes of the two files that the "
        "matcher was trained on, in cross-validation. *reworded*: the share of reworded look-alikes that pass at the first of these. *own*: "
        "hits at the best threshold that passes this share on the tested file itself. "
        f"`{result['command']}`, {result['date']}, {result['commit']}."
    )
    return "\n\n".join(parts)


def _findings(result: Result) -> Iterable[str]:
    rows = [each for each in result["rows"] if each["rate"] == AIM_FALSE]
    learned = [each for each in rows if each["matcher"] != "cosine"]
    for hand in result["pairs"]:
        chosen = [each for each in learned if each["tested"] == hand and each["threshold_from"] == _OTHERS]
        kept = [each for each in chosen if each["false_hits"]["share"] <= AIM_FALSE]
        best = max(
            (each for each in learned if each["tested"] == hand and each["threshold_from"] == _OWN),
            key=lambda each: each["hits"]["count"],
        )
        told = (
            f"{len(kept)} of {len(chosen)} keep{'s' if len(kept) == 1 else ''} {AIM_FALSE:.1%}, with {min(each['hits']['share'] for each in kept):.1%} to "
            f"{max(each['hits']['share'] for each in kept):.1%} hits"
            if kept
            else f"none of {len(chosen)} keeps {AIM_FALSE:.1%}: false hits are {min(each['false_hits']['share'] for each in chosen):.1%} to "
            f"{max(each['false_hits']['share'] for each in chosen):.1%}"
        )
        yield (
            f"{hand}, thresholds from the others: {told}. With the best threshold of its own at most {best['hits']['share']:.1%} hits "
            f"({best['hits']['interval'][0]:.1%}–{best['hits']['interval'][1]:.1%}, {best['matcher']}); the aim is {AIM_HITS:.0%}."
        )
    sizes = [each["lookalikes"] for each in result["pairs"].values()]
    uppers = ", ".join(
        f"{errors} of {size:,} is up to {wilson_interval(errors, size).high:.2%}"
        for size in (min(sizes), max(sizes))
        for errors in (0, 1)
    )
    yield (
        f"So few look-alikes cannot show {AIM_FALSE:.1%}: {uppers} (95 %). It takes "
        f"{math.ceil(math.log(DOUBT) / math.log1p(-AIM_FALSE)):,} without any false hit."
    )


def _matchers(rows: Sequence[Result], rates: Sequence[float], reworded: bool) -> Iterable[Sequence[str]]:
    """Yield the cells of each matcher; one without a threshold has its rates in the first cell."""
    for name in dict.fromkeys(each["matcher"] for each in rows):
        own = {(each["rate"], each["threshold_from"]): each for each in rows if each["matcher"] == name}
        fixed = own.get((None, "fixed"))
        first = own[rates[0], _OTHERS] if fixed is None else fixed
        yield (
            name,
            _rates(first),
            "" if fixed is not None else _rates(own[rates[-1], _OTHERS]),
            *([f"{first['reworded_false_hits']['share']:.1%}"] if reworded else []),
            *("" if fixed is not None else f"{own[rate, _OWN]['hits']['share']:.1%}" for rate in rates),
        )


def _rates(each: Result) -> str:
    return f"{each['hits']['share']:.1%} / {each['false_hits']['share']:.2%}"


def _share(each: Result) -> str:
    low, high = each["share_interval"]
    return f"{each['count']} ({each['share']:.1%}, {low:.1%}–{high:.1%})"


def _cell(count: int, of: int) -> str:
    return f"{count} ({count / of:.1%})"
