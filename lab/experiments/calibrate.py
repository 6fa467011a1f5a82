"""Measures what calibration chooses for a model, on how many questions, and how long it takes.

    .venv/bin/python lab/experiments/calibrate.py --model qwen2.5-coder-0.5b --split dev \\
        --output lab/results/calibration_qwen2.5-coder-0.5b.json

Documents and questions are those of `kvweave eval natural`, the questions drawn evenly from those whose evidence lies in the
documents; `--split` takes all documents of a split. With neither, the sample documents of `kvweave demo` and their questions, each
in WORDINGS.
"""

import argparse
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import kvweave
from experiment import argument_parser, command_of, environment, rounded, run_script, write_result
from kvweave.samples import DOCUMENTS, sample_questions
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


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Calibrate a knowledge base whose chunks are not prepared."""
    questions = questions_about(args.document, args.questions)
    with (
        tempfile.TemporaryDirectory() as home,
        kvweave.open(
            home=home,
            model=args.model,
            dtype=args.dtype or "auto",
            chunk_tokens=args.chunk_tokens,
            top_k=args.top_k,
            calibrate_tokens=args.tokens,
            recipe="auto",
        ) as base,
    ):
        paths = [SHIPPED / "documents" / name for name in args.document]
        base.add(*(paths or [DOCUMENTS]), wait=False)
        model, dtype = base.model.fingerprint.name, base.model.fingerprint.dtype
        verdict = base.calibrate(questions, progress_printer(model))
    return {
        "model": Path(model).name,
        "dtype": dtype,
        "chunk_tokens": args.chunk_tokens,
        "top_k": args.top_k,
        "documents": args.document,
        "questions": verdict.questions,
        "tokens": args.tokens,
        "chosen": [verdict.recipe, verdict.budget],
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
    parser.add_argument("--chunk-tokens", type=int, default=512)
    parser.add_argument("--top-k", type=int, default=5)
    parser.add_argument("--tokens", type=float, default=0.95, help="share of the tokens of answers to keep")
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
