"""The generated part of lab/docs/answer-cache.md about predicted questions: what follows, the systems, and what became of predictions."""

from collections.abc import Mapping, Sequence

from markdown_parts import NOT_MEASURED, Result, table

from kvweave_lab.eval.question_matching import wilson_interval

OURS, WITHOUT, BEST_OTHER, PUBLISHED = (
    "kvweave",
    "kvweave without predictions",
    "RAGCache + MeanCache",
    "PerCache as published",
)
AIM_SERVED, AIM_FASTER = 0.15, 0.30


def predicted_questions(result: Result | None) -> str:
    """Return what people's questions got from predictions; from `kvweave eval prediction`."""
    if result is None:
        return NOT_MEASURED
    about, figures = result["about"], result["figures"]
    rows = {each["system"]: each for each in figures["systems"]}
    names = (
        "",
        "served from predictions",
        "from earlier questions",
        "wrong",
        "worse",
        "KV ready",
        "right",
        "mean",
        "idle",
    )
    shown = [
        (
            each["system"],
            *(
                f"{each[name]:.1%}"
                for name in ("served", "served_asked", "wrong", "worse", "ready", "contains")
            ),
            f"{each['mean_s']:.2f} s",
            f"{each['idle_s']:.0f} s, {each['idle_flops'] / 1e12:.1f} TFLOP" if each["idle_s"] else "–",
        )
        for each in figures["systems"]
    ]
    idle = [
        (kind, f"{took:.0f} s", f"{figures['idle_flops'][kind] / 1e12:.2f} TFLOP")
        for kind, took in figures["idle_s"].items()
    ]
    return "\n\n".join(
        (
            "\n".join(f"- {line}" for line in _findings(figures, rows)),
            f"{figures['questions']} questions of people to {about['documents']} documents of the {about['split']} split, "
            f"{about['settings'].get('model', 'the reference model')}, after a budget of {about['predictions']} predicted questions. "
            f"`{about['command']}`, {about['date']}, {about['commit']}.",
            "\n".join(table(names, shown)),
            "*wrong*: of all questions, those that got a stored answer which is not the one that the model computes for them. *worse*: "
            "those that got a stored answer without the right words, where the computed one has them. *right*: the answer contains one of "
            "the set's. Both rows of kvweave and RAGCache were run; the other rows differ from RAGCache's only in which stored "
            "answers they give, so they are derived from the same run and the same predictions. Their idle work is without other "
            "wordings, which are kvweave's.",
            "\n".join(table(("idle work", "seconds", "operations"), idle)),
            _fates(figures),
        )
    )


def _findings(figures: Result, rows: Mapping[str, Result]) -> list[str]:
    """Return what the figures say, against the aims."""
    own, without, other, published = (rows[name] for name in (OURS, WITHOUT, BEST_OTHER, PUBLISHED))
    faster, by_predictions = 1 - own["mean_s"] / other["mean_s"], 1 - own["mean_s"] / without["mean_s"]
    kept, dropped = sum(figures["predicted"].values()), sum(figures["dropped"].values())
    sure = wilson_interval(round(own["served"] * figures["questions"]), figures["questions"])
    return [
        f"**kvweave answers {own['served']:.1%} of people's questions from predictions** ({sure.low:.1%}–{sure.high:.1%}); the aim of {AIM_SERVED:.0%} is "
        f"{_reached(own['served'] >= AIM_SERVED)}. {own['wrong']:.1%} of all questions got a stored answer that is wrong.",
        f"PerCache as published answers {published['served']:.1%} from the same predictions and {published['served_asked']:.1%} from "
        f"earlier questions. {published['wrong']:.1%} of all questions got a wrong stored answer from it.",
        f"Idle work took {own['idle_s']:.0f} s: {kept} questions were kept, other wordings included, and {dropped} dropped, "
        f"{figures['dropped'].get('unsupported', 0)} of them because the model's answer was not the one that its question was made for, or "
        "is not in the retrieved text. So the model decides what prediction is worth: it does not answer what it asks.",
        f"kvweave's mean latency is {_compared(faster)} than that of RAGCache + MeanCache; the aim of {AIM_FASTER:.0%} is "
        f"{_reached(faster >= AIM_FASTER)}. That is KV reused at any position: with predictions the mean is {_compared(by_predictions)} "
        "than without.",
        f"Right answers: kvweave {own['contains']:.1%}, without predictions {without['contains']:.1%}, RAGCache "
        f"{rows['RAGCache']['contains']:.1%}, PerCache as published {published['contains']:.1%}. The difference between kvweave and "
        "RAGCache is what reuse at any position costs in answers here.",
    ]


def _reached(reached: bool) -> str:
    return "reached" if reached else "not reached"


def _compared(faster: float) -> str:
    return f"{faster:.1%} lower" if faster >= 0 else f"{-faster:.1%} higher"


def _fates(figures: Result) -> str:
    """Return what became of predicted questions, and what the matcher says of the nearest ones."""
    kept = _listed([f"{number} from {origin}" for origin, number in figures["predicted"].items()])
    dropped = _listed([f"{number} {reason}" for reason, number in figures["dropped"].items()])
    within = sum(figures["nearest"].values())
    said = _listed([f"{number} {said}" for said, number in figures["nearest"].items()])
    told = f" The matcher says of these pairs: {said}." if within else ""
    return (
        f"Kept: {kept}. Dropped: {dropped}. Of {figures['questions']} questions, {within} have a kept prediction within the "
        f"threshold.{told} The nearest predicted question, dropped ones included, has a cosine of {figures['median_cosine']:.2f} "
        f"(median) and {figures['greatest_cosine']:.2f} (greatest)."
    )


def _listed(parts: Sequence[str]) -> str:
    return ", ".join(parts) or "none"
