"""Converts the GGUF file of a model into a folder that transformers loads like any other."""

import json
from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path

from gguf import GGMLQuantizationType

from kvweave.models.gguf.families import model_config
from kvweave.models.gguf.header import Header, read_header
from kvweave.models.gguf.tokenizer import build_tokenizer, check_vocabulary, end_tokens
from kvweave.models.gguf.weights import parameter_names, write_weights
from kvweave.models.support import check_config

STAGE = "converting the GGUF file (MB)"


class Conversion:
    """The conversion of one model, whose files are `parts`. Making one reads the header and checks all that it says.

    Raises:
        ModelNotFound: the files are not a whole model.
        UnsupportedModel: kvweave cannot run the model, or the file has something that cannot be read; the message names it.
    """

    def __init__(self, parts: Sequence[Path]) -> None:
        from transformers import AutoConfig

        self._header = read_header(parts)
        self._config = {**model_config(self._header), "dtype": _dtype(self._header)}
        check_config(AutoConfig.for_model(**self._config))
        check_vocabulary(self._header)
        self._names, self._class = parameter_names(self._header, self._config)

    @property
    def needed_bytes(self) -> int:
        """The size of the converted weights: two bytes a number except where the file has four."""
        four = GGMLQuantizationType.F32
        return sum(
            prod(tensor.shape) * (4 if tensor.ggml_type == four else 2) for tensor in self._header.tensors
        )

    def write(self, folder: Path, report: Callable[[str, int, int], None]) -> None:
        """Write weights, configuration, tokenizer and generation settings into an existing, empty folder."""
        config = {"architectures": [self._class], **self._config}
        ends = end_tokens(self._header)
        generation = {
            name: config[name] for name in ("bos_token_id", "pad_token_id") if config[name] is not None
        }
        if ends:
            generation["eos_token_id"] = ends if len(ends) > 1 else ends[0]
        _write_json(folder / "config.json", config)
        _write_json(folder / "generation_config.json", generation)
        build_tokenizer(self._header).save_pretrained(folder)
        write_weights(
            self._header,
            self._names,
            folder,
            lambda done, total: report(STAGE, done // 10**6, total // 10**6),
        )


def _dtype(header: Header) -> str:
    """Return the dtype to compute in: bfloat16 as the originals, float32 for a file that has all weights in it.

    Never float16, whatever the file stores: Gemma's activations do not fit into its range.
    """
    matrices = {tensor.ggml_type for tensor in header.tensors if len(tensor.shape) > 1}
    return "float32" if matrices == {GGMLQuantizationType.F32} else "bfloat16"


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
