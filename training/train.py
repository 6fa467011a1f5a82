"""Train the reference model from a seed: `python -m training.train FOLDER`. Interrupted, the same command goes on.

On a CPU one single-threaded process per core, gradients averaged; on a GPU one process. Every step's rows come from
(seed, step, row), so a resumed run makes the same rows as one that was never stopped.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  torch's own name for it
from torch import Tensor
from transformers import AutoTokenizer

from training.network import hidden_states, rotation
from training.plan import CONTEXT, EARLIER, PLAN, THETA, VOCABULARY, Stage, new_model, pace
from training.rows import RowMaker, Rows, Shape
from training.vocabulary import learn

HINTS = 160  # places per batch at which hints are read; fewer are padded
TARGETS = 0.3  # share of a batch's tokens that get logits; more are drawn from, fewer are padded


class Trainer:
    """One process of a training run.

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
        self.plan = [replace(stage, steps=round(scale * stage.steps)) for stage in PLAN]
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = new_model(self.tokenizer, seed).to(self.device)
        self.parameters = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(self.parameters, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
        self.rng = random.Random(seed)
        self.maker = RowMaker(self.tokenizer, self.rng)
        self.rotation = tuple(part.to(self.device) for part in rotation(CONTEXT, 64, THETA))
        self.compiled: dict[Shape, Any] = {}
        self.accuracy: dict[str, float] = {}
        self.loss, self.hinted = 0.0, 0.0
        self.step, self.tokens, self.seconds = 0, 0, 0.0
        if (folder / "checkpoint.pt").exists():
            self._resume()

    def run(self) -> None:
        """Train to the end of the plan and save."""
        ends = [sum(stage.steps for stage in self.plan[: number + 1]) for number in range(len(self.plan))]
        started, shown = time.monotonic() - self.seconds, (time.monotonic(), self.tokens)
        while self.step < ends[-1]:
            number = next(number for number, end in enumerate(ends) if self.step < end)
            shared = random.Random(f"{self.seed}/{self.step}")
            if number and shared.random() < EARLIER:
                number -= 1
            self._train(self.plan[number], self.plan[number].rate * pace(self.step, ends[-1]))
            self.step += 1
            self.seconds = time.monotonic() - started
            if self.step % 50 == 0 and self.rank == 0:
                now = (time.monotonic(), self.tokens)
                self._report((now[1] - shown[1]) / (now[0] - shown[0]))
                shown = now
            if self.step % 250 == 0 and self.rank == 0:
                self._save()
        if self.rank == 0:
            self._save()
            self._export()

    def _train(self, stage: Stage, rate: float) -> None:
        copying = stage.copying if self.accuracy.get("copy", 0.0) > 0.9 else 0.6
        seeds = [f"{self.seed}/{self.step}/{row}" for row in range(self.rank, stage.rows, self.ranks)]
        rows = self.maker.batch(stage.shape, seeds, copying)
        places = self._targets(rows)
        ids, targets = rows.ids.to(self.device), rows.ids.flatten()[places + 1].to(self.device)
        weights = rows.weights.flatten()[places + 1].to(self.device)
        cos, sin = (part[rows.positions.to(self.device)][:, None] for part in self.rotation)
        hinted = (rows.hints.flatten() >= 0).nonzero()[:HINTS, 0]
        hinted = F.pad(hinted, (0, HINTS - len(hinted)))
        wanted = rows.hints.flatten()[hinted].to(self.device)
        logits, hints = self._forward(stage.shape)(
            ids, cos, sin, rows.segments.to(self.device), places.to(self.device), hinted.to(self.device)
        )
        losses = F.cross_entropy(logits, targets, reduction="none")
        loss = (losses * weights).sum() / weights.sum().clamp(min=1e-6)
        if stage.hinting and (wanted >= 0).any():
            loss = loss + stage.hinting * F.cross_entropy(hints, wanted, ignore_index=-1)
            right = (hints.argmax(-1) == wanted)[wanted >= 0].float().mean()
            self.hinted = 0.97 * self.hinted + 0.03 * float(right)
        loss.backward()
        self._average(loss, rows, places, logits.argmax(-1) == targets)
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)

    def _targets(self, rows: Rows) -> Tensor:
        """Places before a target, always equally many; answers first, then what language modelling gets."""
        wanted = int(rows.ids.numel() * TARGETS)
        flat = rows.weights.flatten()
        draw = torch.rand(len(flat), generator=torch.Generator().manual_seed(self.step))
        first = (rows.tasks.flatten() > 0) | ((flat > 0.2) & (rows.tasks.flatten() != 0))
        score = torch.where(flat > 0, draw + first.float(), draw - 2.0)
        score[:: rows.ids.shape[1]] = -9.0
        return score.topk(wanted).indices - 1

    def _forward(self, shape: Shape) -> Any:
        """The compiled step of one shape: logits at the places before the targets."""
        if shape not in self.compiled:

            def forward(
                ids: Tensor, cos: Tensor, sin: Tensor, segments: Tensor, places: Tensor, hinted: Tensor
            ) -> tuple[Tensor, Tensor]:
                last, middle = hidden_states(self.model, ids, cos, sin, segments, shape.context)
                embedding = self.model.model.embed_tokens.weight.to(torch.bfloat16)
                read = last.flatten(0, 1)[places], middle.flatten(0, 1)[hinted]
                logits, hints = (F.linear(states.to(torch.bfloat16), embedding).float() for states in read)
                return logits, hints

            self.compiled[shape] = torch.compile(forward, dynamic=False)
        return self.compiled[shape]

    def _average(self, loss: Tensor, rows: Rows, places: Tensor, right: Tensor) -> None:
        """Average gradients over the processes, in place, and take everyone's accuracy into the running one."""
        most = 64
        tasks = rows.tasks.flatten()[places + 1].to(self.device)
        counted = torch.zeros(2 * most + 2, device=self.device)
        known = tasks >= 0
        names = sorted(_NAMES)
        order = torch.tensor([names.index(name) for name in self.maker.tasks], device=self.device)
        counted[:most].index_add_(0, order[tasks[known]], right[known].float())
        counted[most : 2 * most].index_add_(
            0, order[tasks[known]], torch.ones(int(known.sum()), device=self.device)
        )
        counted[-2], counted[-1] = loss.detach(), rows.tokens
        flat = torch.cat([parameter.grad.flatten() for parameter in self.parameters] + [counted])
        if self.ranks > 1:
            dist.all_reduce(flat)
        at = 0
        for parameter in self.parameters:
            parameter.grad.copy_(flat[at : at + parameter.numel()].view_as(parameter) / self.ranks)
            at += parameter.numel()
        counted = flat[at:]
        for index, name in enumerate(names):
            if counted[most + index] > 0:
                now = float(counted[index] / counted[most + index])
                self.accuracy[name] = (
                    0.97 * self.accuracy[name] + 0.03 * now if name in self.accuracy else now
                )
        now = float(counted[-2]) / self.ranks
        self.loss = 0.97 * self.loss + 0.03 * now if self.step else now
        self.tokens += int(counted[-1])

    def _report(self, speed: float) -> None:
        line = {
            "step": self.step,
            "seconds": round(self.seconds),
            "tokens": self.tokens,
            "tokens_per_s": round(speed),
            "loss": round(self.loss, 4),
            "hinted": round(self.hinted, 3),
            "accuracy": {name: round(value, 3) for name, value in sorted(self.accuracy.items())},
        }
        with (self.folder / "log.jsonl").open("a") as log:
            log.write(json.dumps(line) + "\n")

    def _save(self) -> None:
        state = {
            "run": (self.seed, [asdict(stage) for stage in self.plan]),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "accuracy": self.accuracy,
            "progress": (self.step, self.tokens, self.seconds, self.loss),
        }
        torch.save(state, self.folder / "checkpoint.new")
        os.replace(self.folder / "checkpoint.new", self.folder / "checkpoint.pt")

    def _resume(self) -> None:
        state = torch.load(self.folder / "checkpoint.pt", map_location=self.device, weights_only=True)
        if state["run"] != (self.seed, [asdict(stage) for stage in self.plan]):
            sys.exit(f"{self.folder} holds a run with another seed or plan; name another folder")
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.accuracy = state["accuracy"]
        self.step, self.tokens, self.seconds, self.loss = state["progress"]

    def _export(self) -> None:
        target = self.folder / "model"
        self.model.to(torch.bfloat16).save_pretrained(target)
        self.tokenizer.save_pretrained(target)
        facts = {
            "seed": self.seed,
            "steps": self.step,
            "tokens": self.tokens,
            "hours": round(self.seconds / 3600, 2),
            "processes": self.ranks,
            "device": torch.cuda.get_device_name() if self.device.type == "cuda" else "CPU",
            "torch": torch.__version__,
            "plan": [asdict(stage) for stage in self.plan],
        }
        (target / "training.json").write_text(json.dumps(facts, indent=1) + "\n")


_NAMES = (
    "copy", "single", "multikey", "multivalue", "multiquery", "vartrack", "vartrack_step", "commonwords",
    "frequentwords", "twohop", "twohop_link", "twohop_fact", "coref", "coref_whole", "contradiction",
    "contradiction_kept", "order", "ask", "sum_up", "ask_like",
)  # fmt: skip


def main() -> None:
    """Start the processes, or be one of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--processes", type=int, default=None, help="default: 2 on a CPU, 1 on a GPU")
    parser.add_argument("--scale", type=float, default=1.0, help="train so many times longer")
    parser.add_argument("--rank", type=int, default=None, help=argparse.SUPPRESS)
    given = parser.parse_args()
    given.processes = given.processes or (2 if given.device == "cpu" else 1)
    if any(stage.rows % given.processes for stage in PLAN):
        parser.error(
            f"a step's rows cannot be shared out evenly among {given.processes} processes; take 1 or 2"
        )
    if given.rank is None:
        given.folder.mkdir(parents=True, exist_ok=True)
        if not (given.folder / "tokenizer.json").exists():
            learn(VOCABULARY, given.seed).save_pretrained(given.folder)
        (given.folder / "meeting").unlink(missing_ok=True)
        command = [sys.executable, "-m", "training.train", *sys.argv[1:]]
        children = [
            subprocess.Popen([*command, f"--processes={given.processes}", f"--rank={rank}"])
            for rank in range(given.processes)
        ]
        sys.exit(max(child.wait() for child in children))
    if given.device == "cpu" and given.processes > 1:
        torch.set_num_threads(1)
    if given.processes > 1:
        meeting = f"file://{(given.folder / 'meeting').absolute()}"
        dist.init_process_group("gloo", init_method=meeting, rank=given.rank, world_size=given.processes)
    Trainer(given.folder, given.seed, given.rank, given.processes, given.device, given.scale).run()


if __name__ == "__main__":
    main()
