"""What it costs to run scattered rows as one causal query, so that a row sees positions after its own.

    .venv/bin/python lab/experiments/causal_mask_cost.py --output lab/results/causal_mask_cost.json

Kernels for causal attention align their mask at the last key: of k queries over n keys, query i sees the first n − k + i + 1.
That is right for the last k rows of a prompt. An engine that passes k scattered rows as one such query lets nearly all of them
see nearly the whole prompt, and what a row sees depends on how many rows run with it. LMCache 0.5.6 (v1/compute/attention) and
UCM (ucm/sparse/blend) pass the selected rows in this way, as their source says; neither was run.

Every recipe runs on the same prompts of the natural benchmark with both masks. They select the same rows, since passes that
select have the right mask, and they start from the same stored KV. Answers are full attention's as far as they go. `difference`
is wrong − right, prompt by prompt. `later_share` is the share of the prompt's tokens that a selected row sees though they come
after it, by the mask's definition; the mean over rows and prompts.
"""

import argparse
import math
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import mean
from typing import Any, Self

import torch
from torch import Tensor

from experiment import (
    add_model,
    argument_parser,
    command_of,
    dtype_and_device,
    environment,
    rounded,
    run_script,
    shown_model,
    write_result,
)
from kvweave.cli.options import quiet_libraries
from kvweave.embedding import TextEncoder
from kvweave.models.attention import AttentionCall, RowPlan
from kvweave.models.hooks import AttentionHook
from kvweave.models.loading import load_model
from kvweave.recipes.methods import recipe_named
from kvweave.recipes.prefill_state import PrefillState
from kvweave.recipes.recipe import Recompute
from kvweave_lab.eval.natural.measure import NaturalRunner
from kvweave_lab.eval.natural.outcomes import REUSE_LABEL, NaturalLog, NaturalOutcome
from kvweave_lab.eval.natural.prompts import NaturalPrompt, instruction, make_prompt
from kvweave_lab.eval.natural.run import NaturalBenchmark, Request, read_request_set
from kvweave_lab.eval.outcomes import REUSE, Label
from kvweave_lab.eval.runner import Candidate
from kvweave_lab.statistics import interval_over_tasks, share_of
from recipe_grid import progress_printer

RECIPES = ("cacheblend", "epic", "weave")
RATIOS = (0.1, 0.15, 0.2)
WRONG = "-one-query"
"""Follows the name of a recipe whose rows run with the wrong mask."""
MEASURES = ("first_kl", "kl", "answer_kl", "agreed")
SHARES = ("same_first", "same_answer", "contains")


class OneQueryPlan(RowPlan):
    """The prompt positions `rows` (T,) attend as if they were the last T of `length` positions."""

    def __init__(self, rows: Tensor, dtype: torch.dtype, length: int) -> None:
        super().__init__(rows, dtype)
        self.as_if = torch.arange(length - rows.numel(), length, device=rows.device)

    def attend(self, call: AttentionCall) -> Tensor:
        """Return the attention of the rows' query (B, H, T, D) over the cache's keys and values (B, G, N, D)."""
        self.notify_hooks(call)
        return self._attend_causally(call, self.as_if)

    def subset(self, rows: Tensor) -> Self:
        """Return the same plan for some of its rows, each of which sees what it saw."""
        smaller = super().subset(rows)
        smaller.as_if = self.as_if[torch.isin(self.rows, rows)]
        return smaller


@dataclass(frozen=True, slots=True)
class OneQuery(Recompute):
    """All rows through all layers in one pass, as one causal query.

    `later` gets, of each pass, the mean over its selected rows of the share of the prompt that a row sees though it comes after it.
    """

    later: list[float] = field(default_factory=list, compare=False)

    def run(
        self, state: PrefillState, rows: Tensor, hooks: Sequence[AttentionHook], *, capture: bool
    ) -> Tensor:
        """Run one pass."""
        adapter, prompt = state.request.adapter, state.request.prompt
        plan = OneQueryPlan(rows.to(adapter.geometry.device), adapter.geometry.dtype, prompt.tokens)
        plan.hooks.extend(hooks)
        selected = ~torch.isin(plan.rows, state.fresh.to(plan.rows.device))
        if selected.any():
            self.later.append(float((plan.as_if - plan.rows)[selected].double().mean()) / prompt.tokens)
        return adapter.compute(state.kv_cache, prompt.token_ids, plan, capture=capture)


@dataclass(frozen=True, slots=True)
class Pair:
    """One recipe at one ratio with both masks; `later` is filled while the second one runs."""

    right: Candidate
    wrong: Candidate
    later: list[float]

    @classmethod
    def of(cls, name: str, ratio: float) -> Self:
        """Return the pair of a recipe."""
        recipe, query = recipe_named(name), OneQuery()
        other = replace(recipe, name=f"{recipe.name}{WRONG}", recompute=query)
        return cls(Candidate(recipe, ratio), Candidate(other, ratio), query.later)


def measure(
    runner: NaturalRunner,
    prompts: Sequence[NaturalPrompt],
    names: Sequence[str],
    ratios: Sequence[float],
    minutes: float = math.inf,
) -> dict[str, Any]:
    """Return the number of prompts, plain reuse's figures, and a row for each recipe and ratio."""
    ends = time.monotonic() + 60 * minutes
    pairs, report = [Pair.of(name, ratio) for name in names for ratio in ratios], progress_printer("prompts")
    tried = [
        Candidate(recipe_named(REUSE), 0.0),
        *(each for pair in pairs for each in (pair.right, pair.wrong)),
    ]
    found: dict[Label, list[NaturalOutcome]] = defaultdict(list)
    for done, prompt in enumerate(prompts, 1):
        for outcome in runner.outcomes(prompt, tried):
            found[outcome.label].append(outcome)
        report("prompts", done, len(prompts))
        if time.monotonic() > ends:
            break
    rows = []
    for pair in pairs:
        right, wrong = found[pair.right.label], found[pair.wrong.label]
        rows.append(
            {
                "recipe": pair.right.recipe.name,
                "ratio": pair.right.ratio,
                "later_share": mean(pair.later) if pair.later else None,  # None where nothing is stale
                "right": figures(right),
                "wrong": figures(wrong),
                "difference": differences(right, wrong),
            }
        )
    return {"prompts": done, "reuse": figures(found[REUSE_LABEL]), "rows": rows}


def figures(outcomes: Sequence[NaturalOutcome]) -> dict[str, Any]:
    """Return means and shares over prompts with 95 % intervals, the latter Wilson's."""
    means = {name: interval_over_tasks([_values(outcomes, name)]) for name in MEASURES}
    shares = {name: share_of([getattr(each, name) for each in outcomes]) for name in SHARES}
    return {name: None if each is None else asdict(each) for name, each in (means | shares).items()}


def differences(right: Sequence[NaturalOutcome], wrong: Sequence[NaturalOutcome]) -> dict[str, Any]:
    """Return wrong − right of every measure, prompt by prompt, with 95 % intervals by bootstrap."""
    return {
        name: asdict(
            interval_over_tasks(
                [[b - a for a, b in zip(_values(right, name), _values(wrong, name), strict=True)]]
            )
        )
        for name in (*MEASURES, "same_first", "same_answer")
    }


def _values(outcomes: Sequence[NaturalOutcome], name: str) -> list[float]:
    return [float(getattr(outcome, name)) for outcome in outcomes]


def main() -> None:
    parser = argument_parser(__doc__)
    add_model(parser)
    parser.set_defaults(
        model="qwen2.5-coder-0.5b"
    )  # without windows, as the models for which LMCache has code
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--context-tokens", type=int, default=1024)
    parser.add_argument("--chunk-tokens", type=int, default=256, help="of the longest chunk")
    parser.add_argument("--limit", type=int, default=40, help="number of questions")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no other prompt after so many")
    parser.add_argument("--answers", type=int, default=32, help="most tokens of an answer")
    parser.add_argument("--examples", type=int, default=3, help="worked examples before the context, 0 to 3")
    parser.add_argument("--distractors", type=int, default=0, help="pages of installed documentation")
    parser.add_argument("--split", default="test")
    parser.add_argument("--recipe", action="append", help=f"repeatable; default: {', '.join(RECIPES)}")
    parser.add_argument("--ratio", type=float, action="append", help=f"repeatable; default: {RATIOS}")
    args = parser.parse_args()
    quiet_libraries()
    write_result(rounded({**result(args), **environment(command_of(args))}), args.output)


def result(args: argparse.Namespace) -> dict[str, Any]:
    """Return the result without the environment."""
    request = Request(
        lengths=(args.context_tokens,),
        chunk_tokens=args.chunk_tokens,
        split=args.split,
        limit=args.limit,
        examples=args.examples,
        distractors=args.distractors,
        answers=args.answers,
    )
    adapter, content = load_model(args.model, dtype=args.dtype), read_request_set(request)
    benchmark = NaturalBenchmark(adapter, request, content, TextEncoder(None))
    library, system = benchmark.library, instruction(args.examples)
    prompts = [
        make_prompt(adapter, library, question, args.context_tokens, system, args.answers)
        for question in benchmark.questions
    ]
    corpus = library.corpus(adapter.template)
    runner = NaturalRunner(adapter, corpus, NaturalLog(None, {}), system=system, answers=args.answers)
    found = measure(runner, prompts, args.recipe or RECIPES, args.ratio or RATIOS, args.minutes)
    return {
        "model": shown_model(args),
        **dtype_and_device(adapter),
        "context_tokens": args.context_tokens,
        "chunk_tokens": args.chunk_tokens,
        "answer_tokens": args.answers,
        **found,
    }


if __name__ == "__main__":
    run_script(main)
