"""The two models of a distillation, each with a tokenizer of its own: the same documents as rows of both, and what
each attends to in them. Knows nothing of training steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812  torch's own name for it
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

from kvweave.models.adapter import Adapter
from kvweave.ops.scores import Offsets, carry
from kvweave_lab.eval.draft import Question
from training.documents import Document
from training.network import hidden_states, product_dtype, question_attention, rotation
from training.plan import CONTEXT, THETA
from training.rows import question_ids


@dataclass(slots=True)
class Row:
    """One document with questions under one tokenizer; tensors are (T,), T = context + questions.

    Attributes:
        ids, positions, segments: as in `training.rows.Rows`.
        users: k for the own words of the k-th question, 0 elsewhere.
        answers: 1 for an answer's tokens, 0 elsewhere.
        chunks: (context,) which tokens are the chunks'.
        offsets: which characters those stand for.
    """

    ids: Tensor
    positions: Tensor
    segments: Tensor
    users: Tensor
    answers: Tensor
    chunks: Tensor
    offsets: Offsets

    @classmethod
    def empty(cls, context: int, questions: int, offsets: Offsets) -> "Row":
        """A row with nothing in it yet."""
        ids, positions, segments, users, answers = torch.zeros(5, context + questions, dtype=torch.long)
        return cls(ids, positions, segments, users, answers, torch.zeros(context).bool(), offsets)


class Side:
    """One of the two models with its tokenizer: makes rows and runs over them.

    Args:
        model: the model; its weights are used where they are.
        tokenizer: its own.
        shape: tokens of a row's context and of its questions.
    """

    def __init__(
        self, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, shape: tuple[int, int]
    ) -> None:
        self.adapter, self.model, self.shape = Adapter(model, tokenizer), model, shape
        self._end = tokenizer.eos_token_id
        self._rotation = rotation(CONTEXT, model.config.head_dim, THETA)
        self._attend = torch.compile(self._attention, dynamic=False)
        self._read = torch.compile(self._states, dynamic=False)

    def row(self, document: Document, questions: Sequence[Question]) -> Row | None:
        """A row, or None if document and questions do not fit."""
        template, (context, asked) = self.adapter.template, self.shape
        prefix = template.prefix_ids(None)
        ids = [*prefix, *(token for chunk in document.chunks for token in template.chunk_ids(chunk))]
        offsets = template.context_offsets(document.chunks)
        length = len(ids)
        if length > context or offsets is None:
            return None
        made = Row.empty(context, asked, offsets)
        made.ids[:length] = torch.tensor(ids)
        made.chunks[len(prefix) : length] = True
        made.segments[length:] = -1
        made.positions[:length] = torch.arange(length)
        return made if self._write(made, questions, length) else None

    def _write(self, made: Row, questions: Sequence[Question], length: int) -> bool:
        """Questions behind a context of `length` tokens; False if there is no room for all."""
        template, at = self.adapter.template, self.shape[0]
        for number, question in enumerate(questions, 1):
            lead, user = question_ids(template, question.text)
            ids = [*lead, *template.text_ids(question.reply), self._end]
            end = at + len(ids)
            if end > len(made.ids):
                return False
            made.ids[at:end] = torch.tensor(ids)
            made.positions[at:end] = torch.arange(length, length + len(ids))
            made.segments[at:end] = number
            made.users[at:end][user] = number
            made.answers[at + len(lead) : end] = 1
            at = end
        return True

    def attention(self, rows: Sequence[Row], questions: int) -> Tensor:
        """What each question's own words attend to: (B, questions, context), a distribution over the chunks."""
        weights = self._attend(*self._stacked(rows), torch.stack([row.chunks for row in rows]))
        users = torch.stack([row.users[self.shape[0] :] for row in rows])
        of_question = (users[:, None] == torch.arange(1, questions + 1)[:, None]).to(weights.dtype)
        return of_question @ weights / of_question.sum(-1, keepdim=True).clamp(min=1)

    def answer_loss(self, rows: Sequence[Row]) -> Tensor:
        """Cross-entropy of the answers' tokens."""
        states = self._read(*self._stacked(rows)).flatten(0, 1)
        places = torch.cat([row.answers for row in rows]).nonzero()[:, 0]
        ids = torch.cat([row.ids for row in rows])
        dtype = product_dtype(states.device)
        embedding = self.model.model.embed_tokens.weight.to(dtype)
        logits = F.linear(states[places - 1].to(dtype), embedding).float()
        return F.cross_entropy(logits, ids[places])

    def _stacked(self, rows: Sequence[Row]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        positions = torch.stack([row.positions for row in rows])
        cos, sin = (part[positions][:, None] for part in self._rotation)
        return torch.stack([row.ids for row in rows]), cos, sin, torch.stack([row.segments for row in rows])

    def _attention(self, ids: Tensor, cos: Tensor, sin: Tensor, segments: Tensor, chunks: Tensor) -> Tensor:
        return question_attention(self.model, ids, cos, sin, segments, chunks, self.shape[0])

    def _states(self, ids: Tensor, cos: Tensor, sin: Tensor, segments: Tensor) -> Tensor:
        return hidden_states(self.model, ids, cos, sin, segments, self.shape[0])[0]


def carried(seen: Tensor, source: Row, target: Row, characters: int) -> Tensor:
    """Attention (questions, context) to one row's chunk tokens as attention to another row's."""
    wanted = torch.zeros(len(seen), len(target.chunks))
    for number, weights in enumerate(seen[:, source.chunks]):
        wanted[number, target.chunks] = carry(weights, source.offsets, target.offsets, characters).float()
    return wanted
