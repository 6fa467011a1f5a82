"""What the answer bank and prediction hold and have brought, for `cache stats`."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvweave.engine.engine import KnowledgeBase


def earned(base: "KnowledgeBase") -> dict[str, Any]:
    """The answer bank, predictions, and the idle time they took, as plain values."""
    from kvweave.engine.facts import facts

    predictions = base.outlook.ledger.totals()
    return {
        "answers": facts(base.answers.totals()),
        "predictions": {**facts(predictions), "given_per_question": predictions.given_per_question},
        "idle": facts(base.idle_record.totals()),
    }


def tell_earned(found: dict[str, Any]) -> None:
    """The same for people; nothing of prediction where there was none."""
    from kvweave.cli.show import STDOUT, amount, seconds, share

    answers, predictions, idle = found["answers"], found["predictions"], found["idle"]
    STDOUT.print(
        f"answers: {answers['answered']:,} of {answers['questions']:,} questions, {answers['waiting']:,} waiting, given "
        f"{answers['given']:,} times; {amount(answers['bytes'])} of {amount(answers['limit_bytes'])}"
    )
    kept = sum(predictions["predicted"].values())
    if kept or predictions["dropped"]:
        by_origin = ", ".join(
            f"{count:,} from {origin}" for origin, count in predictions["predicted"].items()
        )
        served = share(predictions["served"] / kept) if kept else "none"
        STDOUT.print(
            f"predicted: {kept:,} questions ({by_origin}), {predictions['dropped']:,} dropped as unanswerable; "
            f"{predictions['given']:,} answers given from them, {predictions['given_per_question']:.2f} a question, by "
            f"{served} of them"
        )
    if idle:
        spent_s = sum(kind["seconds"] for kind in idle.values())
        flops = sum(kind["flops"] for kind in idle.values())
        STDOUT.print(f"idle time: {seconds(spent_s)}, {flops / 1e12:.3g} TFLOPs")
