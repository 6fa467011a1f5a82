"""What a model answers when it reads a prompt as a whole: plain transformers, no recipe and nothing stored."""

from collections.abc import Sequence

import torch

from kvweave.models.adapter import Adapter
from kvweave.types import Prompt


def answer(adapter: Adapter, question: str, chunks: Sequence[str], max_new_tokens: int) -> str:
    """The greedy answer to a question behind chunks."""
    ids = torch.tensor([adapter.template.render(Prompt(question, chunks)).token_ids])
    with torch.no_grad():
        made = adapter.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, do_sample=False
        )
    return str(adapter.tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True)).strip()
