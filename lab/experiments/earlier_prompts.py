"""Compares what a prompt can do about chunks that are not prepared: use the KV that earlier prompts left, or prepare them first.

    .venv/bin/python lab/experiments/earlier_prompts.py --output lab/results/earlier_prompts_gemma.json

Prompts of the natural benchmark (split dev). Before each, its chunks are in two other prompts, in random order among chunks that
retrieval would find with them. What these prompts left is KV that is exact there and stale here. Each row is a recipe, the KV of
its chunks, and its distance from full attention on the same prompt; computing everything anew has the distance 0.
"""

import random
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import chain, islice, zip_longest
from statistics import fmean
from typing import Any, Final

from experiment import (
    add_model,
    argument_parser,
    command_of,
    environment,
    rounded,
    run_script,
    shown_model,
    write_result,
)
from kvweave.embedding import TextEncoder
from kvweave.kvstore.memory_store import MemoryStore
from kvweave.models.adapter import Adapter
from kvweave.models.loading import load_model
from kvweave.recipes.context import ChunkList, Ids
from kvweave.recipes.methods import recipe_named
from kvweave.recipes.prepare import NotPrepared
from kvweave.recipes.recipe import Recipe, remember, run
from kvweave.types import Prompt
from kvweave_lab.eval.natural.measure import forced_logits, reference_ids
from kvweave_lab.eval.natural.prompts import NaturalPrompt, instruction, make_prompt
from kvweave_lab.eval.natural.questions import shipped_set
from kvweave_lab.eval.natural.run import NaturalBenchmark, Request
from kvweave_lab.eval.preparation import prepare_prompt
from kvweave_lab.statistics import kl_divergence

RATIO: Final = 0.1
EXAMPLES: Final = 3
LEFT: Final = "left by two earlier prompts"
"""The KV that this experiment is about."""


def recipes() -> Iterator[tuple[str, Recipe, float]]:
    """Yield the KV of the chunks, the recipe and its ratio."""
    for ratio in (0.0, RATIO):
        yield LEFT, replace(recipe_named("weave"), prepare=NotPrepared()), ratio
        for preparation in ("isolated", "woven"):
            yield preparation, recipe_named("weave", preparation), ratio


def main() -> None:
    """Run every prompt with every recipe."""
    parser = argument_parser(__doc__)
    add_model(parser)
    parser.add_argument("--context-tokens", type=int, default=1024)
    parser.add_argument("--prompts", type=int, default=60)
    options = parser.parse_args()
    adapter, system = load_model(options.model), instruction(EXAMPLES)
    request = Request(lengths=(options.context_tokens,), limit=options.prompts, examples=EXAMPLES)
    benchmark = NaturalBenchmark(adapter, request, shipped_set(), TextEncoder())
    corpus = benchmark.library.corpus(adapter.template)
    texts = {tuple(adapter.template.chunk_ids(each.text)): each.text for each in benchmark.library.chunks}
    measured: dict[tuple[str, float], list[dict[str, float]]] = {}
    for question in benchmark.questions:
        prompt = make_prompt(adapter, benchmark.library, question, options.context_tokens, system)
        left = earlier(adapter, prompt, corpus, texts, system)
        truth = answer(adapter, recipe_named("full"), 1.0, MemoryStore(), prompt)
        for kv, recipe, ratio in recipes():
            store = left
            if kv != LEFT:
                store = MemoryStore()
                prepare_prompt(adapter, store, prompt.tokens, recipe, corpus)
            logits = answer(adapter, recipe, ratio, store, prompt)
            likely = logits.double().log_softmax(-1)
            wanted = reference_ids(adapter, prompt) or (int(truth[0].argmax()),)
            measured.setdefault((kv, ratio), []).append(
                {
                    "kl": kl_divergence(truth, logits) / len(truth),
                    "first_kl": kl_divergence(truth[0], logits[0]),
                    "same_first": float(truth[0].argmax() == logits[0].argmax()),
                    "nll": -fmean(float(likely[place, token]) for place, token in enumerate(wanted)),
                    "nll_full": -fmean(
                        float(truth.double().log_softmax(-1)[place, token])
                        for place, token in enumerate(wanted)
                    ),
                }
            )
    rows: list[dict[str, Any]] = [
        {"kv": kv, "ratio": ratio, "prompts": len(found)}
        | {name: fmean(each[name] for each in found) for name in found[0]}
        for (kv, ratio), found in measured.items()
    ]
    for row in rows:
        print(row)
    about = {**environment(command_of(options)), "model": shown_model(options)}
    write_result(rounded({**about, "rows": rows}), options.output)


def earlier(
    adapter: Adapter, prompt: NaturalPrompt, corpus: ChunkList, texts: Mapping[Ids, str], system: str | None
) -> MemoryStore:
    """Return a store with what two prompts left that had the prompt's chunks, half of them each, among others."""
    own = [prompt.tokens.ids(span) for span in prompt.tokens.spans if span.kind == "chunk"]
    ranked = chain.from_iterable(zip_longest(*(corpus.similar(ids, len(own)) for ids in own)))
    others = list(
        islice(dict.fromkeys(ids for ids in ranked if ids is not None and ids not in own), len(own))
    )
    chance, store = random.Random(prompt.name), MemoryStore()
    chance.shuffle(own)
    chance.shuffle(others)
    recipe = recipe_named("prefix")
    for part in (0, 1):
        chunks = own[part::2] + others[part::2]
        chance.shuffle(chunks)
        shown = Prompt(prompt.question.text, tuple(texts[ids] for ids in chunks), system)
        remember(run(recipe, adapter, store, adapter.template.render(shown)))
    return store


def answer(adapter: Adapter, recipe: Recipe, ratio: float, store: MemoryStore, prompt: NaturalPrompt) -> Any:
    """Return the logits at each token of the reference answer, (T, vocab)."""
    result = run(recipe, adapter, store, prompt.tokens, ratio=ratio)
    if recipe.name != "full":
        assert all(span.origin != "fresh" for span in result.plan.spans if span.kind == "chunk"), result.plan
    return forced_logits(adapter, result, reference_ids(adapter, prompt))


if __name__ == "__main__":
    run_script(main)
