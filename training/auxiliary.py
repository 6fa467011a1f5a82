"""Train the auxiliary model: a small reader whose last layer looks where the reference model's last layer looks.

`python -m training.auxiliary REFERENCE FOLDER`. It has a tokenizer of its own and learns to answer the same questions,
and, by distillation, to attend like the reference model under full attention (CacheClip §2.8): the target is the
reference's last-layer attention from a question's rows to the context, averaged over heads and rows, carried from
token to token by the characters they cover.
"""

import argparse
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  torch's own name for it
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from kvweave.core import Prompt
from kvweave.evaluation.draft import Question
from kvweave.models.template import PromptTemplate
from training.documents import Document, Writer
from training.network import hidden_states, question_attention, rotation
from training.vocabulary import SPECIAL, training_texts

VOCABULARY, THETA = 2048, 100_000.0
STEPS, DOCUMENTS, QUESTIONS = 1500, 3, 12
RATE, WARM_STEPS = 1e-3, 100
REFERENCE_SHAPE, AUXILIARY_SHAPE = (768, 320), (1024, 400)  # context and question tokens of a row
ANSWERING = 0.3  # weight of answering beside attending


def learn_vocabulary(seed: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE in the manner of GPT-2: unlike the reference's, digits join and a text starts without a space."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(training_texts(seed), trainer)
    pad, bos, eos = SPECIAL
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=pad, bos_token=bos, eos_token=eos)


def new_model(tokenizer: Any, seed: int) -> LlamaForCausalLM:
    """The auxiliary model before training: three narrow layers."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=192,
            intermediate_size=384,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=48,
            max_position_embeddings=8192,
            tie_word_embeddings=True,
            rms_norm_eps=1e-5,
            rope_parameters={"rope_type": "default", "rope_theta": THETA},
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


@dataclass(slots=True)
class Row:
    """One document with questions under one tokenizer; tensors are (T,), T = context + questions.

    `starts`, `ends` (context,) are the characters that a context token covers, both 0 outside chunks.
    """

    ids: Tensor
    positions: Tensor
    segments: Tensor
    answers: Tensor
    starts: Tensor
    ends: Tensor


class Side:
    """One of the two models with its tokenizer: makes rows and runs over them."""

    def __init__(self, model: LlamaForCausalLM, tokenizer: Any, shape: tuple[int, int]) -> None:
        self.model, self.shape = model, shape
        self._tokenizer = tokenizer
        self.template = PromptTemplate(tokenizer)
        self._rotation = rotation(4096, model.config.head_dim, THETA)
        self.attend = torch.compile(self._attention, dynamic=False)
        self.read = torch.compile(self._states, dynamic=False)

    def row(self, document: Document, questions: Sequence[Question]) -> Row | None:
        """A row, or None if document and questions do not fit."""
        context, asked = self.shape
        ids = list(self.template.prefix_ids(None))
        spans = [(0, 0)] * len(ids)
        passed = 0
        for chunk in document.chunks:
            chunk_ids = self.template.chunk_ids(chunk)
            offsets = self._tokenizer(chunk, add_special_tokens=False, return_offsets_mapping=True)[
                "offset_mapping"
            ]
            spans += [(passed + start, passed + end) for start, end in offsets]
            spans += [(0, 0)] * (len(chunk_ids) - len(offsets))
            ids += chunk_ids
            passed += len(chunk)
        length, total = len(ids), context + asked
        if length > context:
            return None
        row = Row(
            *(torch.zeros(total, dtype=torch.long) for _ in range(4)),
            *torch.zeros(2, context, dtype=torch.long),
        )
        row.ids[:length] = torch.tensor(ids)
        row.segments[length:] = -1
        row.positions[:length] = torch.arange(length)
        row.starts[:length], row.ends[:length] = torch.tensor(spans).T
        at = context
        for number, question in enumerate(questions, 1):
            rendered = self.template.render(Prompt(question.text, ()))
            lead = rendered.token_ids[rendered.spans[-1].start :]
            reply = [
                *self._tokenizer(question.reply, add_special_tokens=False)["input_ids"],
                self._tokenizer.eos_token_id,
            ]
            size = len(lead) + len(reply)
            if at + size > total:
                return None
            row.ids[at : at + size] = torch.tensor([*lead, *reply])
            row.positions[at : at + size] = torch.arange(length, length + size)
            row.segments[at : at + size] = number
            row.answers[at + len(lead) : at + size] = 1
            at += size
        return row

    def attention(self, rows: Sequence[Row], questions: int) -> Tensor:
        """What each question attends to: (B, questions, context), a distribution over the chunks' tokens."""
        context = self.shape[0]
        weights = self.attend(*self._stacked(rows))
        asked = torch.stack([(row.segments[context:] * (1 - row.answers[context:])) for row in rows])
        numbers = torch.arange(1, questions + 1)
        of_question = (asked[:, None] == numbers[:, None]).to(weights.dtype)  # (B, questions, Tq)
        mean = of_question @ weights * torch.stack([row.ends > row.starts for row in rows])[:, None]
        return mean / mean.sum(-1, keepdim=True).clamp(min=1e-9)

    def answer_loss(self, rows: Sequence[Row]) -> Tensor:
        """Cross-entropy of the answers' tokens."""
        states = self.read(*self._stacked(rows)).flatten(0, 1)
        places = torch.cat([row.answers for row in rows]).nonzero()[:, 0]
        ids = torch.cat([row.ids for row in rows])
        embedding = self.model.model.embed_tokens.weight.to(torch.bfloat16)
        return F.cross_entropy(
            F.linear(states[places - 1].to(torch.bfloat16), embedding).float(), ids[places]
        )

    def _stacked(self, rows: Sequence[Row]) -> tuple[Tensor, ...]:
        positions = torch.stack([row.positions for row in rows])
        cos, sin = (part[positions][:, None] for part in self._rotation)
        return torch.stack([row.ids for row in rows]), cos, sin, torch.stack([row.segments for row in rows])

    def _attention(self, *inputs: Tensor) -> Tensor:
        return question_attention(self.model, *inputs, context=self.shape[0])

    def _states(self, *inputs: Tensor) -> Tensor:
        return hidden_states(self.model, *inputs, context=self.shape[0])


def carried(weights: Tensor, source: Row, target: Row) -> Tensor:
    """Weights (Q, context) of one tokenization's tokens on another's, by shared characters; sums stay."""
    characters = int(max(source.ends.max(), target.ends.max()))
    widths = (source.ends - source.starts).clamp(min=1)
    density = torch.zeros(len(weights), characters + 1)
    density.index_add_(1, source.starts, weights / widths)
    density.index_add_(1, source.ends, -weights / widths)
    passed = F.pad(density.cumsum(1).cumsum(1), (1, 0))  # what lies before each character
    return passed[:, target.ends] - passed[:, target.starts]


def train(reference: Path, folder: Path, steps: int, seed: int) -> None:
    """Train and save; the reference model is only read."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = learn_vocabulary(seed)
    teacher_model = AutoModelForCausalLM.from_pretrained(reference, dtype=torch.float32)
    teacher = Side(teacher_model, AutoTokenizer.from_pretrained(reference), REFERENCE_SHAPE)
    student = Side(new_model(tokenizer, seed), tokenizer, AUXILIARY_SHAPE)
    rng = random.Random(seed)
    writer = Writer(rng, count=lambda text: len(teacher.template.text_ids(text)))
    optimizer = torch.optim.AdamW(student.model.parameters(), lr=RATE, betas=(0.9, 0.98), weight_decay=0.01)
    began, shown = time.monotonic(), {"kl": 0.0, "answers": 0.0}
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = RATE * min((step + 1) / WARM_STEPS, max(0.02, 1.5 * (1 - step / steps)), 1.0)
        pairs = _rows(rng, writer, teacher, student)
        with torch.no_grad():
            seen = teacher.attention([pair[0] for pair in pairs], QUESTIONS)
            wanted = torch.stack([carried(one, *pair) for one, pair in zip(seen, pairs, strict=True)])
        attended = student.attention([pair[1] for pair in pairs], QUESTIONS)
        kl = (wanted * (wanted.clamp(min=1e-9).log() - attended.clamp(min=1e-9).log())).sum(-1).mean()
        answers = student.answer_loss([pair[1] for pair in pairs])
        (kl + ANSWERING * answers).backward()
        torch.nn.utils.clip_grad_norm_(student.model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        for name, value in (("kl", float(kl)), ("answers", float(answers))):
            shown[name] = value if step == 0 else 0.97 * shown[name] + 0.03 * value
        if (step + 1) % 50 == 0:
            line = {"step": step + 1, "seconds": round(time.monotonic() - began), **shown}
            with (folder / "log.jsonl").open("a") as log:
                log.write(json.dumps(line) + "\n")
    _export(
        student.model,
        tokenizer,
        folder / "model",
        {"seed": seed, "steps": steps, "hours": (time.monotonic() - began) / 3600},
    )


def _rows(rng: random.Random, writer: Writer, teacher: Side, student: Side) -> list[tuple[Row, Row]]:
    pairs: list[tuple[Row, Row]] = []
    while len(pairs) < DOCUMENTS:
        document = writer.document(rng.randint(3, 9), sparse=0.4)
        if len(document.questions) < 2:
            continue
        questions = [rng.choice(document.questions) for _ in range(QUESTIONS)]
        rows = teacher.row(document, questions), student.row(document, questions)
        if rows[0] is not None and rows[1] is not None:
            pairs.append((rows[0], rows[1]))
    return pairs


def _export(model: LlamaForCausalLM, tokenizer: Any, target: Path, facts: dict[str, Any]) -> None:
    model.to(torch.bfloat16).save_pretrained(target)
    tokenizer.save_pretrained(target)
    (target / "training.json").write_text(json.dumps(facts, indent=1) + "\n")


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("reference", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    train(given.reference, given.folder, given.steps, given.seed)


if __name__ == "__main__":
    main()
