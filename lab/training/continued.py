"""Training that starts from the weights of a finished run, with a new optimizer."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from training.folder import FACTS_FILE, MODEL_FOLDER
from training.train import Trainer

_START = "start"


class ContinuedTrainer(Trainer):
    """Starts from the exported model of the run in the sibling folder `after`.

    The folder keeps a copy, so later changes of that run have no effect.
    """

    after: str

    @classmethod
    def prepare(cls, folder: Path, seed: int) -> None:
        """Copy the initial weights and the tokenizer into an empty folder."""
        start = folder.absolute().parent / cls.after / MODEL_FOLDER
        if not start.exists():
            sys.exit(f"there is no model in {start}; train that model first (lab/training/README.md)")
        AutoModelForCausalLM.from_pretrained(start).save_pretrained(folder / _START)
        AutoTokenizer.from_pretrained(start).save_pretrained(folder)
        if (start / FACTS_FILE).exists():
            shutil.copy(start / FACTS_FILE, folder / _START)

    def initial_model(self) -> LlamaForCausalLM:
        """Return the finished run's model, in float32."""
        return self.loaded(self.folder / _START).train()

    def provenance(self) -> dict[str, Any]:
        """Return how the initial weights were trained."""
        facts = self.folder / _START / FACTS_FILE
        return {"earlier": json.loads(facts.read_text(encoding="utf-8"))} if facts.exists() else {}

    @staticmethod
    def loaded(folder: Path) -> LlamaForCausalLM:
        """Return the model in a folder."""
        model: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(folder, dtype="float32")
        return model
