"""The generated parts of lab/docs/answer-cache.md about predicted questions: what each stage loses, systems, kept and dropped predictions."""

from collections.abc import Iterable, Mapping, Sequence

from markdown_parts import NOT_MEASURED, Result, if_measured, table

from kvweave.config import AnswersConfig
from kvweave_lab.statistics import wilson_interval

OURS, WITHOUT, BEST_OTHER, PUBLISHED = (
    "kvweave",
    "kvweave without predictions",
    "RAGCache + MeanCache",
    "PerCache as published",
)
AIM_SERVED, AIM_FASTER = 0.15, 0.30
FUNNEL_FILES = tuple(f"prediction_{model}.json" for model in ("qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b"))


def prediction_funnels(measured: Iterable[Result | None]) -> str:
    """Return of each measured model how many of the set's questions are left after each stage, and which one loses how many."""
    return "\n\n".join(_funnel(result) for result in measured if result is not None) or NOT_MEASURED


def _funnel(result: Result) -> str:
    about, figures = result["about"], result["figures"]
    found = figures["funnel"]
    number, predicted = found["questions"], found["predicted"]
    default = f"kvweave {AnswersConfig().answer_error_bound:g}"
    served = next(each["right"] for each in found["rows"] if each["system"] == default)
    kept = sum(figures["predicted"].values())
    made = kept + sum(figures["dropped"].values())
    stages = (
        ("predicted, by the answer", predicted, predicted),
        ("the same or near, and not told apart by the guard", found["matched"], found["matched_right"]),
        ("and the passages hold the answer", found["held"], found["held_right"]),
        *(
            (f"served: {each['system']}", each["right"] + each["wrong"], each["right"])
            for each in found["rows"]
        ),
    )
    rows = [
        (name, f"{count}", f"{right} ({right / number:.1%})", f"{count - right}")
        for name, count, right in stages
    ]
    ready = {each["system"]: each["ready"] for each in found["rows"]}
    near = ", ".join(f"{count} within {least}" for least, count in found["within"].items())
    auc = "was asked about no pair" if found["auc"] is None else f"has an AUC of {found['auc']:.2f}"
    return "\n\n".join(
        (
            f"**{about['settings']['model']}**: {made} questions predicted from {about['documents']} documents, {kept} kept and answered, in "
            f"{sum(figures['idle_s'].values()):.0f} s; {number} questions asked, of the {about['split']} split. `{about['command']}`, "
            f"{about['date']}, {about['commit']}, {about['machine']}, {about['threads']} threads.",
            "\n".join(table(("stage", "questions", "right answer", "wrong"), rows)),
            f"Of {number} questions, prediction loses {number - predicted}, matcher and guard {predicted - found['matched_right']}, the passages "
            f"{found['matched_right'] - found['held_right']}, the judge {found['held_right'] - served}; {served} are served rightly. The nearest "
            f"prediction, dropped ones included, is near to few: {near}. The judge {auc}. Dropped: "
            f"{_listed([f'{count} {reason}' for reason, count in figures['dropped'].items()])}. KV was all ready for {ready[default]:.0%} of "
            f"the questions in kvweave and {ready[PUBLISHED]:.0%} in PerCache as published. kvweave's number is answer_error_bound.",
        )
    )


@if_measured
def predicted_questions(result: Result) -> str:
    """Return the results of `kvweave eval prediction`: how many of the set's questions predictions serve, by system."""
    about, figures = result["about"], result["figures"]
    rows = {each["system"]: each for each in figures["systems"]}
    names = (
        "",
        "served from predictions",
        "from earlier questions",
        "wrong",
        "worse",
        "KV ready",
        "of its tokens",
        "right",
        "mean",
        "idle",
    )
    shown = [
        (
            each["system"],
            *(
                f"{each[name]:.1%}"
                for name in ("served", "served_asked", "wrong", "worse", "ready", "ready_tokens", "contains")
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
            "\n".join(f"- {line}" for line in _findings(result, rows)),
            f"{figures['questions']} questions, written for this project, to {about['documents']} documents of the {about['split']} split, "
            f"{about['settings'].get('model', 'the reference model')}, after a budget of {about['predictions']} predicted questions. "
            f"`{about['command']}`, {about['date']}, {about['commit']}.",
            "\n".join(table(names, shown)),
            "*wrong*: of all questions, those that got a stored answer which is not the one that the model computes for them. *worse*: "
            "those that got a stored answer without the right words, where the computed one has them. *right*: the answer contains one of "
            "the set's. Both rows of kvweave and RAGCache were run; the other rows differ from RAGCache's only in which stored "
            "answers they give, so they are derived from the same run and the same predictions. Their idle work is without other "
            "wordings, which are kvweave's. *KV ready*: questions whose chunks' KV was all there when they were asked, and beside it the mean "
            "share of the chunks' tokens whose KV was. PerCache keeps the exact KV of predicted prompts too, dropped ones included: it is "
            f"counted there, and not in its mean latency.{_later(about)} No idle time "
            "passes between questions, so nobody predicts from earlier ones. Times are from one thread of a machine that did other work; each "
            "arm was asked first as often as the others.",
            "\n".join(table(("idle work", "seconds", "operations"), idle)),
            _fates(figures),
        )
    )


def _later(about: Mapping[str, str]) -> str:
    """Return the note on numbers that were counted after the run, or nothing."""
    return f" {about['kv_ready']}." if "kv_ready" in about else ""


def _findings(result: Result, rows: Mapping[str, Result]) -> list[str]:
    """Return the main results, compared with the aims."""
    figures = result["figures"]
    own, without, other, published = (rows[name] for name in (OURS, WITHOUT, BEST_OTHER, PUBLISHED))
    number, served = figures["questions"], own["served"]
    sure = wilson_interval(round(served * number), number)
    faster, by_predictions = 1 - own["mean_s"] / other["mean_s"], 1 - own["mean_s"] / without["mean_s"]
    kept, dropped = sum(figures["predicted"].values()), sum(figures["dropped"].values())
    cosines = f"{figures['median_cosine']:.2f} (median), at most {figures['greatest_cosine']:.2f}"
    missing = (
        " So the questions of the set were not among those predicted, and no matcher had anything to refuse."
        if not published["served"]
        else ""
    )
    mine, theirs = _right_alone(result["questions"])
    return [
        f"**kvweave answers {served:.1%} of the set's questions from predictions** ({sure.low:.1%}–{sure.high:.1%}); the aim of "
        f"{AIM_SERVED:.0%} is {_reached(served >= AIM_SERVED)}. {own['wrong']:.1%} of all questions got a stored answer that is wrong.",
        f"PerCache as published answers {published['served']:.1%} from the same predictions and {published['served_asked']:.1%} from "
        f"earlier questions; {published['wrong']:.1%} of all questions got a wrong stored answer from it. The predicted question that is "
        f"nearest to one of the set has a cosine of {cosines}; answers take 0.85.{missing}",
        f"Of {kept + dropped} predicted questions, other wordings included, {kept} were kept. "
        f"{figures['dropped'].get('unsupported', 0)} were dropped since the model's answer was not the one that the question was made for, or not in the "
        "retrieved text. So it is what the model can ask and answer that limits prediction here.",
        f"KV was ready for {own['ready']:.1%} of questions in kvweave, {published['ready']:.1%} in PerCache as published and "
        f"{rows['RAGCache']['ready']:.1%} in RAGCache; of the chunks' tokens {own['ready_tokens']:.1%}, {published['ready_tokens']:.1%} "
        f"and {rows['RAGCache']['ready_tokens']:.1%}.",
        f"kvweave's mean latency is {_compared(faster)} than that of RAGCache + MeanCache, all decoding alike; the aim of "
        f"{AIM_FASTER:.0%} is {_reached(faster >= AIM_FASTER)}, by KV that is reused at any position. "
        + (
            f"With predictions it is {_compared(by_predictions)} than without."
            if served
            else f"Predictions have no part in it: kvweave's two rows differ by {abs(by_predictions):.1%}, which is noise."
        ),
        f"Right answers: kvweave {own['contains']:.1%}, without predictions {without['contains']:.1%}, RAGCache "
        f"{rows['RAGCache']['contains']:.1%}, PerCache as published {published['contains']:.1%}. {mine} questions are right with kvweave alone, "
        f"{theirs} with RAGCache alone, whose prompts are computed with full attention.",
    ]


def _right_alone(questions: Sequence[Result]) -> tuple[int, int]:
    """Return how many questions only kvweave answers right, and how many only RAGCache."""
    right = {
        arm: {each["question"] for each in questions if each["arm"] == arm and each["contains"]}
        for arm in ("predicted", "prefix")
    }
    return len(right["predicted"] - right["prefix"]), len(right["prefix"] - right["predicted"])


def _reached(reached: bool) -> str:
    return "reached" if reached else "not reached"


def _compared(faster: float) -> str:
    return f"{faster:.1%} lower" if faster >= 0 else f"{-faster:.1%} higher"


def _fates(figures: Result) -> str:
    """Return how many predictions were kept and dropped, and how near the nearest ones are."""
    kept = _listed([f"{number} from {origin}" for origin, number in figures["predicted"].items()])
    dropped = _listed([f"{number} {reason}" for reason, number in figures["dropped"].items()])
    return (
        f"Kept: {kept}. Dropped: {dropped}. The nearest predicted question, dropped ones included, has a cosine of {figures['median_cosine']:.2f} "
        f"(median) and {figures['greatest_cosine']:.2f} (greatest)."
    )


def _listed(parts: Sequence[str]) -> str:
    return ", ".join(parts) or "none"
