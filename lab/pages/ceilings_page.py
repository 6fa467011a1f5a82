"""The generated part of lab/docs/answer-cache.md about what a reader's predictions would serve."""

import math
from collections.abc import Sequence

from markdown_parts import Result, if_measured, table

AIM_SERVED = 0.15


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
        f"each asks what the set asks of its sentence; {AIM_SERVED:.0%} takes {even['draws_for_target']}.",
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


def _share(each: Result) -> str:
    low, high = each["share_interval"]
    return f"{each['count']} ({each['share']:.1%}, {low:.1%}–{high:.1%})"


def _cell(count: int, of: int) -> str:
    return f"{count} ({count / of:.1%})"
