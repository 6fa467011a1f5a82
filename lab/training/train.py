"""Train the reference model from a seed: `python -m training.train FOLDER`. Interrupted, the same command goes on.

On a CPU one single-threaded process per core, gradients averaged; on a GPU one process. Every step's rows come from
(seed, step, row), so a resumed run makes the same rows as one that was never stopped.
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

from training.folder import export, log, save, saved, smoothed
from training.network import hidden_states, product_dtype, rotation
from training.plan import PLAN, VOCABULARY, Stage, drawn, new_model
from training.rows import COPY, COUNTED, RowMaker, Rows
from training.shape import Shape
from training.vocabulary import learn

HINTS = 160  # places per batch at which hints are read; fewer are padded
TARGETS = 0.3  # share of a batch's tokens that get logits; more are drawn from, fewer are padded
COPYING_FIRST = 0.6  # share of rows that only repeat until COPIES of them are repeated right
COPIES = 0.9
AVERAGED = 4  # stages: the mean of the weights that the last ones end with is better than any of them
REPORT_STEPS = 50
_MEETING = "meeting"  # the file through which the processes find each other

Forward = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""From ids, cosines, sines, segments, places and hinted places to the logits at both, each (places, vocabulary)."""


class Trainer:
    """One process of a training run; goes on from where the folder's last checkpoint was saved.

    Args:
        folder: where tokenizer, checkpoint, log and weights lie.
        seed: of everything.
        rank: this process; rank 0 writes.
        ranks: how many processes share out a step's rows and average their gradients.
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
        self.model = self.first_model().to(self.device)
        self.parameters = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(self.parameters, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
        self.maker = self.row_maker(self.tokenizer)
        theta = self.model.config.rope_parameters["rope_theta"]
        turns = rotation(self.model.config.max_position_embeddings, self.model.config.head_dim, theta)
        self.cos, self.sin = (part.to(self.device) for part in turns)
        self.ended: list[dict[str, Tensor]] = []
        self.compiled: dict[Shape, Forward] = {}
        self.accuracy: dict[str, float] = {}
        self.loss, self.hinted = 0.0, 0.0
        self.step, self.tokens, self.seconds = 0, 0, 0.0
        self._resume()

    # What another training has its own of

    averaged = AVERAGED
    save_steps = 250
    row_maker = RowMaker

    @staticmethod
    def stages() -> Sequence[Stage]:
        """The plan before it is scaled."""
        return PLAN

    @classmethod
    def rows_of_steps(cls) -> set[int]:
        """How many rows a step can have."""
        return {stage.rows for stage in cls.stages()}

    @classmethod
    def prepare(cls, folder: Path, seed: int) -> None:
        """Put into an empty folder what every process reads: here, the tokenizer."""
        learn(VOCABULARY, seed).save_pretrained(folder)

    def first_model(self) -> LlamaForCausalLM:
        """What training starts from."""
        return new_model(self.tokenizer, self.seed)

    def origin(self) -> dict[str, Any]:
        """What is to be told of where the first weights came from."""
        return {}

    def lesson(self) -> tuple[Stage, float]:
        """What the step trains, the same in every process, and its learning rate."""
        return drawn(self.plan, self.step, self.seed)

    def run(self) -> None:
        """Train to the end of the plan and save."""
        ends = set(accumulate(stage.steps for stage in self.plan))
        started, shown = time.monotonic() - self.seconds, (time.monotonic(), self.tokens)
        while self.step < self.steps:
            self._train(*self.lesson())
            self.step += 1
            self.seconds = time.monotonic() - started
            if self.step in ends:
                self._keep()
            if self.step % REPORT_STEPS == 0 and self.rank == 0:
                now = (time.monotonic(), self.tokens)
                self._report((now[1] - shown[1]) / (now[0] - shown[0]))
                shown = now
            if self.step % self.save_steps == 0 and self.rank == 0:
                self._save()
        if self.rank == 0:
            self._save()
            self._export()

    def _keep(self) -> None:
        """Keep a stage's weights for the mean, in place of those of a stage too long ago."""
        weights = {name: weight.clone() for name, weight in self.model.state_dict().items()}
        self.ended = [*self.ended, weights][-self.averaged :]

    def _train(self, stage: Stage, rate: float) -> None:
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
            right = (hints.argmax(-1) == wanted)[wanted >= 0].float().mean()
            self.hinted = smoothed(self.hinted, float(right))
        loss.backward()
        self._average(loss.detach(), rows.tokens, tasks, logits.argmax(-1) == targets)
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)

    def _target_places(self, rows: Rows) -> Tensor:
        """Places before a target, always equally many; answers first, then what language modelling gets."""
        wanted = int(rows.ids.numel() * TARGETS)
        flat = rows.weights.flatten()
        draw = torch.rand(len(flat), generator=torch.Generator().manual_seed(self.step))
        first = (rows.tasks.flatten() > 0) | ((flat > 0.2) & (rows.tasks.flatten() != 0))
        score = torch.where(flat > 0, draw + first.float(), draw - 2.0)
        score[:: rows.ids.shape[1]] = -9.0
        return score.topk(wanted).indices - 1

    def _forward(self, shape: Shape) -> Forward:
        """The compiled step of one shape."""
        if shape not in self.compiled:

            def forward(
                ids: Tensor, cos: Tensor, sin: Tensor, segments: Tensor, places: Tensor, hinted: Tensor
            ) -> tuple[Tensor, Tensor]:
                last, middle = hidden_states(self.model, ids, cos, sin, segments, shape.context)
                dtype = product_dtype(ids.device)
                embedding = self.model.model.embed_tokens.weight.to(dtype)
                read = last.flatten(0, 1)[places], middle.flatten(0, 1)[hinted]
                logits, hints = (F.linear(states.to(dtype), embedding).float() for states in read)
                return logits, hints

            self.compiled[shape] = torch.compile(forward, dynamic=False)
        return self.compiled[shape]

    def _average(self, loss: Tensor, tokens: int, tasks: Tensor, right: Tensor) -> None:
        """Average gradients over the processes, in place, and take everyone's loss and accuracy into the running ones.

        `tasks` and `right` (targets,) say what each target counts for, -1 for nothing, and whether it was met.
        """
        kinds = len(COUNTED)
        asked, met = (
            tasks[chosen].bincount(minlength=kinds) for chosen in (tasks >= 0, (tasks >= 0) & right)
        )
        counted = torch.cat([asked, met, loss[None], loss.new_tensor([tokens])])
        gradients = [parameter.grad for parameter in self.parameters]
        flat = torch.cat([*(gradient.flatten() for gradient in gradients), counted])
        if self.ranks > 1:
            dist.all_reduce(flat)
        *means, counted = flat.split([*(gradient.numel() for gradient in gradients), len(counted)])
        for gradient, mean in zip(gradients, means, strict=True):
            gradient.copy_(mean.view_as(gradient) / self.ranks)
        asked, met = counted[:kinds], counted[kinds:-2]
        for name, of, share in zip(COUNTED, asked.tolist(), (met / asked).tolist(), strict=True):
            if of:
                self.accuracy[name] = smoothed(self.accuracy.get(name), share)
        self.loss = smoothed(self.loss if self.step else None, float(counted[-2]) / self.ranks)
        self.tokens += int(counted[-1])

    def _report(self, speed: float) -> None:
        log(
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
        """What a checkpoint must agree with."""
        return self.seed, [asdict(stage) for stage in self.plan]

    def _save(self) -> None:
        state = {
            "run": self._run(),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "accuracy": self.accuracy,
            "ended": self.ended,
            "progress": (self.step, self.tokens, self.seconds, self.loss),
        }
        save(self.folder, state)

    def _resume(self) -> None:
        state = saved(self.folder, self.device)
        if state is None:
            return
        if state["run"] != self._run():
            sys.exit(f"{self.folder} holds a run with another seed or plan; name another folder")
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.accuracy, self.ended = state["accuracy"], state["ended"]
        self.step, self.tokens, self.seconds, self.loss = state["progress"]

    def _export(self) -> None:
        """The mean of the weights that the last stages ended with."""
        self.model.load_state_dict(mean_of(self.ended))
        export(
            self.folder,
            self.model,
            self.tokenizer,
            seed=self.seed,
            steps=self.step,
            averaged=len(self.ended),
            tokens=self.tokens,
            hours=round(self.seconds / 3600, 2),
            processes=self.ranks,
            device=torch.cuda.get_device_name() if self.device.type == "cuda" else "CPU",
            plan=[asdict(stage) for stage in self.plan],
            **self.origin(),
        )


def mean_of(weights: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The mean of several models' weights, name by name."""
    return {name: torch.stack([each[name] for each in weights]).mean(dim=0) for name in weights[0]}


def _hint_places(rows: Rows) -> Tensor:
    """Places with a hint, always equally many."""
    hinted = (rows.hints.flatten() >= 0).nonzero()[:HINTS, 0]
    return F.pad(hinted, (0, HINTS - len(hinted)))


def main(kind: type[Trainer] = Trainer, module: str = "training.train") -> None:
    """Start the processes of a training, each of which runs `module`, or be one of them."""
    described = sys.modules[kind.__module__].__doc__ or ""
    parser = argparse.ArgumentParser(description=described.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--processes", type=int, default=None, help="default: 2 on a CPU, 1 on a GPU")
    parser.add_argument("--scale", type=float, default=1.0, help="train so many times longer")
    parser.add_argument("--rank", type=int, default=None, help=argparse.SUPPRESS)
    given = parser.parse_args()
    processes = given.processes or (2 if given.device == "cpu" else 1)
    if any(rows % processes for rows in kind.rows_of_steps()):
        parser.error(f"a step's rows cannot be shared out evenly among {processes} processes; take 1 or 2")
    if given.rank is None:
        sys.exit(_start(kind, module, given.folder, given.seed, processes))
    if processes > 1:
        _meet(given.folder, given.rank, processes, given.device)
    kind(given.folder, given.seed, given.rank, processes, given.device, given.scale).run()


def _start(kind: type[Trainer], module: str, folder: Path, seed: int, processes: int) -> int:
    """Prepare the folder if that was not done, run the processes, and return the worst of their exit codes."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "tokenizer.json").exists():
        kind.prepare(folder, seed)
    (folder / _MEETING).unlink(missing_ok=True)
    command = [sys.executable, "-m", module, *sys.argv[1:], f"--processes={processes}"]
    children = [subprocess.Popen([*command, f"--rank={rank}"]) for rank in range(processes)]
    return max(abs(child.wait()) for child in children)  # a negative one names the signal that ended it


def _meet(folder: Path, rank: int, processes: int, device: str) -> None:
    """Join the other processes."""
    if device == "cpu":
        torch.set_num_threads(1)
    meeting = f"file://{(folder / _MEETING).absolute()}"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=processes)


if __name__ == "__main__":
    main()
