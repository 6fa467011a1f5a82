"""Loads a model by name: a shipped model, a local folder, or a hub id."""

import inspect
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path, PurePosixPath

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TokenizersBackend,
)

from kvweave.config import default_home
from kvweave.errors import (
    InvalidRequest,
    KvweaveError,
    ModelNotFound,
    UnsupportedModel,
    one_line,
)
from kvweave.hub import cached_folder, folder_without_hub
from kvweave.machine import has_fast_matmul, respect_cpu_limits
from kvweave.models.adapter import Adapter
from kvweave.models.fingerprint import TOKENIZER_FACT, ModelMemory, digest_tokenizer
from kvweave.models.forward import use_few_rows
from kvweave.models.precision import choose_precision, read_sizes
from kvweave.models.precision import parse_dtype as parse_dtype
from kvweave.models.quantised import quantise_weights
from kvweave.models.snapshot_adapter import LoadedModel, adapt, fused
from kvweave.models.source import ModelFolder, gguf_folder
from kvweave.models.support import middle_layers
from kvweave.plugins import more_in_lab, plugins
from kvweave.types import ModelFingerprint

_LOG = logging.getLogger(__name__)

REFERENCE_NAME, AUXILIARY_NAME = "reference", "auxiliary"
SHIPPED = {name: Path(__file__).parent / name for name in (REFERENCE_NAME, AUXILIARY_NAME)}
_DIRECT = "padding side of the tokenizer that is in tokenizer.json alone"
_CLASS_SETTINGS = frozenset(
    {"tokenizer_class", "backend", "is_local", "local_files_only", "auto_map", "processor_class"}
)
_MOST_LAYERS = 1_000
_MOST_TOKENS = 10_000_000
_COMPARED = (
    "all_special_ids",
    "model_max_length",
    "padding_side",
    "truncation_side",
    "clean_up_tokenization_spaces",
)


def load_model(
    name: str | None = None,
    *,
    dtype: str = "auto",
    weights: str = "auto",
    device: str = "auto",
    home: Path | None = None,
) -> Adapter:
    """Load a causal language model and its tokenizer through the ordinary transformers calls.

    Args:
        name: a local folder, a GGUF file, a hub id, or `hub/repo:QUANT` (GGUF). None or "reference" is the shipped
            model, "auxiliary" a smaller one that predicts its attention. Plugins may add names (kvweave-lab has "longer"
            and "gemma-3-270m").
        dtype: auto is the checkpoint's, but float32 on a CPU without units for it, if that fits into memory.
        weights: full, int8 or int4 bits in linear layers; auto is full, or int8 where only that fits into memory.
        device: auto is a GPU if there is one.
        home: the folder with converted GGUF files and the measurements of `kvweave profile-layers`; None is the default
            home folder.

    Raises:
        ModelNotFound: there is nothing to load.
        UnsupportedModel: the model's KV cannot be represented.
        NotEnoughMemory: the weights do not fit; nothing has been loaded.
        InvalidRequest: an unknown dtype, number of bits or device.
        MissingExtra: fewer bits on a GPU, without torchao.
    """
    return fused(load_any_model(name, dtype=dtype, weights=weights, device=device, home=home))


def load_any_model(
    name: str | None = None,
    *,
    dtype: str = "auto",
    weights: str = "auto",
    device: str = "auto",
    home: Path | None = None,
) -> LoadedModel:
    """Load a model as `load_model` does; also one whose KV cannot be represented, if exact prefixes can be continued from."""
    respect_cpu_limits()
    home = home or default_home()
    parse_dtype(dtype)  # before minutes of converting
    found = _find(name or REFERENCE_NAME, home)
    if found.shipped and dtype == "auto":
        dtype = "float32"  # costs little at this size, and the published results were measured with it
    adapter = _load(found, dtype, weights, parse_device(device), home)
    if isinstance(adapter, Adapter):
        adapter.critical_layers = read_layers(home, adapter.fingerprint, adapter.geometry.layers)
    return adapter


@dataclass(frozen=True, slots=True)
class ModelWithoutWeights:
    """A model's name, tokenizer and configuration; `model` has parameters without numbers."""

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase


def load_without_weights(name: str, home: Path) -> ModelWithoutWeights:
    """Load what is needed to make prompts for a model that runs elsewhere; its folder need not have weights.

    Raises ModelNotFound.
    """
    found = _find(name, home, weights=False)
    folder = cached_folder(found.place)
    with _loading(name):
        memory = ModelMemory(None if found.shipped else folder, home)
        tokenizer = read_tokenizer(found.place, folder, memory)
        config = _read_config(str(found.place))
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        with suppress(OSError):  # many models have none
            model.generation_config = GenerationConfig.from_pretrained(found.place)
    return ModelWithoutWeights(found.name, model, tokenizer)


def model_files(name: str | None, home: Path) -> str:
    """Return where transformers finds a model's files: a folder, or a hub id. Converts a GGUF file that was not converted yet.

    Raises ModelNotFound.
    """
    return _find(name or REFERENCE_NAME, home).place


def _find(name: str, home: Path, *, weights: bool = True) -> ModelFolder:
    named = _named(name)
    if named is not None:
        return named
    gguf = gguf_folder(name, home)
    if gguf is not None:
        return gguf
    _check_folder(name, weights=weights)
    folder = Path(name).expanduser()
    if folder.exists():
        place = str(folder.absolute())  # the same from any working directory
        return ModelFolder(place, place)
    known = [*SHIPPED, *plugins("kvweave.models")]
    meant = get_close_matches(name, known, 1, cutoff=0.85) if "/" not in name else []
    if meant and cached_folder(name) is None:  # the hub's client would try such a name for a minute
        raise ModelNotFound(
            f"there is no model {name!r}; did you mean {meant[0]}? Hub ids have the form OWNER/NAME"
        )
    return ModelFolder(str(folder_without_hub(name) or name), name)


def _named(name: str) -> ModelFolder | None:
    """Return the folder of a model that kvweave or a plugin has a name for; None for any other."""
    plugin = plugins("kvweave.models").get(name)
    found = SHIPPED.get(name) or (None if plugin is None else plugin.load())
    if found is None:
        return None
    return ModelFolder(str(found()), name) if callable(found) else ModelFolder(str(found), name, shipped=True)


def reference_tokenizer() -> PreTrainedTokenizerBase:
    """Return the tokenizer of the shipped reference model."""
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
        SHIPPED[REFERENCE_NAME], trust_remote_code=False
    )
    return tokenizer


def parse_device(device: str) -> torch.device:
    """Return the named device; auto is a GPU if there is one. Raises InvalidRequest if it is not available."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
        torch.empty(1, device=place)
    except (RuntimeError, AssertionError) as error:  # no such device, or a build without it
        raise InvalidRequest(f"device {device!r} cannot be used here; use cpu, or cuda with a GPU") from error
    return place


def _check_folder(name: str, *, weights: bool) -> None:
    folder = Path(name).expanduser()
    looks_local = name.startswith((".", "/", "~")) or folder.exists()
    if not looks_local:
        return
    if not folder.is_dir():
        raise ModelNotFound(
            f"{folder} is not a folder or GGUF file; a model is named by one of them or by a hub id"
        )
    if not (folder / "config.json").exists():
        raise ModelNotFound(f"{folder} has no config.json, so it is not a transformers model folder")
    if weights and not any(folder.glob("*.safetensors")) and not any(folder.glob("*.bin")):
        raise ModelNotFound(f"{folder} has no weights (*.safetensors); copy the whole model folder")


def _load(found: ModelFolder, dtype: str, weights: str, device: torch.device, home: Path) -> LoadedModel:
    source, name = found.place, found.name
    folder = cached_folder(source)
    sizes = None if folder is None else read_sizes(folder)
    precision = choose_precision(sizes, name, dtype, weights, device)
    if precision.notice:
        _LOG.log(logging.WARNING if precision.important else logging.INFO, precision.notice)
    memory = ModelMemory(None if found.shipped else folder, home)  # shipped models are small
    more = more_in_lab("kvweave.models") if folder is None and "/" not in name else ""
    with _loading(name, more):
        if folder is not None:
            _check_weight_files(folder)
        _read_config(source)
        tokenizer = read_tokenizer(source, folder, memory)
        # For fewer bits the checkpoint's dtype, since each layer is then converted alone.
        chosen = (precision.dtype if precision.bits == "full" else None) or "auto"
        model = AutoModelForCausalLM.from_pretrained(source, dtype=chosen, trust_remote_code=False)
    if precision.dtype is None and not has_fast_matmul(device, model.dtype):
        model.float()  # its sizes were not known beforehand
    if precision.bits != "full":
        quantise_weights(model, precision.bits, device)
    model = model.to(device)
    use_few_rows(model)
    with _loading(name):  # a configuration that does not fit the weights shows when they are first run
        return adapt(model, tokenizer, name, memory)


@contextmanager
def _loading(name: str, more: str = "") -> Iterator[None]:
    """Turn what the libraries raise for a damaged or unknown model into ModelNotFound; the message ends with `more`."""
    try:
        yield
    except (KvweaveError, MemoryError):
        raise
    except BaseException as error:  # a damaged file may cause any exception
        if (
            not isinstance(error, Exception) and type(error).__name__ != "PanicException"
        ):  # Rust's, of tokenizers
            raise
        raise ModelNotFound(f"cannot load the model {name!r}: {one_line(error)}{more}") from error


def _read_config(source: str) -> PretrainedConfig:
    """Return a model's configuration; raises UnsupportedModel for more layers than any model has: making them would not end."""
    config = AutoConfig.from_pretrained(source, trust_remote_code=False)
    layers = getattr(config.get_text_config(), "num_hidden_layers", 0)
    if isinstance(layers, int) and layers > _MOST_LAYERS:
        raise UnsupportedModel(
            f"{source} says that it has {layers:,} layers; at most {_MOST_LAYERS:,} are read"
        )
    return config


def _check_weight_files(folder: Path) -> None:
    """Raise UnsupportedModel for weight files that transformers would read, and that are not safe to read.

    These are files outside of the model's folder, which a list of weight files may name, and PyTorch's pickles from before
    1.6: a damaged one of 130 KB takes its reader a minute.
    """
    if not any(folder.glob("*.safetensors")):
        for pickled in folder.glob("*.bin"):
            with pickled.open("rb") as opened:
                if opened.read(2) != b"PK":
                    raise UnsupportedModel(
                        f"{pickled} is not a zip file, as PyTorch writes weights since 1.6; save them as safetensors"
                    )
    for index in folder.glob("*.index.json"):
        listed = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        for name in set(listed.values()):
            if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
                raise UnsupportedModel(f"{index} names {name!r}, which is outside of the model's folder")


def read_tokenizer(source: str, folder: Path | None, memory: ModelMemory) -> PreTrainedTokenizerBase:
    """Return a model's tokenizer.

    AutoTokenizer parses a large tokenizer.json three times, once in Rust and twice in Python. Most tokenizers are the same
    when they are built from this file alone: if an earlier start found that out, this one parses it once.
    """
    padding = memory.get(_DIRECT)
    if folder is not None and isinstance(padding, str):
        return _direct_tokenizer(folder, padding)
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    if not isinstance(
        tokenizer.model_max_length, int | float
    ):  # transformers compares it with every text's length
        raise UnsupportedModel(
            f"{source}: model_max_length in tokenizer_config.json is {str(tokenizer.model_max_length)[:40]!r}, not a number"
        )
    if padding is None and (largest := max(tokenizer.get_vocab().values(), default=0)) > _MOST_TOKENS:
        raise UnsupportedModel(  # the library would list every id that is missing below
            f"{source} has a token of number {largest:,}; at most {_MOST_TOKENS:,} are read"
        )
    if folder is not None and (folder / "tokenizer.json").exists() and padding is None:
        digest = digest_tokenizer(tokenizer)
        memory.put(TOKENIZER_FACT, digest)  # the fingerprint needs it too, and it takes most of a second
        memory.put(_DIRECT, tokenizer.padding_side if is_direct(tokenizer, digest, folder) else False)
    return tokenizer


def _direct_tokenizer(folder: Path, padding_side: str) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a tokenizer.json, with the settings and the chat template beside it."""
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    template = folder / "chat_template.jinja"
    if template.exists():
        settings["chat_template"] = template.read_text(encoding="utf-8")
    known = {name: value for name, value in settings.items() if name not in _CLASS_SETTINGS}
    known["padding_side"] = padding_side  # a default of the tokenizer's class
    return TokenizersBackend(tokenizer_file=str(folder / "tokenizer.json"), **known)


def is_direct(tokenizer: PreTrainedTokenizerBase, digest: str, folder: Path) -> bool:
    """Whether `_direct_tokenizer` gives the same tokenizer: equal in every rule, token and setting, with no methods of its own.

    `digest` is that of the tokenizer.
    """
    kind = type(tokenizer)
    plain = kind is TokenizersBackend or (
        kind.__bases__ == (TokenizersBackend,)
        and not any(inspect.isfunction(part) for name, part in vars(kind).items() if name != "__init__")
    )
    if not plain:
        return False
    try:
        direct = _direct_tokenizer(folder, tokenizer.padding_side)
    except Exception:  # settings that only the tokenizer's own class understands
        return False
    return all(getattr(direct, name) == getattr(tokenizer, name) for name in _COMPARED) and (
        digest_tokenizer(direct) == digest
    )


# The layers that `kvweave profile-layers` measured, by the model's digest


def read_layers(home: Path, model: ModelFingerprint, layers: int) -> tuple[int, ...]:
    """Return the measured layers of this model, else the middle ones; log and ignore a file that cannot be used."""
    path = layers_file(home, model)
    if not path.exists():
        return middle_layers(layers)
    try:
        found = tuple(json.loads(path.read_text(encoding="utf-8"))["critical_layers"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        _LOG.warning("ignoring %s: %s; run `kvweave profile-layers` to write it again", path, error)
        return middle_layers(layers)
    if not found or not all(isinstance(layer, int) and 0 <= layer < layers for layer in found):
        _LOG.warning(
            "ignoring %s: it names layers %s of %d; run `kvweave profile-layers` to write it again",
            path,
            found,
            layers,
        )
        return middle_layers(layers)
    return found


def layers_file(home: Path, model: ModelFingerprint) -> Path:
    """The file of a model's measured layers."""
    return home / "models" / f"{model.digest}.json"
