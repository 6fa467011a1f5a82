"""Measures what calibration finds for a model: how many first tokens and answers every budget keeps, and what is chosen.

    .venv/bin/python lab/experiments/calibrate.py --model FOLDER --document hall-minutes.md --document pump-manual.md \\
        --output lab/results/calibration.json

Documents and questions are those of `kvweave eval natural`, the questions drawn evenly from those whose evidence lies in the
documents; `--split` takes all documents of a split. With neither, the sample documents of `kvweave demo` and their questions, each
in WORDINGS. Every budget is measured on every question; `kvweave calibrate` leaves out those that have lost too many.
"""

import argparse
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

import kvweave
from experiment import argument_parser, command_of, environment, rounded, run_script, write_result
from kvweave.samples import DOCUMENTS, sample_questions
from kvweave.state.calibration_results import CalibrationResult, Trial, allowed_losses, chosen
from kvweave_lab.eval.natural.questions import SHIPPED, SPLITS, shipped_set
from recipe_grid import progress_printer

WORDINGS: Final = ("What is", "Which is", "Tell me what is")
"""The beginnings of a question about a sample document; its own is the first."""


def questions_about(documents: list[str], most: int) -> list[str]:
    """Return at most so many questions whose evidence lies in these documents, drawn evenly from all of them."""
    if not documents:
        about = [each.text.removeprefix(WORDINGS[0]) for each in sample_questions()]
        return [wording + rest for wording in WORDINGS for rest in about][:most]
    found = [
        each.text
        for each in shipped_set().questions
        if each.evidence and {one.doc for one in each.evidence} <= set(documents)
    ]
    return found[:: max(1, len(found) // most)][:most]


def under(verdict: CalibrationResult, share: float) -> Trial | None:
    """Return the combination that calibration would choose for this share of first tokens and answers, or None for `prefix`."""
    losses = allowed_losses(verdict.questions, share)
    trials = (
        replace(
            each, keeps=max(verdict.questions - each.first_tokens, verdict.questions - each.answers) <= losses
        )
        for each in verdict.trials
    )
    return chosen(trials)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Calibrate an empty home's knowledge base; nothing has to be kept, so that no budget is left out."""
    questions = questions_about(args.document, args.questions)
    with (
        tempfile.TemporaryDirectory() as home,
        kvweave.open(
            home=home,
            model=args.model,
            dtype=args.dtype or "auto",
            chunk_tokens=args.chunk_tokens,
            top_k=args.top_k,
            calibrate_first_tokens=0.0,
            calibrate_answers=0.0,
        ) as base,
    ):
        paths = [SHIPPED / "documents" / name for name in args.document]
        base.add(*(paths or [DOCUMENTS]))
        model, dtype = base.model.fingerprint.name, base.model.fingerprint.dtype
        verdict = base.calibrate(questions, progress_printer(model))
    best = under(verdict, args.share)
    return {
        "model": Path(model).name,
        "dtype": dtype,
        "chunk_tokens": args.chunk_tokens,
        "top_k": args.top_k,
        "documents": args.document,
        "questions": verdict.questions,
        "share": args.share,
        "chosen": None if best is None else [best.recipe, best.budget],
        "seconds": verdict.seconds,
        "passes": verdict.passes,
        "trials": [asdict(each) for each in verdict.trials],
    }


def main() -> None:
    """Measure, and write the result."""
    parser = argument_parser(__doc__)
    parser.add_argument("--model", help="hub id or folder; the shipped reference model without it")
    parser.add_argument(
        "--document",
        action="append",
        default=[],
        help="a document of kvweave eval natural, by its file name; repeatable. Default: the sample documents",
    )
    parser.add_argument("--questions", type=int, default=24, help="the most questions")
    parser.add_argument("--chunk-tokens", type=int, default=128)
    parser.add_argument("--top-k", type=int, default=4)
    parser.add_argument("--share", type=float, default=0.98, help="share of first tokens and answers to keep")
    parser.add_argument("--split", choices=SPLITS, help="all documents of this split of kvweave eval natural")
    parser.add_argument("--dtype", help="of the model; what kvweave takes on this machine without it")
    args = parser.parse_args()
    if args.split:
        own = (each for each in shipped_set().questions if each.split == args.split)
        args.document += sorted({one.doc for each in own for one in each.evidence} - set(args.document))
    result = measure(args)
    shown = {"model": args.model and Path(args.model).name, **({"document": []} if args.split else {})}
    named = argparse.Namespace(**{**vars(args), **shown})
    write_result(rounded({**environment(command_of(named)), **result}), args.output)


if __name__ == "__main__":
    run_script(main)
