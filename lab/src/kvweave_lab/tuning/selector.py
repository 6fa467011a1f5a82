"""Fine-tunes an auxiliary model to attend as the model that answers does (CacheClip §3.5), in one resumable run."""

import json
import os
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch

from kvweave.errors import InvalidRequest
from kvweave.models.adapter import Adapter
from kvweave.models.loading import AUXILIARY_NAME, load_model
from kvweave.recipes.methods.cacheclip import AuxiliaryModel
from kvweave.state.knowledge_base_state import Progress, no_progress
from kvweave.types import Prompt
from kvweave_lab.tuning.distillation import (
    Agreement,
    StudentExample,
    TeacherExample,
    differentiable,
    loss,
    measure_agreement,
    observe_teacher,
    student_example,
)

SAVE_STEPS = 25
"""The most steps that an interrupted run loses."""

HELD_OUT = 5  # every fifth prompt is for measuring only
PROMPTS_PER_STEP = 4
_CHECKPOINT = "checkpoint.pt"


@dataclass(frozen=True, slots=True)
class Settings:
    """Number of AdamW `steps`, the highest learning `rate`, and the `seed` of the order of the prompts."""

    steps: int = 300
    rate: float = 1e-4
    seed: int = 0

    def __post_init__(self) -> None:
        if self.steps < 1 or not 0 < self.rate < 1:
            raise InvalidRequest(
                f"steps are {self.steps} and the rate {self.rate}; give 1 step or more, and a rate between 0 and 1"
            )


@dataclass(frozen=True, slots=True)
class TuningResult:
    """The result of a run.

    `before` and `after` are measured on the `held_out` prompts, which training does not use. `left_out` prompts were too
    long for the model that answers. `losses` has the mean KL of each step's prompts, in nats.
    """

    before: Agreement
    after: Agreement
    trained_on: int
    held_out: int
    left_out: int
    losses: tuple[float, ...]


def tune(
    primary: Adapter,
    auxiliary: str | None,
    prompts: Sequence[Prompt],
    output: Path,
    settings: Settings | None = None,
    progress: Progress = no_progress,
) -> TuningResult:
    """Train a copy of the auxiliary model on prompts, and save it in a folder that can be named as `auxiliary`.

    The primary reads each prompt once, under full attention. The auxiliary reads its chunks one by one, as it does in a
    request, and learns to distribute its attention over them as the primary does. Weights are float32, on the primary's
    device. The same call resumes an interrupted run, which loses SAVE_STEPS steps at most.

    Args:
        primary: the model that answers; only read.
        auxiliary: the model to start from, as in `load_model`; None is the one that ships with kvweave.
        prompts: questions with their chunks; training does not use every fifth.
        output: a new folder, or that of an interrupted run.
        settings: None for the defaults.
        progress: called after every prompt that was read and after every step.

    Raises:
        InvalidRequest: fewer than HELD_OUT prompts that fit the primary, or an output that is a file or holds another
            run or a model.
        ModelNotFound: there is no such auxiliary model.
    """
    settings = settings or Settings()
    adapter = load_model(auxiliary or AUXILIARY_NAME, dtype="float32", device=str(primary.geometry.device))
    run = _Run(output, _digest(primary, adapter, prompts, settings))
    examples = _examples(primary, prompts, progress)
    held_out = examples[HELD_OUT - 1 :: HELD_OUT]
    reader = AuxiliaryModel(adapter)
    training = [student_example(reader, one) for number, one in enumerate(examples, 1) if number % HELD_OUT]
    before = measure_agreement(adapter, held_out)
    losses = _train(adapter, training, settings, run, progress)
    after = measure_agreement(adapter, held_out)
    result = TuningResult(
        before, after, len(training), len(held_out), len(prompts) - len(examples), tuple(losses)
    )
    _save(adapter, primary, result, settings, run)
    return result


def _examples(primary: Adapter, prompts: Sequence[Prompt], progress: Progress) -> list[TeacherExample]:
    found = []
    for number, prompt in enumerate(prompts, 1):
        found.append(observe_teacher(primary, prompt))
        progress("reading prompts", number, len(prompts))
    examples = [one for one in found if one is not None]
    if len(examples) < HELD_OUT:
        raise InvalidRequest(
            f"{len(examples)} of {len(prompts)} prompts have chunks and fit {primary.fingerprint.name}; at least "
            f"{HELD_OUT} are needed, and a hundred or more to be of use: give more questions"
        )
    return examples


class _Run:
    """One run's folder, with the checkpoint from which an interrupted run resumes; refuses another run's folder."""

    def __init__(self, folder: Path, digest: str) -> None:
        self.folder, self._digest = folder, digest
        self._checkpoint = folder / _CHECKPOINT
        self.state: dict[str, Any] | None = None
        if folder.exists() and not folder.is_dir():
            raise InvalidRequest(f"{folder} is a file; name a new folder for the tuned model")
        if self._checkpoint.exists():
            self.state = torch.load(self._checkpoint, weights_only=True, map_location="cpu")
            if self.state is None or self.state.get("run") != digest:
                raise InvalidRequest(
                    f"{folder} holds an interrupted run with other models, prompts or settings; repeat its command to resume "
                    "it, or name another folder"
                )
        elif (folder / "config.json").exists():
            raise InvalidRequest(f"{folder} holds a model already; name another folder")

    def save(self, state: dict[str, Any]) -> None:
        """Write the state next to the last one, then replace it: at any moment one of them is complete."""
        self.folder.mkdir(parents=True, exist_ok=True)
        new = self._checkpoint.with_suffix(".new")
        torch.save({"run": self._digest, **state}, new)
        os.replace(new, self._checkpoint)

    def finish(self) -> None:
        """Delete the checkpoint."""
        self._checkpoint.unlink(missing_ok=True)


def _train(
    adapter: Adapter, training: Sequence[StudentExample], settings: Settings, run: _Run, progress: Progress
) -> list[float]:
    """Run all steps that are left; return the mean loss of each step, earlier ones included."""
    optimizer = torch.optim.AdamW(adapter.model.parameters(), lr=settings.rate, weight_decay=0.01)
    losses: list[float] = []
    if run.state is not None:
        adapter.model.load_state_dict(run.state["model"])
        optimizer.load_state_dict(run.state["optimizer"])
        losses = list(run.state["losses"])
    with differentiable(adapter):
        for step in range(len(losses), settings.steps):
            for group in optimizer.param_groups:
                group["lr"] = settings.rate * _rate_share(step, settings.steps)
            draw = random.Random(f"{settings.seed}/{step}")  # the same in a resumed run
            drawn = draw.sample(training, min(PROMPTS_PER_STEP, len(training)))
            losses.append(_step(adapter, optimizer, drawn))
            progress("training", step + 1, settings.steps)
            if (step + 1) % SAVE_STEPS == 0 or step + 1 == settings.steps:
                run.save(
                    {
                        "model": adapter.model.state_dict(),
                        "optimizer": optimizer.state_dict(),
                        "losses": losses,
                    }
                )
    return losses


def _step(adapter: Adapter, optimizer: torch.optim.Optimizer, training: Sequence[StudentExample]) -> float:
    total = 0.0
    for one in training:  # one at a time: the passes of one prompt need enough memory
        share = loss(adapter, one) / len(training)
        torch.autograd.backward(share)
        total += float(share.detach())
    torch.nn.utils.clip_grad_norm_(adapter.model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return total


def _rate_share(step: int, steps: int) -> float:
    """Return the share of the learning rate: up within the first twentieth, then down to a tenth."""
    warm = max(1, steps // 20)
    return min((step + 1) / warm, 1 - 0.9 * step / steps)


def _save(adapter: Adapter, primary: Adapter, result: TuningResult, settings: Settings, run: _Run) -> None:
    adapter.model.save_pretrained(run.folder)
    adapter.tokenizer.save_pretrained(run.folder)
    facts = {
        "primary": primary.fingerprint.name,
        "auxiliary": adapter.fingerprint.name,
        **asdict(settings),
        **{name: value for name, value in asdict(result).items() if name != "losses"},
    }
    (run.folder / "tuning.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    run.finish()


def _digest(primary: Adapter, auxiliary: Adapter, prompts: Sequence[Prompt], settings: Settings) -> str:
    """Return a digest of everything on which a run depends."""
    parts = [
        primary.fingerprint.digest,
        auxiliary.fingerprint.digest,
        asdict(settings),
        list(map(asdict, prompts)),
    ]
    return blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()
