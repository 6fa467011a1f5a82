"""Train the auxiliary model: a small reader whose last layer looks where the reference model's last layer looks.

`python -m training.auxiliary REFERENCE FOLDER`. It has a tokenizer of its own and learns to answer the same questions,
and, by distillation, to attend like the reference model under full attention (CacheClip §2.8): the target is the
reference's last-layer attention from a question's rows to the context, averaged over heads and rows, carried from
token to token by the characters they cover.
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
from training.documents import Writer
from training.folder import export, log, save, saved, smoothed
from training.plan import configuration
from training.shape import Shape
from training.sides import Row, Side, carried
from training.vocabulary import learned

VOCABULARY = 2048
STEPS, DOCUMENTS, QUESTIONS = 1500, 3, 12
RATE, WARM_STEPS = 1e-3, 100
REFERENCE_SHAPE, AUXILIARY_SHAPE = (768, 320), (1024, 400)  # context and question tokens of a row
DOCUMENT = Shape(context=0, questions=0, chunks=(3, 9), chunk_tokens=(48, 128), sparse=0.4)
ANSWERING = 0.3  # weight of answering beside attending
REPORT_STEPS, SAVE_STEPS = 50, 250

Pair = tuple[Row, Row, int]
"""One document as a row of the reference and one of the auxiliary model, and its characters."""


def learn_vocabulary(seed: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE in the manner of GPT-2: unlike the reference's, digits join and a text starts without a space."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return learned(tokenizer, VOCABULARY, seed)


def new_model(tokenizer: PreTrainedTokenizerBase, seed: int) -> LlamaForCausalLM:
    """The auxiliary model before training: three narrow layers."""
    torch.manual_seed(seed)
    shape = {"hidden_size": 192, "intermediate_size": 384, "num_hidden_layers": 3, "head_dim": 48}
    return LlamaForCausalLM(configuration(tokenizer, max_position_embeddings=8192, **shape))


def pace(step: int) -> float:
    """Share of the learning rate: warm-up, constant up to a third of the steps, then linear to almost nothing."""
    return min((step + 1) / WARM_STEPS, max(0.02, 1.5 * (1 - step / STEPS)), 1.0)


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
        self.shown: dict[str, float] = {}
        self._resume()

    def run(self) -> None:
        """Train to the end and export."""
        self.student.model.train()
        started = time.monotonic() - self.seconds
        while self.step < STEPS:
            self._train()
            self.step += 1
            self.seconds = time.monotonic() - started
            if self.step % REPORT_STEPS == 0:
                self._report()
            if self.step % SAVE_STEPS == 0:
                self._save()
        self._export()

    def pairs(self, step: int) -> list[Pair]:
        """The documents of a step, a function of seed and step alone."""
        self.rng.seed(f"{self.seed}/{step}")
        made: list[Pair] = []
        while len(made) < DOCUMENTS:
            document = self.writer.document(self.rng.randint(*DOCUMENT.chunks), DOCUMENT)
            if not document.questions:
                continue
            questions = [self.rng.choice(document.questions) for _ in range(QUESTIONS)]
            theirs, ours = (side.row(document, questions) for side in (self.teacher, self.student))
            if theirs is not None and ours is not None:
                made.append((theirs, ours, sum(len(text) + len(SEPARATOR) for text in document.chunks)))
        return made

    def losses(self, pairs: Sequence[Pair]) -> tuple[Tensor, Tensor]:
        """KL divergence from the reference's attention, per question, and cross-entropy of the answers."""
        theirs, ours, lengths = zip(*pairs, strict=True)
        with torch.no_grad():
            seen = self.teacher.attention(theirs, QUESTIONS)
            wanted = torch.stack([carried(*each) for each in zip(seen, theirs, ours, lengths, strict=True)])
        attended = self.student.attention(ours, QUESTIONS)
        kl = (wanted * (wanted.clamp(min=1e-9).log() - attended.clamp(min=1e-9).log())).sum(-1).mean()
        return kl, self.student.answer_loss(ours)

    def _train(self) -> None:
        pairs = self.pairs(self.step)
        kl, answers = self.losses(pairs)
        (kl + ANSWERING * answers).backward()
        torch.nn.utils.clip_grad_norm_(self.student.model.parameters(), 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = RATE * pace(self.step)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.tokens += sum(int((ours.segments >= 0).sum()) for _, ours, _ in pairs)
        for name, loss in (("kl", kl), ("answers", answers)):
            self.shown[name] = smoothed(self.shown.get(name), float(loss.detach()))

    def _report(self) -> None:
        shown = {name: round(value, 4) for name, value in self.shown.items()}
        log(self.folder, step=self.step, seconds=round(self.seconds), tokens=self.tokens, **shown)

    def _save(self) -> None:
        state = {
            "seed": self.seed,
            "model": self.student.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "shown": self.shown,
            "progress": (self.step, self.tokens, self.seconds),
        }
        save(self.folder, state)

    def _resume(self) -> None:
        state = saved(self.folder, torch.device("cpu"))
        if state is None:
            return
        if state["seed"] != self.seed:
            sys.exit(f"{self.folder} holds a run with another seed; name another folder")
        self.student.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.shown = state["shown"]
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
    given = parser.parse_args()
    Distillation(given.reference, given.folder, given.seed).run()


if __name__ == "__main__":
    main()
