"""The folder of a training run: its checkpoint, its log and its result."""

import json
import os
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

CHECKPOINT, LOG, MODEL_FOLDER = "checkpoint.pt", "log.jsonl", "model"
FACTS_FILE = "training.json"  # in the result: how the model was trained


def save_checkpoint(folder: Path, state: Mapping[str, Any]) -> None:
    """Replace the folder's checkpoint atomically."""
    torch.save(state, folder / "checkpoint.new")
    os.replace(folder / "checkpoint.new", folder / CHECKPOINT)


def load_checkpoint(folder: Path, device: torch.device) -> dict[str, Any] | None:
    """Return the checkpoint; None if there is none."""
    if not (folder / CHECKPOINT).exists():
        return None
    state: dict[str, Any] = torch.load(folder / CHECKPOINT, map_location=device, weights_only=True)
    return state


def append_log(folder: Path, **facts: object) -> None:
    """Append a line to the log."""
    with (folder / LOG).open("a") as lines:
        lines.write(json.dumps(facts) + "\n")


def export(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, **facts: object) -> None:
    """Write the result: weights in bfloat16, the tokenizer, and facts about the training."""
    target = folder / MODEL_FOLDER
    deepcopy(model).to(torch.bfloat16).save_pretrained(target)
    tokenizer.save_pretrained(target)
    facts["torch"] = torch.__version__
    (target / FACTS_FILE).write_text(json.dumps(facts, indent=1) + "\n")


def running_mean(before: float | None, now: float) -> float:
    """Return a running average over about thirty steps, for the log."""
    return now if before is None else 0.97 * before + 0.03 * now
