"""What vLLM with kvweave answers, against kvweave's transformers engine and against full prefill, on natural prompts.

    PYTHONPATH=../../lab/src python quality.py MODEL --prompts 40 --out quality.json

Both engines run in this process, over the same stored KV, which vLLM has captured. Each prompt is a question to natural documents with
the chunks that a search finds for it. `engine` compares vLLM with the transformers engine, both with the recipe: that both do the same.
`full` compares it with vLLM's own full prefill: what the recipe costs. Each has KL(other ‖ vLLM with the recipe) of the first token in
nats, the share of equal first tokens, and the share of greedy answers that are equal token for token. Intervals are 95 %, by bootstrap over
prompts, of shares Wilson's. The recipe `full` shows how far the engines themselves are apart.
"""

import argparse
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import kvweave
import kvweave_vllm
from in_process import InProcess, report
from kvweave.answering.generation import end_tokens
from kvweave.recipes.methods import in_any_storage, recipe_named
from kvweave.recipes.recipe import run
from kvweave_lab.eval.replies import generate_together
from kvweave_lab.statistics import interval_over_tasks, kl_divergence, share_of
from natural_prompts import CHUNK_TOKENS, NaturalCorpus, model_folder, word_vectors

ROOM_TOKENS = 256
"""Beside chunks and answer: instruction, question, chat template."""


class Reply(NamedTuple):
    """The logits of the first token (vocab,) and the greedy answer's tokens, without the one that ends it."""

    logits: Tensor
    answer: tuple[int, ...]


class Engines:
    """One vLLM with kvweave, and the transformers engine over the same model and store."""

    def __init__(
        self, folder: str, dtype: str, store: str, most_tokens: int, new_tokens: int, **settings: Any
    ) -> None:
        self._new_tokens, self._most_tokens = new_tokens, most_tokens
        self.vllm = InProcess(
            folder, dtype, store, most_tokens, max_logprobs=-1, logprobs_mode="raw_logits", **settings
        )
        self.adapter = kvweave.load_model(folder, dtype=dtype, device="cpu")
        self.tokenizer, self._ends = self.adapter.tokenizer, end_tokens(self.adapter)
        self.store = kvweave.ChunkStore(store)

    def prepare(self, corpus: NaturalCorpus, chunks: set[int], recipe: str) -> None:
        """Store the KV of some chunks of a corpus."""
        number = 0
        for document in corpus.documents:
            bodies = kvweave_vllm.preparations(
                self.tokenizer, document, recipe=recipe, context_tokens=self._most_tokens, embed=word_vectors
            )
            for _, body in zip(document, bodies, strict=True):
                if number in chunks:
                    self.vllm.generate(body)
                number += 1

    def in_vllm(self, chunks: Sequence[str], question: str, recipe: str, ratio: float | None) -> Reply:
        """Ask vLLM with kvweave, with nothing in vLLM's own cache."""
        body = kvweave_vllm.request(self.tokenizer, chunks, question, recipe=recipe, ratio=ratio)
        self.vllm.forget()
        first = self.vllm.generate(body, logprobs=-1)
        (found,) = first.logprobs
        logits = torch.empty(len(found))
        logits[list(found)] = torch.tensor([each.logprob for each in found.values()])
        return Reply(logits, self._answer(self.vllm.generate(body, self._new_tokens).token_ids))

    def in_transformers(
        self, chunks: Sequence[str], question: str, recipe: str, ratio: float | None
    ) -> Reply:
        """Ask kvweave's own engine."""
        prompt = self.adapter.template.render(kvweave.Prompt(question, tuple(chunks)))
        done = run(in_any_storage(recipe_named(recipe)), self.adapter, self.store, prompt, ratio=ratio)
        logits = done.logits[0].clone()
        (decoded,) = generate_together(
            self.adapter, [(done.kv_cache, prompt.token_ids, done.logits)], self._new_tokens
        )
        return Reply(logits, self._answer(decoded.ids))

    def close(self) -> None:
        """Close the store and end vLLM."""
        self.store.close()
        self.vllm.close()

    def _answer(self, ids: Sequence[int]) -> tuple[int, ...]:
        end = next((place for place, token in enumerate(ids) if token in self._ends), len(ids))
        return tuple(ids[:end])


def compared(truth: Reply, other: Reply) -> dict[str, float]:
    """Return how far a reply is from the true one."""
    size = min(len(truth.logits), len(other.logits))  # vLLM pads the vocabulary
    wanted, found = truth.logits[:size], other.logits[:size]
    return {
        "kl": kl_divergence(wanted, found),
        "same_first": float(wanted.argmax() == found.argmax()),
        "same_answer": float(truth.answer == other.answer),
        "largest_difference": float((wanted - found).abs().max()),
    }


def measure(engines: Engines, corpus: NaturalCorpus, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each recipe."""
    questions = corpus.questions[: args.prompts]
    found = {question: corpus.found(question, args.tokens // CHUNK_TOKENS) for question in questions}
    recipes = args.recipe or ["auto", "full"]
    for recipe in recipes:
        if recipe != "full":
            engines.prepare(corpus, {chunk for chunks in found.values() for chunk in chunks}, recipe)
    values: dict[str, dict[str, list[dict[str, float]]]] = {recipe: defaultdict(list) for recipe in recipes}
    for done, (question, numbers) in enumerate(found.items(), 1):
        chunks = [corpus.chunks[number] for number in numbers]
        full = engines.in_vllm(chunks, question, "full", None)
        for recipe in recipes:
            ratio = None if recipe == "full" else args.ratio
            own = full if recipe == "full" else engines.in_vllm(chunks, question, recipe, ratio)
            other = engines.in_transformers(chunks, question, recipe, ratio)
            values[recipe]["engine"].append(compared(other, own))
            values[recipe]["full"].append(compared(full, own))
        print(f"{done} of {len(found)} prompts", file=sys.stderr, flush=True)
    return [
        {
            "recipe": recipe_named(recipe).name,
            "prompts": len(found),
            **{against: summary(each) for against, each in own.items()},
        }
        for recipe, own in values.items()
    ]


def summary(values: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Return the mean KL, the shares, each with its interval, and the largest difference of a logit."""
    kl = interval_over_tasks([[each["kl"] for each in values]])
    shares = {name: share_of([each[name] for each in values]) for name in ("same_first", "same_answer")}
    return {
        "kl": asdict(kl),
        **{name: asdict(share) for name, share in shares.items() if share is not None},
        "largest_difference": max(each["largest_difference"] for each in values),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="folder or name, or one of `make real`")
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=1024, help="of a prompt's chunks")
    parser.add_argument("--documents", type=int, default=12, help="of 60, of about five chunks each")
    parser.add_argument("--new-tokens", type=int, default=32, help="most of an answer")
    parser.add_argument("--recipe", action="append", help="repeatable; default: auto and full")
    parser.add_argument("--ratio", type=float, help="default: the recipe's own")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--block-size", type=int, default=128, help="of vLLM's pages, in tokens")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(arguments)
    most_tokens = max(args.tokens, 7 * CHUNK_TOKENS) + ROOM_TOKENS + args.new_tokens
    with tempfile.TemporaryDirectory() as store:
        folder = model_folder(args.model)
        engines = Engines(folder, args.dtype, store, most_tokens, args.new_tokens, block_size=args.block_size)
        try:
            corpus = NaturalCorpus.first(engines.tokenizer, args.documents, args.seed)
            rows = measure(engines, corpus, args)
        finally:
            engines.close()
    report("quality.py", args, {"rows": rows})


if __name__ == "__main__":
    main()
