"""Loads a model by name: a shipped model, a local folder, or a hub id."""

import logging
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from kvweave.config import default_home
from kvweave.errors import InvalidRequest, ModelNotFound
from kvweave.models.adapter import Adapter
from kvweave.models.critical_layers import read_layers
from kvweave.models.precision import Precision, cached_folder, choose_precision, read_sizes
from kvweave.models.precision import parse_dtype as parse_dtype
from kvweave.models.quantised import quantise_weights
from kvweave.ops.cpu_features import has_fast_matmul
from kvweave.ops.threads import respect_cpu_limits
from kvweave.plugins import LAB, lab_missing, plugins

_LOG = logging.getLogger(__name__)

REFERENCE_NAME, AUXILIARY_NAME = "reference", "auxiliary"
_SHIPPED = {name: Path(__file__).parent / name for name in (REFERENCE_NAME, AUXILIARY_NAME)}


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
        name: a local folder or a hub id. None or "reference" is the small model that ships with kvweave, "auxiliary" an even
            smaller one that predicts the reference model's attention. Plugins may add names (kvweave-lab has "longer").
        dtype: auto is the checkpoint's, but float32 on a CPU without units for it, if that fits into memory.
        weights: full, int8 or int4 bits in linear layers; auto is full, or int8 where only that fits into memory.
        device: auto is a GPU if there is one.
        home: the folder with the measurements of `kvweave profile-layers`; None is the default home folder.

    Raises:
        ModelNotFound: there is nothing to load.
        UnsupportedModel: the model's KV cannot be represented.
        NotEnoughMemory: the weights do not fit; nothing has been loaded.
        InvalidRequest: an unknown dtype, number of bits or device.
        MissingExtra: fewer bits on a GPU, without torchao.
    """
    respect_cpu_limits()
    adapter = _load_named(name or REFERENCE_NAME, dtype, weights, parse_device(device))
    found = read_layers(home or default_home(), adapter.fingerprint, adapter.geometry.layers)
    adapter.critical_layers = found
    return adapter


def _load_named(name: str, dtype: str, weights: str, place: torch.device) -> Adapter:
    shipped = _shipped(name)
    if shipped is not None:
        # Full precision costs little at this size, and the published results were measured with it.
        return _load(str(shipped), name, "float32" if dtype == "auto" else dtype, weights, place)
    _check_folder(name)
    folder = Path(name).expanduser()
    if name in LAB["kvweave.models"] and not folder.exists():
        raise lab_missing(f"model {name!r}")
    source = str(folder.absolute()) if folder.exists() else name  # the same from any working directory
    return _load(source, source, dtype, weights, place)


def _shipped(name: str) -> Path | None:
    """Return the folder of a model that ships with kvweave or a plugin; None for any other."""
    plugin = plugins("kvweave.models").get(name)
    return _SHIPPED.get(name) or (None if plugin is None else Path(plugin.load()))


def reference_tokenizer() -> PreTrainedTokenizerBase:
    """Return the tokenizer of the shipped reference model."""
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(_SHIPPED[REFERENCE_NAME])
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


def _check_folder(name: str) -> None:
    folder = Path(name).expanduser()
    looks_local = name.startswith((".", "/", "~")) or folder.exists()
    if not looks_local:
        return
    if not folder.is_dir():
        raise ModelNotFound(f"{folder} is not a folder; a model is named by its folder or by a hub id")
    if not (folder / "config.json").exists():
        raise ModelNotFound(f"{folder} has no config.json, so it is not a transformers model folder")
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("*.bin")):
        raise ModelNotFound(f"{folder} has no weights (*.safetensors); copy the whole model folder")


def _load(source: str, name: str, dtype: str, weights: str, device: torch.device) -> Adapter:
    folder = cached_folder(source)
    sizes = None if folder is None else read_sizes(folder)
    precision = choose_precision(sizes, name, dtype, weights, device)
    if precision.notice:
        _LOG.log(logging.WARNING if precision.important else logging.INFO, precision.notice)
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
        model = AutoModelForCausalLM.from_pretrained(source, dtype=_loaded_dtype(precision))
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
        why = " ".join(str(error).split())[:300]  # transformers' messages run over many lines
        raise ModelNotFound(f"cannot load the model {name!r}: {why}") from error
    if precision.dtype is None and not has_fast_matmul(device, model.dtype):
        model.float()  # its sizes were not known beforehand
    if precision.bits != "full":
        quantise_weights(model, precision.bits, device)
    return Adapter(model.to(device), tokenizer, name=name)


def _loaded_dtype(precision: Precision) -> torch.dtype | str:
    """Return the dtype to read: the checkpoint's for fewer bits, since each layer is then converted alone."""
    return "auto" if precision.bits != "full" or precision.dtype is None else precision.dtype
