"""Folders with the results of evaluations that nobody has run."""

import json
from dataclasses import asdict, replace

from kvweave_lab.eval.outcomes import OutcomeLog
from kvweave_lab.eval.report import About, rows_json
from kvweave_lab.eval.rows import summary_rows
from lab_support.outcomes import CONFIG, OUTCOME

ABOUT = About(
    model="reference",
    dtype="float32",
    device="cpu",
    split="test",
    seeds=(0,),
    samples=2,
    left_out=0,
    chunk_tokens=96,
    context_tokens=(512,),
    command="kvweave eval --split test --output /somewhere/else/512",
    date="2026-01-02",
    version="0.1.0",
    minutes=1.0,
)


def outcomes(task="single", context_tokens=512, recipes=("naive",), prompts=2, **changes):
    """Return outcomes under full attention, reuse and some recipes; all but full attention fail every other prompt."""
    return [
        replace(
            OUTCOME,
            task=task,
            context_tokens=context_tokens,
            sample=f"{task}/{context_tokens}/{prompt}",
            recipe=recipe,
            ratio=1.0 if recipe == "full" else 0.0,
            score=1.0 if recipe == "full" else float(prompt % 2),
            **changes,
        )
        for prompt in range(prompts)
        for recipe in ("full", "reuse", *recipes)
    ]


def evaluated(folder, reported, *, more=(), config=CONFIG, **about):
    """Write a folder like `kvweave eval`; `more` is in its log and not in its report."""
    with OutcomeLog(folder, config) as log:
        for outcome in (*reported, *more):
            log.add(outcome)
    report = {"about": asdict(replace(ABOUT, **about)), "rows": rows_json(summary_rows(reported))}
    (folder / "rows.json").write_text(json.dumps(report))
    return folder
