"""Measures what the setting `check_answers` does: on questions that the documents do not answer, and on some that they do.

    .venv/bin/python lab/experiments/answer_check.py --output lab/results/answer_check.json

The documents and questions are those of `kvweave eval natural`, in one knowledge base; each question is asked of it as a user asks
it, with full attention. An answer counts as right if it contains the reference answer.
"""

import tempfile
from collections.abc import Sequence
from typing import Any

import kvweave
from experiment import (
    add_model,
    argument_parser,
    command_of,
    environment,
    rounded,
    run_script,
    write_result,
)
from kvweave.answering.ask import holds
from kvweave_lab.eval.metrics import string_match_part
from kvweave_lab.eval.natural.questions import SHIPPED, UNANSWERABLE, Question, shipped_set


def main() -> None:
    """Ask the questions and report what was given, refused and right."""
    parser = argument_parser(__doc__)
    parser.add_argument("--split", default="test", help="dev (to tune on) or test (to report)")
    parser.add_argument("--limit", type=int, default=40, help="questions of each kind")
    add_model(parser)
    options = parser.parse_args()
    asked = [question for question in shipped_set().questions if question.split == options.split]
    groups = {
        "unanswerable": [question for question in asked if question.kind == UNANSWERABLE],
        "answerable": spread(
            [question for question in asked if question.kind != UNANSWERABLE], options.limit
        ),
    }
    given = {"model": options.model, "recipe": "full", "answer_limit_bytes": 0, "max_new_tokens": 32}
    with (
        tempfile.TemporaryDirectory() as home,
        kvweave.open("natural", home=home, use_server=False, **given) as base,
    ):
        base.add(SHIPPED / "documents", wait=False)
        found = {name: outcome(base, each[: options.limit]) for name, each in groups.items()}
    write_result(
        {
            **environment(command_of(options)),
            "model": options.model,
            "split": options.split,
            **rounded(found),
        },
        options.output,
    )


def spread(questions: Sequence[Question], count: int) -> list[Question]:
    """Return so many questions, evenly over all documents."""
    step = max(1, len(questions) // count)
    return list(questions[::step][:count])


def outcome(base: "kvweave.KnowledgeBase", questions: Sequence[Question]) -> dict[str, Any]:
    """Return how many questions were asked, right without the check, given with it, and right among those."""
    right = given = both = 0
    for question in questions:
        answer = base.ask(question.text)
        good = bool(question.answers) and string_match_part(answer.text, list(question.answers)) > 0
        held = holds(question.text, answer.text, [source.text for source in answer.sources])
        right, given, both = right + good, given + held, both + (good and held)
    return {"questions": len(questions), "right": right, "given": given, "right_and_given": both}


if __name__ == "__main__":
    run_script(main)
