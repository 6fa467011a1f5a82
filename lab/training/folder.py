"""The folder of a training run: its checkpoint, its log and what comes out of it. Knows nothing of what is trained."""

import json
import os
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

CHECKPOINT, LOG, RESULT = "checkpoint.pt", "log.jsonl", "model"
MADE = "training.json"  # in the result: how it was made


def save(folder: Path, state: Mapping[str, Any]) -> None:
    """Replace the folder's checkpoint; a process killed on the way leaves the old one."""
    torch.save(state, folder / "checkpoint.new")
    os.replace(folder / "checkpoint.new", folder / CHECKPOINT)


def saved(folder: Path, device: torch.device) -> dict[str, Any] | None:
    """What was saved last, if anything was."""
    if not (folder / CHECKPOINT).exists():
        return None
    state: dict[str, Any] = torch.load(folder / CHECKPOINT, map_location=device, weights_only=True)
    return state


def log(folder: Path, **facts: object) -> None:
    """Add a line to the log."""
    with (folder / LOG).open("a") as lines:
        lines.write(json.dumps(facts) + "\n")


def export(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, **facts: object) -> None:
    """Write the result: weights in bfloat16, tokenizer, and how they were made."""
    target = folder / RESULT
    deepcopy(model).to(torch.bfloat16).save_pretrained(target)
    tokenizer.save_pretrained(target)
    facts["torch"] = torch.__version__
    (target / MADE).write_text(json.dumps(facts, indent=1) + "\n")


def smoothed(before: float | None, now: float) -> float:
    """A running average over some thirty steps, for the log."""
    return now if before is None else 0.97 * before + 0.03 * now
