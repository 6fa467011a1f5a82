"""The two models of a distillation, each with its tokenizer: rows of the same documents, and attention in them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812  torch's own name for it
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

from kvweave.models.adapter import Adapter
from kvweave.ops.scores import Offsets
from kvweave_lab.eval.documents import Question
from kvweave_lab.scores import context_offsets, transfer_scores
from training.documents import Document
from training.network import hidden_states, product_dtype, question_attention, rotation
from training.plan import CONTEXT, THETA
from training.rows import question_ids


@dataclass(slots=True)
class DistillationRow:
    """One document with questions under one tokenizer; tensors are (T,), T = context + questions.

    Attributes:
        ids, positions, segments: as in `training.rows.Rows`.
        users: k for the own words of the k-th question, 0 elsewhere.
        answers: 1 for an answer's tokens, 0 elsewhere.
        chunks: (context,) whether a token belongs to a chunk.
        offsets: the characters of the chunk tokens.
    """

    ids: Tensor
    positions: Tensor
    segments: Tensor
    users: Tensor
    answers: Tensor
    chunks: Tensor
    offsets: Offsets

    @classmethod
    def empty(cls, context: int, questions: int, offsets: Offsets) -> "DistillationRow":
        """Return an empty row."""
        ids, positions, segments, users, answers = torch.zeros(5, context + questions, dtype=torch.long)
        return cls(ids, positions, segments, users, answers, torch.zeros(context).bool(), offsets)


class DistillationModel:
    """One of the two models with its tokenizer, which makes rows and processes them.

    Args:
        model: the model, which is not copied.
        tokenizer: the model's.
        shape: tokens of a row's context and of its questions.
    """

    def __init__(
        self, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, shape: tuple[int, int]
    ) -> None:
        self.adapter, self.model, self.shape = Adapter(model, tokenizer), model, shape
        self._end = tokenizer.eos_token_id
        self._rotation = rotation(CONTEXT, model.config.head_dim, THETA)
        self._attend = torch.compile(self._attention, dynamic=False)
        self._run = torch.compile(self._states, dynamic=False)

    def row(self, document: Document, questions: Sequence[Question]) -> DistillationRow | None:
        """Return a row; None if document and questions do not fit."""
        template, (context, question_tokens) = self.adapter.template, self.shape
        prefix = template.prefix_ids(None)
        ids = [*prefix, *(token for chunk in document.chunks for token in template.chunk_ids(chunk))]
        offsets = context_offsets(template, document.chunks)
        length = len(ids)
        if length > context or offsets is None:
            return None
        row = DistillationRow.empty(context, question_tokens, offsets)
        row.ids[:length] = torch.tensor(ids)
        row.chunks[len(prefix) : length] = True
        row.segments[length:] = -1
        row.positions[:length] = torch.arange(length)
        return row if self._write_questions(row, questions, length) else None

    def _write_questions(self, row: DistillationRow, questions: Sequence[Question], length: int) -> bool:
        """Write the questions after a context of `length` tokens; return False if they do not all fit."""
        template, at = self.adapter.template, self.shape[0]
        for number, question in enumerate(questions, 1):
            lead, user = question_ids(template, question.text)
            ids = [*lead, *template.tokenize(question.reply), self._end]
            end = at + len(ids)
            if end > len(row.ids):
                return False
            row.ids[at:end] = torch.tensor(ids)
            row.positions[at:end] = torch.arange(length, length + len(ids))
            row.segments[at:end] = number
            row.users[at:end][user] = number
            row.answers[at + len(lead) : end] = 1
            at = end
        return True

    def attention(self, rows: Sequence[DistillationRow], questions: int) -> Tensor:
        """Return the attention of each question's own words (B, questions, context), a distribution over the chunks."""
        weights = self._attend(*self._stacked(rows), torch.stack([row.chunks for row in rows]))
        users = torch.stack([row.users[self.shape[0] :] for row in rows])
        of_question = (users[:, None] == torch.arange(1, questions + 1)[:, None]).to(weights.dtype)
        return of_question @ weights / of_question.sum(-1, keepdim=True).clamp(min=1)

    def answer_loss(self, rows: Sequence[DistillationRow]) -> Tensor:
        """Return the cross-entropy of the answers' tokens."""
        states = self._run(*self._stacked(rows)).flatten(0, 1)
        indexes = torch.cat([row.answers for row in rows]).nonzero()[:, 0]
        ids = torch.cat([row.ids for row in rows])
        dtype = product_dtype(states.device)
        embedding = self.model.model.embed_tokens.weight.to(dtype)
        logits = F.linear(states[indexes - 1].to(dtype), embedding).float()
        return F.cross_entropy(logits, ids[indexes])

    def _stacked(self, rows: Sequence[DistillationRow]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        positions = torch.stack([row.positions for row in rows])
        cos, sin = (part[positions][:, None] for part in self._rotation)
        return torch.stack([row.ids for row in rows]), cos, sin, torch.stack([row.segments for row in rows])

    def _attention(self, ids: Tensor, cos: Tensor, sin: Tensor, segments: Tensor, chunks: Tensor) -> Tensor:
        return question_attention(self.model, ids, cos, sin, segments, chunks, self.shape[0])

    def _states(self, ids: Tensor, cos: Tensor, sin: Tensor, segments: Tensor) -> Tensor:
        return hidden_states(self.model, ids, cos, sin, segments, self.shape[0])[0]


def transfer_attention(
    attention: Tensor, source: DistillationRow, target: DistillationRow, characters: int
) -> Tensor:
    """Return attention (questions, context) to one row's chunk tokens as attention to another row's."""
    result = torch.zeros(len(attention), len(target.chunks))
    for number, weights in enumerate(attention[:, source.chunks]):
        result[number, target.chunks] = transfer_scores(
            weights, source.offsets, target.offsets, characters
        ).float()
    return result
