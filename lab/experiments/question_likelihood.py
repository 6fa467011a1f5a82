"""How likely a language model thinks one question is after another one: the model's features of `learned_matcher.py`.

The prompt shows four questions, each put in other words, then the first question of a pair; scored are the tokens of the second. What the
second is worth alone is scored at the place of a first question, after the same examples. So the difference is what the model knows of
the pair, not how usual the words are.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
from transformers import DynamicCache

from kvweave.models.adapter import Adapter

EXAMPLES: Final = (
    "The same question in other words:\n"
    "Who keeps the key to the boat shed? -> In whose hands is the key of the boat shed?\n"
    "When does the library close on Sundays? -> library closing time Sunday\n"
    "How much did the new oven cost? -> hey, what did we pay for the new oven?\n"
    "Why was the trip to Bergen put off? -> What was the reason for postponing the Bergen trip?\n"
)
ARROW: Final = " ->"
BATCH: Final = 16

Key = tuple[str, str]
"""The first question, empty for none, and the one that is scored."""


class Likelihoods:
    """Mean log-likelihoods per token, in nats; kept in a file of JSON lines, so that an interrupted run resumes.

    Raises OSError where the file cannot be written.
    """

    def __init__(self, adapter: Adapter, path: Path) -> None:
        self._adapter, self._path = adapter, path
        lines = path.read_text("utf-8").splitlines() if path.exists() else []
        rows = [json.loads(line) for line in lines]
        self._known: dict[Key, float] = {(first, then): value for first, then, value in rows}
        self._head = adapter.tokenizer.encode(EXAMPLES)

    def of(self, keys: Sequence[Key]) -> list[float]:
        """Return the mean log-likelihood of each scored question's tokens."""
        missing = [(key, *self._tokens(key)) for key in dict.fromkeys(keys) if key not in self._known]
        missing.sort(key=lambda each: len(each[1]) + len(each[2]))  # little padding in a batch
        with self._path.open("a", encoding="utf-8") as file, torch.inference_mode():
            for start in range(0, len(missing), BATCH):
                batch = missing[start : start + BATCH]
                means = self._scored([(before, scored) for _, before, scored in batch])
                for (key, _, _), value in zip(batch, means, strict=True):
                    self._known[key] = value
                    file.write(json.dumps([*key, value], ensure_ascii=False) + "\n")
                file.flush()
        return [self._known[key] for key in keys]

    def _tokens(self, key: Key) -> tuple[list[int], list[int]]:
        first, then = key
        tokenizer = self._adapter.tokenizer
        if not first:
            return [], tokenizer.encode(then, add_special_tokens=False)
        return (
            tokenizer.encode(f"{first}{ARROW}", add_special_tokens=False),
            tokenizer.encode(f" {then}", add_special_tokens=False),
        )

    def _scored(self, batch: Sequence[tuple[list[int], list[int]]]) -> list[float]:
        """Return the means of token rows (before, scored), each after the examples."""
        head = self._head
        rows = [[head[-1], *before, *scored] for before, scored in batch]
        width = max(map(len, rows))
        ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
        model: Any = self._adapter.model
        # The examples but for their last token, which gives the first logits of a question that is scored alone.
        cache = self._examples()
        cache.batch_repeat_interleave(len(rows))
        states = model.model(input_ids=ids, past_key_values=cache, use_cache=True).last_hidden_state
        means = []
        for row, (before, scored) in zip(states, batch, strict=True):
            start = len(before)
            logits = model.lm_head(row[start : start + len(scored)]).float()
            chosen = logits.log_softmax(-1).gather(1, torch.tensor(scored)[:, None])
            means.append(float(chosen.mean()))
        return means

    def _examples(self) -> DynamicCache:
        """Return a new cache of the KV of the examples but for their last token."""
        model: Any = self._adapter.model
        cache = DynamicCache(config=model.config)
        model.model(input_ids=torch.tensor([self._head[:-1]]), past_key_values=cache, use_cache=True)
        return cache
