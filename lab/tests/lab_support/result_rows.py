"""Outcomes from which rows of results are made."""

from kvweave_lab.eval.outcomes import Outcome, Trace


def outcome(task, sample, recipe, ratio, score, *, context_tokens=512, recomputed=0, selection=None):
    return Outcome(
        task=task,
        context_tokens=context_tokens,
        seed=0,
        sample=f"{task}/{context_tokens}/{sample}",
        recipe=recipe,
        ratio=ratio,
        answer="",
        score=score,
        agreement=score == 1,
        kl=1 - score,
        faithfulness=score / 2,
        rows=recomputed,
        selection=selection,
        trace=Trace(exact=0, stale=100, recomputed=recomputed, fresh=10, decoded=3),
        took_s=0.5,
    )
