"""Training that goes on from a finished model's weights, with an optimizer of its own."""

import sys
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from training.train import Trainer

_START = "start"


class ContinuedTrainer(Trainer):
    """Starts from the model in `start`, of which the run's folder keeps a copy: what lies there later changes nothing."""

    start: Path

    @classmethod
    def prepare(cls, folder: Path, seed: int) -> None:
        """Put the weights and the tokenizer that training starts from into an empty folder."""
        if not cls.start.exists():
            sys.exit(f"nothing to go on from in {cls.start}; train that model first (training/README.md)")
        AutoModelForCausalLM.from_pretrained(cls.start).save_pretrained(folder / _START)
        AutoTokenizer.from_pretrained(cls.start).save_pretrained(folder)

    def first_model(self) -> LlamaForCausalLM:
        """The weights as they were, in float32."""
        return self.loaded(self.folder / _START).train()

    @staticmethod
    def loaded(folder: Path) -> LlamaForCausalLM:
        """A model to go on with, from its weights."""
        model: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(folder, dtype="float32")
        return model
