"""Train the auxiliary model: a small reader whose last layer looks where the reference model's last layer looks.

`python -m training.auxiliary REFERENCE FOLDER`. It has a tokenizer of its own and learns to answer the same questions,
and, by distillation, to attend like the reference model under full attention (CacheClip §2.8): the target is the
reference's last-layer attention from a question's rows to the context, averaged over heads and rows, carried from
token to token by the characters they cover.
"""

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  torch's own name for it
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from kvweave.core import Prompt
from kvweave.evaluation.draft import Question
from kvweave.models.adapter import Adapter
from kvweave.models.template import SEPARATOR
from kvweave.ops.crossing import Offsets, carry
from training.documents import Document, Writer
from training.network import hidden_states, question_attention, rotation
from training.plan import THETA, configuration
from training.vocabulary import learned

VOCABULARY = 2048
STEPS, DOCUMENTS, QUESTIONS = 1500, 3, 12
RATE, WARM_STEPS = 1e-3, 100
REFERENCE_SHAPE, AUXILIARY_SHAPE = (768, 320), (1024, 400)  # context and question tokens of a row
ANSWERING = 0.3  # weight of answering beside attending


def learn_vocabulary(seed: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE in the manner of GPT-2: unlike the reference's, digits join and a text starts without a space."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return learned(tokenizer, VOCABULARY, seed)


def new_model(tokenizer: Any, seed: int) -> LlamaForCausalLM:
    """The auxiliary model before training: three narrow layers."""
    torch.manual_seed(seed)
    shape = {"hidden_size": 192, "intermediate_size": 384, "num_hidden_layers": 3, "head_dim": 48}
    return LlamaForCausalLM(configuration(tokenizer, max_position_embeddings=8192, **shape))


@dataclass(slots=True)
class Row:
    """One document with questions under one tokenizer; tensors are (T,), T = context + questions.

    `users` says which tokens are a question's own words, `answers` which are answers; `chunks` (context,) which are
    the chunks', and `offsets` which characters those stand for.
    """

    ids: Tensor
    positions: Tensor
    segments: Tensor
    users: Tensor
    answers: Tensor
    chunks: Tensor
    offsets: Offsets


class Side:
    """One of the two models with its tokenizer: makes rows and runs over them."""

    def __init__(self, model: LlamaForCausalLM, tokenizer: Any, shape: tuple[int, int]) -> None:
        self.adapter, self.model, self.shape = Adapter(model, tokenizer), model, shape
        self._end = tokenizer.eos_token_id
        self._rotation = rotation(4096, model.config.head_dim, THETA)
        self._attend = torch.compile(self._attention, dynamic=False)
        self._read = torch.compile(self._states, dynamic=False)

    def row(self, document: Document, questions: Sequence[Question]) -> Row | None:
        """A row, or None if document and questions do not fit."""
        template, (context, asked) = self.adapter.template, self.shape
        prefix = template.prefix_ids(None)
        ids = [*prefix, *(token for chunk in document.chunks for token in template.chunk_ids(chunk))]
        offsets = template.context_offsets(document.chunks)
        length, total = len(ids), context + asked
        if length > context or offsets is None:
            return None
        made = Row(
            *(torch.zeros(total, dtype=torch.long) for _ in range(5)), torch.zeros(context).bool(), offsets
        )
        made.ids[:length] = torch.tensor(ids)
        made.chunks[len(prefix) : length] = True
        made.segments[length:] = -1
        made.positions[:length] = torch.arange(length)
        at = context
        for number, question in enumerate(questions, 1):
            rendered = template.render(Prompt(question.text, ()))
            first = rendered.spans[-1].start
            lead, reply = rendered.token_ids[first:], (*template.text_ids(question.reply), self._end)
            size = len(lead) + len(reply)
            if at + size > total:
                return None
            made.ids[at : at + size] = torch.tensor([*lead, *reply])
            made.positions[at : at + size] = torch.arange(length, length + size)
            made.segments[at : at + size] = number
            made.users[at + rendered.user_rows[0] - first : at + rendered.user_rows[1] - first] = number
            made.answers[at + len(lead) : at + size] = 1
            at += size
        return made

    def attention(self, rows: Sequence[Row]) -> Tensor:
        """What each question's own words attend to: (B, QUESTIONS, context), a distribution over the chunks."""
        weights = self._attend(*self._stacked(rows), torch.stack([row.chunks for row in rows]))
        users = torch.stack([row.users[self.shape[0] :] for row in rows])
        of_question = (users[:, None] == torch.arange(1, QUESTIONS + 1)[:, None]).to(weights.dtype)
        return of_question @ weights / of_question.sum(-1, keepdim=True).clamp(min=1)

    def answer_loss(self, rows: Sequence[Row]) -> Tensor:
        """Cross-entropy of the answers' tokens."""
        states = self._read(*self._stacked(rows)).flatten(0, 1)
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
        return hidden_states(self.model, *inputs, context=self.shape[0])[0]


def carried(seen: Tensor, source: Row, target: Row, characters: int) -> Tensor:
    """Attention (QUESTIONS, context) to one row's chunk tokens as attention to another row's."""
    wanted = torch.zeros(len(seen), len(target.chunks))
    for number, weights in enumerate(seen[:, source.chunks]):
        wanted[number, target.chunks] = carry(weights, source.offsets, target.offsets, characters).float()
    return wanted


class Distillation:
    """The training run; saves itself, and goes on from there when made again with the same folder.

    Args:
        reference: folder of the reference model, which is only read.
        folder: of checkpoint, log and result.
        seed: of everything.
    """

    def __init__(self, reference: Path, folder: Path, seed: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.seed = folder, seed
        teacher = AutoModelForCausalLM.from_pretrained(reference, dtype=torch.float32)
        self.teacher = Side(teacher, AutoTokenizer.from_pretrained(reference), REFERENCE_SHAPE)
        self.tokenizer = learn_vocabulary(seed)
        self.student = Side(new_model(self.tokenizer, seed), self.tokenizer, AUXILIARY_SHAPE)
        self.rng = random.Random(seed)
        count = self.teacher.adapter.template.text_ids
        self.writer = Writer(self.rng, count=lambda text: len(count(text)))
        self.optimizer = torch.optim.AdamW(
            self.student.model.parameters(), betas=(0.9, 0.98), weight_decay=0.01
        )
        self.step, self.tokens, self.seconds = 0, 0, 0.0
        self.shown = {"kl": 0.0, "answers": 0.0}
        if (folder / "checkpoint.pt").exists():
            self._resume()

    def run(self) -> None:
        """Train to the end and export."""
        self.student.model.train()
        started = time.monotonic() - self.seconds
        while self.step < STEPS:
            self._train()
            self.step += 1
            self.seconds = time.monotonic() - started
            if self.step % 50 == 0:
                self._report()
            if self.step % 250 == 0:
                self._save()
        self._export()

    def _train(self) -> None:
        self.rng.seed(f"{self.seed}/{self.step}")
        theirs, ours, lengths = zip(*self._rows(), strict=True)
        with torch.no_grad():
            seen = self.teacher.attention(theirs)
            wanted = torch.stack([carried(*each) for each in zip(seen, theirs, ours, lengths, strict=True)])
        attended = self.student.attention(ours)
        kl = (wanted * (wanted.clamp(min=1e-9).log() - attended.clamp(min=1e-9).log())).sum(-1).mean()
        answers = self.student.answer_loss(ours)
        (kl + ANSWERING * answers).backward()
        torch.nn.utils.clip_grad_norm_(self.student.model.parameters(), 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = RATE * min(
                (self.step + 1) / WARM_STEPS, max(0.02, 1.5 * (1 - self.step / STEPS)), 1.0
            )
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.tokens += sum(int((row.segments >= 0).sum()) for row in ours)
        for name, value in (("kl", float(kl)), ("answers", float(answers))):
            self.shown[name] = 0.97 * self.shown[name] + 0.03 * value if self.step else value

    def _rows(self) -> list[tuple[Row, Row, int]]:
        """Documents as rows of both sides, and how many characters each has."""
        made: list[tuple[Row, Row, int]] = []
        while len(made) < DOCUMENTS:
            document = self.writer.document(self.rng.randint(3, 9), sparse=0.4)
            if not document.questions:
                continue
            questions = [self.rng.choice(document.questions) for _ in range(QUESTIONS)]
            theirs, ours = (side.row(document, questions) for side in (self.teacher, self.student))
            if theirs is not None and ours is not None:
                made.append((theirs, ours, sum(len(text) + len(SEPARATOR) for text in document.chunks)))
        return made

    def _report(self) -> None:
        shown = {name: round(value, 4) for name, value in self.shown.items()}
        line = {"step": self.step, "seconds": round(self.seconds), "tokens": self.tokens, **shown}
        with (self.folder / "log.jsonl").open("a") as log:
            log.write(json.dumps(line) + "\n")

    def _save(self) -> None:
        state = {
            "seed": self.seed,
            "model": self.student.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "shown": self.shown,
            "progress": (self.step, self.tokens, self.seconds),
        }
        torch.save(state, self.folder / "checkpoint.new")
        os.replace(self.folder / "checkpoint.new", self.folder / "checkpoint.pt")

    def _resume(self) -> None:
        state = torch.load(self.folder / "checkpoint.pt", weights_only=True)
        if state["seed"] != self.seed:
            sys.exit(f"{self.folder} holds a run with another seed; name another folder")
        self.student.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.shown = state["shown"]
        self.step, self.tokens, self.seconds = state["progress"]

    def _export(self) -> None:
        target = self.folder / "model"
        self.student.model.to(torch.bfloat16).save_pretrained(target)
        self.tokenizer.save_pretrained(target)
        facts = {
            "seed": self.seed,
            "steps": self.step,
            "tokens": self.tokens,
            "hours": round(self.seconds / 3600, 2),
            "device": "CPU",
            "torch": torch.__version__,
        }
        (target / "training.json").write_text(json.dumps(facts, indent=1) + "\n")


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("reference", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    Distillation(given.reference, given.folder, given.seed).run()


if __name__ == "__main__":
    main()
