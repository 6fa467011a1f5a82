"""Train the reference model from a seed: `python -m training.train FOLDER`; resumes if interrupted.

On a CPU, one single-threaded process runs per core, and gradients are averaged; on a GPU, there is one process. Rows
depend on seed, step and row only, so a resumed run has the same rows as an uninterrupted one.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  torch's own name for it
from torch import Tensor
from transformers import AutoTokenizer, LlamaForCausalLM

from training.folder import append_log, export, load_checkpoint, running_mean, save_checkpoint
from training.network import hidden_states, product_dtype, rotation
from training.plan import PLAN, VOCABULARY, Stage, draw_stage, new_model
from training.rows import COPY, COUNTED, RowMaker, Rows
from training.shape import Shape
from training.vocabulary import learn_tokenizer

HINTS = 160  # positions of hints per batch, padded
TARGETS = 0.3  # share of a batch's tokens with logits, a random choice or padded
COPYING_FIRST = 0.6  # share of repetition rows until their accuracy exceeds COPIES
COPIES = 0.9
AVERAGED = 4  # the number of last stages whose final weights are averaged; the mean is better than each
REPORT_STEPS = 50
_MEETING = "meeting"  # the file by which processes connect

Forward = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Takes ids, cosines, sines, segments, target and hint positions; returns the logits at both, (positions, vocabulary)."""


class Trainer:
    """One process of a training run, which resumes from the folder's checkpoint.

    Args:
        folder: of tokenizer, checkpoint, log and result.
        seed: of everything random.
        rank: of this process; rank 0 writes files.
        ranks: number of processes, which divide a step's rows and average their gradients.
        device: cpu or cuda.
        scale: factor on the steps of every stage.
    """

    def __init__(
        self, folder: Path, seed: int, rank: int, ranks: int, device: str = "cpu", scale: float = 1.0
    ) -> None:
        self.folder, self.seed, self.rank, self.ranks = folder, seed, rank, ranks
        self.device = torch.device(device)
        self.plan = [replace(stage, steps=round(scale * stage.steps)) for stage in self.stages()]
        self.steps = sum(stage.steps for stage in self.plan)
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = self.initial_model().to(self.device)
        self.parameters = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(self.parameters, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
        self.maker = self.row_maker(self.tokenizer)
        theta = self.model.config.rope_parameters["rope_theta"]
        tables = rotation(self.model.config.max_position_embeddings, self.model.config.head_dim, theta)
        self.cos, self.sin = (part.to(self.device) for part in tables)
        self.final_weights: list[dict[str, Tensor]] = []
        self.compiled: dict[Shape, Forward] = {}
        self.accuracy: dict[str, float] = {}
        self.loss, self.hinted = 0.0, 0.0
        self.step, self.tokens, self.seconds = 0, 0, 0.0
        self._resume()

    # Subclasses override these.

    averaged = AVERAGED
    save_steps = 250
    row_maker = RowMaker

    @staticmethod
    def stages() -> Sequence[Stage]:
        """Return the plan before scaling."""
        return PLAN

    @classmethod
    def rows_of_steps(cls) -> set[int]:
        """Return the possible numbers of rows of a step."""
        return {stage.rows for stage in cls.stages()}

    @classmethod
    def prepare(cls, folder: Path, seed: int) -> None:
        """Write the files that every process reads into an empty folder: the tokenizer."""
        learn_tokenizer(VOCABULARY, seed).save_pretrained(folder)

    def initial_model(self) -> LlamaForCausalLM:
        """Return the model at the start."""
        return new_model(self.tokenizer, self.seed)

    def provenance(self) -> dict[str, Any]:
        """Return facts about the initial weights, for the result."""
        return {}

    def next_stage(self) -> tuple[Stage, float]:
        """Return the step's stage, equal in every process, and its learning rate."""
        return draw_stage(self.plan, self.step, self.seed)

    def run(self) -> None:
        """Train to the end of the plan and export."""
        ends = set(accumulate(stage.steps for stage in self.plan))
        start, reported = time.monotonic() - self.seconds, (time.monotonic(), self.tokens)
        while self.step < self.steps:
            self.train_step(*self.next_stage())
            self.step += 1
            self.seconds = time.monotonic() - start
            if self.step in ends:
                self._store_weights()
            if self.step % REPORT_STEPS == 0 and self.rank == 0:
                now = (time.monotonic(), self.tokens)
                self._report((now[1] - reported[1]) / (now[0] - reported[0]))
                reported = now
            if self.step % self.save_steps == 0 and self.rank == 0:
                self._save()
        if self.rank == 0:
            self._save()
            self._export()

    def _store_weights(self) -> None:
        """Keep the weights at the end of a stage for the mean, and drop the oldest ones."""
        weights = {name: weight.clone() for name, weight in self.model.state_dict().items()}
        self.final_weights = [*self.final_weights, weights][-self.averaged :]

    def train_step(self, stage: Stage, rate: float) -> None:
        """Take one step on rows drawn for it, at this learning rate."""
        copying = stage.copying if self.accuracy.get(COPY, 0.0) > COPIES else COPYING_FIRST
        seeds = [f"{self.seed}/{self.step}/{row}" for row in range(self.rank, stage.rows, self.ranks)]
        rows = self.maker.batch(stage.shape, seeds, copying)
        places, hinted = self._target_places(rows).to(self.device), _hint_places(rows).to(self.device)
        rows = rows.to(self.device)
        cos, sin = (part[rows.positions][:, None] for part in (self.cos, self.sin))
        logits, hints = self._forward(stage.shape)(rows.ids, cos, sin, rows.segments, places, hinted)
        learned = rows.ids.masked_fill(rows.ends, self.tokenizer.eos_token_id)
        targets, weights, tasks = (part.flatten()[places + 1] for part in (learned, rows.weights, rows.tasks))
        losses = F.cross_entropy(logits, targets, reduction="none")
        loss = (losses * weights).sum() / weights.sum().clamp(min=1e-6)
        wanted = rows.hints.flatten()[hinted]
        if stage.hinting and (wanted >= 0).any():
            loss = loss + stage.hinting * F.cross_entropy(hints, wanted, ignore_index=-1)
            correct = (hints.argmax(-1) == wanted)[wanted >= 0].float().mean()
            self.hinted = running_mean(self.hinted, float(correct))
        loss.backward()
        self._average(loss.detach(), rows.tokens, tasks, logits.argmax(-1) == targets)
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)

    def _target_places(self, rows: Rows) -> Tensor:
        """Return a fixed number of positions before targets: answers first, then other targets."""
        count = int(rows.ids.numel() * TARGETS)
        flat = rows.weights.flatten()
        draw = torch.rand(len(flat), generator=torch.Generator().manual_seed(self.step))
        first = (rows.tasks.flatten() > 0) | ((flat > 0.2) & (rows.tasks.flatten() != 0))
        score = torch.where(flat > 0, draw + first.float(), draw - 2.0)
        score[:: rows.ids.shape[1]] = -9.0
        return score.topk(count).indices - 1

    def _forward(self, shape: Shape) -> Forward:
        """Return the compiled forward pass of a shape."""
        if shape not in self.compiled:

            def forward(
                ids: Tensor, cos: Tensor, sin: Tensor, segments: Tensor, places: Tensor, hinted: Tensor
            ) -> tuple[Tensor, Tensor]:
                last, middle = hidden_states(self.model, ids, cos, sin, segments, shape.context)
                dtype = product_dtype(ids.device)
                embedding = self.model.model.embed_tokens.weight.to(dtype)
                chosen = last.flatten(0, 1)[places], middle.flatten(0, 1)[hinted]
                logits, hints = (F.linear(states.to(dtype), embedding).float() for states in chosen)
                return logits, hints

            self.compiled[shape] = torch.compile(forward, dynamic=False)
        return self.compiled[shape]

    def _average(self, loss: Tensor, tokens: int, tasks: Tensor, correct: Tensor) -> None:
        """Average the gradients of all processes in place, and update the running loss and accuracies.

        `tasks` (targets,) are the tasks of targets, -1 for none; `correct` (targets,) whether predictions are correct.
        """
        kinds = len(COUNTED)
        totals, hits = (
            tasks[chosen].bincount(minlength=kinds) for chosen in (tasks >= 0, (tasks >= 0) & correct)
        )
        counted = torch.cat([totals, hits, loss[None], loss.new_tensor([tokens])])
        gradients = [parameter.grad for parameter in self.parameters]
        flat = torch.cat([*(gradient.flatten() for gradient in gradients), counted])
        if self.ranks > 1:
            dist.all_reduce(flat)
        *means, counted = flat.split([*(gradient.numel() for gradient in gradients), len(counted)])
        for gradient, mean in zip(gradients, means, strict=True):
            gradient.copy_(mean.view_as(gradient) / self.ranks)
        totals, hits = counted[:kinds], counted[kinds:-2]
        for name, total, share in zip(COUNTED, totals.tolist(), (hits / totals).tolist(), strict=True):
            if total:
                self.accuracy[name] = running_mean(self.accuracy.get(name), share)
        self.loss = running_mean(self.loss if self.step else None, float(counted[-2]) / self.ranks)
        self.tokens += int(counted[-1])

    def _report(self, speed: float) -> None:
        append_log(
            self.folder,
            step=self.step,
            seconds=round(self.seconds),
            tokens=self.tokens,
            tokens_per_s=round(speed),
            loss=round(self.loss, 4),
            hinted=round(self.hinted, 3),
            accuracy={name: round(value, 3) for name, value in sorted(self.accuracy.items())},
        )

    def _run(self) -> tuple[int, list[dict[str, object]]]:
        """Return the settings that must equal a checkpoint's."""
        return self.seed, [asdict(stage) for stage in self.plan]

    def _save(self) -> None:
        state = {
            "run": self._run(),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "accuracy": self.accuracy,
            "ended": self.final_weights,
            "progress": (self.step, self.tokens, self.seconds, self.loss),
        }
        save_checkpoint(self.folder, state)

    def _resume(self) -> None:
        state = load_checkpoint(self.folder, self.device)
        if state is None:
            return
        if state["run"] != self._run():
            sys.exit(f"{self.folder} holds a run with another seed or plan; name another folder")
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.accuracy, self.final_weights = state["accuracy"], state["ended"]
        self.step, self.tokens, self.seconds, self.loss = state["progress"]

    def _export(self) -> None:
        """Write the mean of the last stages' final weights."""
        self.model.load_state_dict(mean_weights(self.final_weights))
        export(
            self.folder,
            self.model,
            self.tokenizer,
            seed=self.seed,
            steps=self.step,
            averaged=len(self.final_weights),
            tokens=self.tokens,
            hours=round(self.seconds / 3600, 2),
            processes=self.ranks,
            device=torch.cuda.get_device_name() if self.device.type == "cuda" else "CPU",
            plan=[asdict(stage) for stage in self.plan],
            **self.provenance(),
        )


def mean_weights(weights: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return the mean of several models' weights by name."""
    return {name: torch.stack([each[name] for each in weights]).mean(dim=0) for name in weights[0]}


def _hint_places(rows: Rows) -> Tensor:
    """Return a fixed number of positions with a hint, padded."""
    hinted = (rows.hints.flatten() >= 0).nonzero()[:HINTS, 0]
    return F.pad(hinted, (0, HINTS - len(hinted)))


def main(trainer: type[Trainer] = Trainer, module: str = "training.train") -> None:
    """Start the processes of a training, which run `module`; with --rank, run one of them."""
    description = sys.modules[trainer.__module__].__doc__ or ""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--processes", type=int, default=None, help="default: 2 on a CPU, 1 on a GPU")
    parser.add_argument("--scale", type=float, default=1.0, help="factor on all numbers of steps")
    parser.add_argument("--rank", type=int, default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    processes = args.processes or (2 if args.device == "cpu" else 1)
    if any(rows % processes for rows in trainer.rows_of_steps()):
        parser.error(f"a step's rows cannot be divided evenly among {processes} processes; take 1 or 2")
    if args.rank is None:
        sys.exit(_start_processes(trainer, module, args.folder, args.seed, processes))
    if processes > 1:
        _join_processes(args.folder, args.rank, processes, args.device)
    trainer(args.folder, args.seed, args.rank, processes, args.device, args.scale).run()


def _start_processes(trainer: type[Trainer], module: str, folder: Path, seed: int, processes: int) -> int:
    """Prepare the folder if necessary, run the processes, and return the largest exit code."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "tokenizer.json").exists():
        trainer.prepare(folder, seed)
    (folder / _MEETING).unlink(missing_ok=True)
    command = [sys.executable, "-m", module, *sys.argv[1:], f"--processes={processes}"]
    children = [subprocess.Popen([*command, f"--rank={rank}"]) for rank in range(processes)]
    return max(abs(child.wait()) for child in children)  # a negative code is a signal


def _join_processes(folder: Path, rank: int, processes: int, device: str) -> None:
    """Connect to the other processes."""
    if device == "cpu":
        torch.set_num_threads(1)
    meeting = f"file://{(folder / _MEETING).absolute()}"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=processes)


if __name__ == "__main__":
    main()
