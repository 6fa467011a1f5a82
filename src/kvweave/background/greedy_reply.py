"""A reply as a request would give it, decoded greedily, and what its prompt cost."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kvweave.answering.generation import Decoded, generate
from kvweave.answering.settings import AskOptions
from kvweave.kvstore.kv_store import KVStore
from kvweave.models.adapter import Adapter
from kvweave.models.attention import attention_modules
from kvweave.recipes.recipe import Recipe, run
from kvweave.results import Plan
from kvweave.types import TokenizedPrompt


@dataclass(frozen=True, slots=True)
class Reply:
    """A greedy reply, and the tokens that ran through the model for its prompt, as a share of the prompt's."""

    plan: Plan
    first_token: int
    ids: tuple[int, ...]
    text: tuple[str, str]
    passes: float

    @staticmethod
    def of(
        adapter: Adapter,
        store: KVStore,
        recipe: Recipe,
        prompt: TokenizedPrompt,
        options: AskOptions,
        drafts: Sequence[tuple[int, ...]] = (),
    ) -> "Reply":
        """Prefill and decode as a request does; `drafts` are verified in few passes and change nothing."""
        with counted_rows(adapter) as counted:
            result = run(recipe, adapter, store, prompt)
        most = min(
            options.max_new_tokens(adapter.geometry.context_tokens),
            max(1, adapter.geometry.context_tokens - prompt.tokens),
        )
        decoded = Decoded()
        for _ in generate(
            adapter,
            result.kv_cache,
            prompt.token_ids,
            result.logits,
            options.generation,
            most,
            decoded,
            drafts=drafts,
            form=prompt.reply,
        ):
            pass
        rows = counted[0] / (adapter.geometry.layers * prompt.tokens)
        text = decoded.reasoning, decoded.text.strip()
        return Reply(result.plan, int(result.logits.argmax()), tuple(decoded.ids), text, rows)


@contextmanager
def counted_rows(adapter: Adapter) -> Iterator[list[int]]:
    """Count the rows that go through each attention layer in this context and thread, in a list of one number.

    A layer that a selecting pass stops in, after its keys and values, does not count.
    """
    counted, thread = [0], threading.get_ident()

    def count(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if threading.get_ident() == thread:
            hidden = next(each for each in (*args, *kwargs.values()) if isinstance(each, Tensor))
            counted[0] += hidden.shape[-2]

    handles = [
        module.register_forward_hook(count, with_kwargs=True)
        for module in attention_modules(adapter.model).values()
    ]
    try:
        yield counted
    finally:
        for handle in handles:
            handle.remove()
