"""Training that goes on from a finished model's weights, with an optimizer of its own."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from training.folder import MADE, RESULT
from training.train import Trainer

_START = "start"


class ContinuedTrainer(Trainer):
    """Starts from what the run in the folder `after`, beside its own, exported.

    The run's folder keeps a copy of it: what lies there later changes nothing.
    """

    after: str

    @classmethod
    def prepare(cls, folder: Path, seed: int) -> None:
        """Put the weights and the tokenizer that training starts from into an empty folder."""
        start = folder.absolute().parent / cls.after / RESULT
        if not start.exists():
            sys.exit(f"nothing to go on from in {start}; train that model first (lab/training/README.md)")
        AutoModelForCausalLM.from_pretrained(start).save_pretrained(folder / _START)
        AutoTokenizer.from_pretrained(start).save_pretrained(folder)
        if (start / MADE).exists():
            shutil.copy(start / MADE, folder / _START)

    def first_model(self) -> LlamaForCausalLM:
        """The weights as they were, in float32."""
        return self.loaded(self.folder / _START).train()

    def origin(self) -> dict[str, Any]:
        """How the weights before were made."""
        made = self.folder / _START / MADE
        return {"earlier": json.loads(made.read_text(encoding="utf-8"))} if made.exists() else {}

    @staticmethod
    def loaded(folder: Path) -> LlamaForCausalLM:
        """A model to go on with, from its weights."""
        model: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(folder, dtype="float32")
        return model
