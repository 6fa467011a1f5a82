"""Train the auxiliary model, a small model whose last layer attends like the reference model's.

`python -m training.auxiliary REFERENCE FOLDER`. The model has its own tokenizer. It learns to answer the same questions
and, by distillation, to attend like the reference model under full attention (CacheClip §2.8). The target is the
reference's last-layer attention from a question's rows to the context, averaged over heads and rows. It is transferred
from token to token by the characters that they cover.
"""

import argparse
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from kvweave.models.prompt import SEPARATOR
from training.distillation_model import DistillationModel, DistillationRow, transfer_attention
from training.documents import Writer
from training.folder import append_log, export, load_checkpoint, running_mean, save_checkpoint
from training.plan import configuration
from training.shape import Shape
from training.vocabulary import train_bpe

VOCABULARY = 2048
STEPS, DOCUMENTS, QUESTIONS = 1500, 3, 12
RATE, WARM_STEPS = 1e-3, 100
REFERENCE_SHAPE, AUXILIARY_SHAPE = (768, 320), (1024, 400)  # context and question tokens of a row
DOCUMENT = Shape(context=0, questions=0, chunks=(3, 9), chunk_tokens=(48, 128), sparse=0.4)
ANSWERING = 0.3  # weight of the answer loss; the attention loss has 1
REPORT_STEPS, SAVE_STEPS = 50, 250

Pair = tuple[DistillationRow, DistillationRow, int]
"""One document as a row of the reference and of the auxiliary model, and its number of characters."""


def learn_vocabulary(seed: int) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE like GPT-2's: unlike the reference's, it merges digits and adds no leading space."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return train_bpe(tokenizer, VOCABULARY, seed)


def new_model(tokenizer: PreTrainedTokenizerBase, seed: int) -> LlamaForCausalLM:
    """Return the untrained auxiliary model, with three narrow layers."""
    torch.manual_seed(seed)
    shape = {"hidden_size": 192, "intermediate_size": 384, "num_hidden_layers": 3, "head_dim": 48}
    return LlamaForCausalLM(configuration(tokenizer, max_position_embeddings=8192, **shape))


def rate_factor(step: int) -> float:
    """Return the factor of the learning rate: warm-up, constant up to a third of the steps, then linear decay."""
    return min((step + 1) / WARM_STEPS, max(0.02, 1.5 * (1 - step / STEPS)), 1.0)


class Distillation:
    """The training run, which resumes from the checkpoint in its folder.

    Args:
        reference: folder of the reference model.
        folder: of checkpoint, log and result.
        seed: of everything random.
    """

    def __init__(self, reference: Path, folder: Path, seed: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.seed = folder, seed
        teacher = AutoModelForCausalLM.from_pretrained(reference, dtype=torch.float32)
        self.teacher = DistillationModel(teacher, AutoTokenizer.from_pretrained(reference), REFERENCE_SHAPE)
        self.tokenizer = learn_vocabulary(seed)
        self.student = DistillationModel(new_model(self.tokenizer, seed), self.tokenizer, AUXILIARY_SHAPE)
        self.rng = random.Random(seed)
        count = self.teacher.adapter.template.tokenize
        self.writer = Writer(self.rng, count=lambda text: len(count(text)))
        self.optimizer = torch.optim.AdamW(
            self.student.model.parameters(), betas=(0.9, 0.98), weight_decay=0.01
        )
        self.step, self.tokens, self.seconds = 0, 0, 0.0
        self.running: dict[str, float] = {}
        self._resume()

    def run(self) -> None:
        """Train to the end and export."""
        self.student.model.train()
        start = time.monotonic() - self.seconds
        while self.step < STEPS:
            self.train_step()
            self.step += 1
            self.seconds = time.monotonic() - start
            if self.step % REPORT_STEPS == 0:
                self._report()
            if self.step % SAVE_STEPS == 0:
                self._save()
        self._export()

    def pairs(self, step: int) -> list[Pair]:
        """Return the documents of a step, which depend on seed and step only."""
        self.rng.seed(f"{self.seed}/{step}")
        pairs: list[Pair] = []
        while len(pairs) < DOCUMENTS:
            document = self.writer.document(self.rng.randint(*DOCUMENT.chunks), DOCUMENT)
            if not document.questions:
                continue
            questions = [self.rng.choice(document.questions) for _ in range(QUESTIONS)]
            target, own = (model.row(document, questions) for model in (self.teacher, self.student))
            if target is not None and own is not None:
                pairs.append((target, own, sum(len(text) + len(SEPARATOR) for text in document.chunks)))
        return pairs

    def losses(self, pairs: Sequence[Pair]) -> tuple[Tensor, Tensor]:
        """Return the KL divergence from the reference's attention, per question, and the answers' cross-entropy."""
        targets, rows, lengths = zip(*pairs, strict=True)
        with torch.no_grad():
            attention = self.teacher.attention(targets, QUESTIONS)
            wanted = torch.stack(
                [transfer_attention(*each) for each in zip(attention, targets, rows, lengths, strict=True)]
            )
        attended = self.student.attention(rows, QUESTIONS)
        kl = (wanted * (wanted.clamp(min=1e-9).log() - attended.clamp(min=1e-9).log())).sum(-1).mean()
        return kl, self.student.answer_loss(rows)

    def train_step(self) -> None:
        """Take one step on the pairs drawn for it."""
        pairs = self.pairs(self.step)
        kl, answers = self.losses(pairs)
        (kl + ANSWERING * answers).backward()
        torch.nn.utils.clip_grad_norm_(self.student.model.parameters(), 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = RATE * rate_factor(self.step)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.tokens += sum(int((own.segments >= 0).sum()) for _, own, _ in pairs)
        for name, loss in (("kl", kl), ("answers", answers)):
            self.running[name] = running_mean(self.running.get(name), float(loss.detach()))

    def _report(self) -> None:
        running = {name: round(value, 4) for name, value in self.running.items()}
        append_log(self.folder, step=self.step, seconds=round(self.seconds), tokens=self.tokens, **running)

    def _save(self) -> None:
        state = {
            "seed": self.seed,
            "model": self.student.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "shown": self.running,
            "progress": (self.step, self.tokens, self.seconds),
        }
        save_checkpoint(self.folder, state)

    def _resume(self) -> None:
        state = load_checkpoint(self.folder, torch.device("cpu"))
        if state is None:
            return
        if state["seed"] != self.seed:
            sys.exit(f"{self.folder} holds a run with another seed; name another folder")
        self.student.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.running = state["shown"]
        self.step, self.tokens, self.seconds = state["progress"]

    def _export(self) -> None:
        export(
            self.folder,
            self.student.model,
            self.tokenizer,
            seed=self.seed,
            steps=self.step,
            tokens=self.tokens,
            hours=round(self.seconds / 3600, 2),
            device="CPU",
            reference=self.teacher.adapter.fingerprint.digest,
            documents=DOCUMENTS,
            questions=QUESTIONS,
            document=asdict(DOCUMENT),
            rate=RATE,
            answering=ANSWERING,
        )


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("reference", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    Distillation(args.reference, args.folder, args.seed).run()


if __name__ == "__main__":
    main()
