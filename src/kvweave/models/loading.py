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
from kvweave.models.snapshot_adapter import LoadedModel, adapt, fused
from kvweave.models.source import gguf_folder
from kvweave.ops.cpu_features import has_fast_matmul
from kvweave.plugins import LAB, lab_missing, plugins

_LOG = logging.getLogger(__name__)

REFERENCE_NAME, AUXILIARY_NAME = "reference", "auxiliary"
_SHIPPED = {name: Path(__file__).parent / name for name in (REFERENCE_NAME, AUXILIARY_NAME)}
_SLOW_FROM = 50_000_000  # parameters from which slow matrix products are noticeable
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_model(
    name: str | None = None, *, dtype: str = "auto", device: str = "auto", home: Path | None = None
) -> Adapter:
    """Load a causal language model and its tokenizer through the ordinary transformers calls.

    Args:
        name: a local folder, a GGUF file, a hub id, or `hub/repo:QUANT` (GGUF). None or "reference" is the small model that
            ships with kvweave, "auxiliary" an even smaller one that predicts the reference model's attention. Plugins may add
            names (kvweave-lab has "longer").
        dtype: auto is the checkpoint's, with a warning where this CPU is slow at it.
        device: auto is a GPU if there is one.
        home: the folder with converted GGUF files and the measurements of `kvweave profile-layers`; None is the default
            home folder.

    Raises:
        ModelNotFound: there is nothing to load.
        UnsupportedModel: the model's KV cannot be represented.
        InvalidRequest: an unknown dtype or device.
    """
    return fused(load_any_model(name, dtype=dtype, device=device, home=home))


def load_any_model(
    name: str | None = None, *, dtype: str = "auto", device: str = "auto", home: Path | None = None
) -> LoadedModel:
    """Load a model as `load_model` does; also one whose KV cannot be represented, if exact prefixes can be continued from."""
    home = home or default_home()
    adapter = _load_named(name or REFERENCE_NAME, dtype, parse_device(device), home)
    if isinstance(adapter, Adapter):
        found = read_layers(home, adapter.fingerprint, adapter.geometry.layers)
        adapter.critical_layers = found
    return adapter


def _load_named(name: str, dtype: str, place: torch.device, home: Path) -> LoadedModel:
    shipped = _shipped(name)
    if shipped is not None:
        # Full precision costs little at this size, and the published results were measured with it.
        return _load(str(shipped), name, "float32" if dtype == "auto" else dtype, place)
    parse_dtype(dtype)  # before minutes of converting
    gguf = gguf_folder(name, home)
    if gguf is not None:
        return _load(str(gguf.folder), gguf.name, dtype, place)
    _check_folder(name)
    folder = Path(name).expanduser()
    if name in LAB["kvweave.models"] and not folder.exists():
        raise lab_missing(f"model {name!r}")
    source = str(folder.absolute()) if folder.exists() else name  # the same from any working directory
    return _load(source, source, dtype, place)


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


def parse_dtype(dtype: str) -> torch.dtype | None:
    """Return the named dtype, None for auto. Raises InvalidRequest for an unknown one."""
    if dtype != "auto" and dtype not in _DTYPES:
        raise InvalidRequest(f"dtype {dtype!r} is unknown; use auto, {', '.join(_DTYPES)}")
    return _DTYPES.get(dtype)


def _check_folder(name: str) -> None:
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
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("*.bin")):
        raise ModelNotFound(f"{folder} has no weights (*.safetensors); copy the whole model folder")


def _load(source: str, name: str, dtype: str, device: torch.device) -> LoadedModel:
    torch_dtype = parse_dtype(dtype) or "auto"
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch_dtype)
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
        why = " ".join(str(error).split())[:300]  # transformers' messages run over many lines
        raise ModelNotFound(f"cannot load the model {name!r}: {why}") from error
    stored = model.dtype
    if dtype == "auto" and not has_fast_matmul(device, stored) and model.num_parameters() >= _SLOW_FROM:
        _LOG.warning(
            "%s is in %s, for which this CPU has no units: dtype float32 is several times faster, in twice the memory",
            name,
            str(stored).removeprefix("torch."),
        )
    return adapt(model.to(device), tokenizer, name)
