"""Converts the GGUF file of a model into a folder that transformers loads like any other.

Memory: the tensors of one output file (`SHARD_BYTES`, or one tensor if that is larger) and a few rows of one tensor in
float32.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import transformers
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize, get_tensor_name_map
from gguf.constants import MODEL_ARCH_NAMES
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from kvweave.errors import KvweaveError, ModelNotFound, UnsupportedModel, one_line
from kvweave.models.gguf.families import ROPE_FACTORS, model_config, restore
from kvweave.models.gguf.header import Header, TensorEntry, read_header
from kvweave.models.gguf.tokenizer import build_tokenizer, check_vocabulary, end_tokens
from kvweave.models.support import check_config

STAGE = "converting the GGUF file (MB)"


class Conversion:
    """The conversion of one model, whose files are `parts`. Making one reads the header and checks all that it says.

    Raises:
        ModelNotFound: the files are not a whole model.
        UnsupportedModel: kvweave cannot run the model, or the file has something that cannot be read; the message names it.
    """

    def __init__(self, parts: Sequence[Path]) -> None:
        self._header = read_header(parts)
        with _understood(self._header.path):
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
        """Write weights, configuration, tokenizer and generation settings into an existing, empty folder.

        Raises ModelNotFound for a damaged vocabulary, OSError if the folder cannot be written.
        """
        with _understood(self._header.path):
            self._write(folder, report)

    def _write(self, folder: Path, report: Callable[[str, int, int], None]) -> None:
        # Without a version, transformers below 5.20 takes any tokenizer for one of an old Mistral model, and warns.
        version = {"transformers_version": transformers.__version__}
        config = {"architectures": [self._class], **self._config, **version}
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


@contextmanager
def _understood(path: Path) -> Iterator[None]:
    """Turn what values of the wrong kind or size cause, here and in the libraries, into ModelNotFound."""
    try:
        yield
    except (KvweaveError, OSError, MemoryError):
        raise
    except Exception as error:  # a damaged file may cause any exception
        why = f"{type(error).__name__}: {one_line(error)}"
        raise ModelNotFound(f"{path} is damaged ({why}); download it again") from error


def _dtype(header: Header) -> str:
    """Return the dtype to compute in: bfloat16 as the originals, float32 for a file that has all weights in it.

    Never float16, whatever the file stores: Gemma's activations do not fit into its range.
    """
    matrices = {tensor.ggml_type for tensor in header.tensors if len(tensor.shape) > 1}
    return "float32" if matrices == {GGMLQuantizationType.F32} else "bfloat16"


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


SHARD_BYTES: Final = 1_000_000_000
_CHUNK_VALUES: Final = 4_000_000  # 16 MB of float32 at a time
_PLAIN: Final = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}
_FLOAT16_MOST: Final = float(torch.finfo(torch.float16).max)


def parameter_names(header: Header, config: Mapping[str, Any]) -> tuple[dict[str, str], str]:
    """Return transformers' name of each tensor by its name in the file, and the class of the model.

    Raises:
        UnsupportedModel: the file has tensors that the model does not have, other shapes, or a type that cannot be read.
        ModelNotFound: the file lacks tensors.
    """
    settings = AutoConfig.for_model(**{**config, "dtype": None})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(settings)
    architecture = next(key for key, value in MODEL_ARCH_NAMES.items() if value == header.architecture)
    known = get_tensor_name_map(architecture, settings.num_hidden_layers)
    tied = {"lm_head.weight"} if settings.tie_word_embeddings else set()
    wanted = {
        known.get_name(name, try_suffixes=(".weight", ".bias")) or name: (name, tuple(weight.shape))
        for name, weight in model.state_dict().items()
        if name not in tied
    }
    found = {tensor.name: tensor for tensor in header.tensors if tensor.name not in ROPE_FACTORS}
    if missing := sorted(set(wanted) - set(found)):
        raise ModelNotFound(f"{header.path} lacks {_named_tensors(missing)}; download it again")
    if unknown := sorted(set(found) - set(wanted)):
        raise UnsupportedModel(
            f"{header.path} has {_named_tensors(unknown)}, which {type(model).__name__} does not have; name the model's folder or hub "
            "id with *.safetensors instead"
        )
    for gguf_name, (name, shape) in wanted.items():
        if found[gguf_name].shape != shape:
            raise UnsupportedModel(
                f"{header.path} has {gguf_name} of shape {found[gguf_name].shape}, but {name} has {shape}"
            )
    _check_types(header)
    return {gguf_name: name for gguf_name, (name, _) in wanted.items()}, type(model).__name__


def write_weights(
    header: Header, names: Mapping[str, str], folder: Path, report: Callable[[int, int], None]
) -> None:
    """Write all weights into `folder`, in files of `SHARD_BYTES`; `report` gets bytes read and bytes in all."""
    tensors = [tensor for tensor in header.tensors if tensor.name in names]
    total, done = sum(tensor.data.nbytes for tensor in tensors), 0
    shards: list[list[str]] = []
    held: dict[str, Tensor] = {}
    for tensor in tensors:
        report(done, total)
        held[names[tensor.name]] = read_tensor(header, tensor)
        done += tensor.data.nbytes
        if sum(weight.nbytes for weight in held.values()) >= SHARD_BYTES or tensor is tensors[-1]:
            save_file(held, folder / f"{len(shards)}.safetensors", metadata={"format": "pt"})
            shards.append(list(held))
            held = {}
    _name_shards(folder, shards)
    report(total, total)


def read_tensor(header: Header, tensor: TensorEntry) -> Tensor:
    """Return a tensor as transformers has it.

    Plain types stay what they are. Blocks of quantised numbers become float16, which is finer than bfloat16; float32 if they
    do not fit into its range.
    """
    plain = _PLAIN.get(GGMLQuantizationType(tensor.ggml_type))
    found = torch.empty(tensor.shape, dtype=plain or torch.float16)
    for start, rows in _float32_rows(tensor):
        if plain is None and found.dtype == torch.float16 and np.abs(rows).max(initial=0) > _FLOAT16_MOST:
            found = found.float()
        found[start : start + len(rows)] = torch.from_numpy(rows)
    return restore(header, tensor.name, found)


def _float32_rows(tensor: TensorEntry) -> Iterator[tuple[int, NDArray[np.float32]]]:
    """Yield (first row, rows) of a tensor, some at a time; a tensor of one axis has one number in each row."""
    kind = GGMLQuantizationType(tensor.ggml_type)
    if len(tensor.shape) == 1:
        yield 0, dequantize(tensor.data[None], kind)[0].copy()
        return
    rows = tensor.data.reshape(tensor.shape[0], -1)
    step = max(1, _CHUNK_VALUES // max(1, prod(tensor.shape[1:])))
    for start in range(0, len(rows), step):
        values = dequantize(rows[start : start + step], kind)
        yield start, np.array(values, dtype=np.float32).reshape(-1, *tensor.shape[1:])


def _name_shards(folder: Path, shards: list[list[str]]) -> None:
    """Give the files the names that transformers looks for; several need a list of what is where."""
    if len(shards) == 1:
        (folder / "0.safetensors").rename(folder / "model.safetensors")
        return
    places = {}
    for number, names in enumerate(shards):
        name = f"model-{number + 1:05}-of-{len(shards):05}.safetensors"
        (folder / f"{number}.safetensors").rename(folder / name)
        places.update(dict.fromkeys(names, name))
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")


def _check_types(header: Header) -> None:
    """Raise UnsupportedModel if a tensor's numbers cannot be read, before any is."""
    kinds = {GGMLQuantizationType(tensor.ggml_type): tensor.name for tensor in header.tensors}
    for kind, name in kinds.items():
        _, block_bytes = GGML_QUANT_SIZES[kind]
        try:
            dequantize(np.zeros((1, block_bytes), np.uint8), kind)
        except NotImplementedError as error:
            raise UnsupportedModel(
                f"{header.path} has tensors of type {kind.name} ({name}), which kvweave cannot read; take a file with "
                "another quantisation, such as Q4_K_M or Q8_0"
            ) from error


def _named_tensors(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return f"the tensors {shown}" + (f" and {len(names) - 3} more" if len(names) > 3 else "")
