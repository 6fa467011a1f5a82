"""Settings: one frozen dataclass per component, read once, handed to constructors.

Order of precedence: arguments or flags, then environment variables (`KVWEAVE_` and the setting's name in
capitals), then `config.toml` in the home folder, then the defaults here.
"""

import dataclasses
import os
import tomllib
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import platformdirs

from kvweave.errors import InvalidRequest
from kvweave.types import STORAGES

DEFAULT_CHUNK_TOKENS = 512
DEFAULT_NEW_TOKENS = 256
CONTEXT_SHARE = 8  # a default never takes more than this fraction (1/8) of a model's context


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """`model`: hub id or local path, None for the shipped reference model. `dtype`: auto, float32, bfloat16, float16.

    `auxiliary`: the same for the small model that some recipes select tokens with, None for the shipped one.
    """

    model: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    auxiliary: str | None = None


@dataclass(frozen=True, slots=True)
class EmbeddingConfig:
    """`embedding_model`: a sentence-transformers hub id or path; None for all-MiniLM-L6-v2 (offline wheel if installed)."""

    embedding_model: str | None = None


@dataclass(frozen=True, slots=True)
class ChunkingConfig:
    """Lengths in tokens of the answering model; None is what the knowledge base was made with.

    For a new one that is 512, or an eighth of the model's context where that is less, so that the default
    number of chunks always fits; and no overlap.
    """

    chunk_tokens: int | None = None
    overlap_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class RetrievalConfig:
    """`top_k`: how many chunks are put in front of a question."""

    top_k: int = 5


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """`limit_bytes`: hard cap of the chunk KV on disk; None means 10 % of the free space, at most 20 GB.

    `host_bytes`, `device_bytes`, `shared_bytes`: the same for copies in the process's memory, on the model's device, and in
    the tier that several machines share; None leaves them as they were, at first none, none and 20 GB. `shared`: that
    tier's address, such as redis://host:6379/0 or s3://bucket/prefix; None for none.

    `storage`: how chunk KV that is made beforehand is stored: exact, int8 or int4; auto is int8, but exact for recipes that
    keep exact versions of chunks.
    """

    limit_bytes: int | None = None
    host_bytes: int | None = None
    device_bytes: int | None = None
    shared: str | None = None
    shared_bytes: int | None = None
    storage: str = "auto"


@dataclass(frozen=True, slots=True)
class AnswersConfig:
    """The answer bank: how similar questions must be to share an answer, and how much is kept.

    `answer_threshold` is the least cosine similarity, 0..1 (PerCache's τ); `answer_limit_bytes` 0 turns the bank off.
    """

    answer_threshold: float = 0.85
    answer_limit_bytes: int = 100_000_000


@dataclass(frozen=True, slots=True)
class PredictionConfig:
    """Which questions are expected, and how much of them is computed ahead.

    `prediction_stride`, 1..5: how many questions are predicted at once. `decode_cutoff`, 0..1: the highest
    `answer_threshold` at which their answers are computed ahead; above it their KV alone (PerCache §4.3.2).
    """

    prediction_stride: int = 5
    decode_cutoff: float = 0.87


@dataclass(frozen=True, slots=True)
class IdleConfig:
    """When to work ahead, and how much.

    `idle_quiet_s`: seconds since the last request. `idle_power`: "mains" to work only on mains power, or "any".
    `idle_seconds_per_day`, `idle_flops_per_day`: the day's budget, None for no limit.
    """

    idle_quiet_s: float = 60.0
    idle_power: str = "mains"
    idle_seconds_per_day: float | None = None
    idle_flops_per_day: float | None = None


@dataclass(frozen=True, slots=True)
class GenerationConfig:
    """How an answer is decoded: `temperature` 0 is greedy; `top_p` 0..1 keeps the nucleus of that mass.

    `max_new_tokens` None means 256, or an eighth of the model's context where that is less. Greedy decoding guesses from
    the prompt how an answer goes on, up to `prompt_lookup_tokens` at a time, and checks them in one pass; 0: it does not.
    """

    max_new_tokens: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    prompt_lookup_tokens: int = 31


@dataclass(frozen=True, slots=True)
class DecodingConfig:
    """What decoding attends to and holds in memory; with both None everything, on the prompt's own canvas.

    `kv_budget`: entries per step, layer and KV head: a share of those stored up to 1, above it a number. `resident_bytes`:
    hard bound of the KV in memory while decoding. With either, KV lies in a file and what is asked for is read.
    """

    kv_budget: float | None = None
    resident_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Config:
    """All components' settings together.

    `recipe` names the method by which stored KV is reused and, unless `prepare` names another way, made.
    `system` None means the default instruction of the prompt template.
    """

    home: Path
    recipe: str = "weave"
    prepare: str | None = None
    system: str | None = None
    model: ModelConfig = field(default_factory=ModelConfig)
    embedding: EmbeddingConfig = field(default_factory=EmbeddingConfig)
    chunking: ChunkingConfig = field(default_factory=ChunkingConfig)
    retrieval: RetrievalConfig = field(default_factory=RetrievalConfig)
    store: StoreConfig = field(default_factory=StoreConfig)
    answers: AnswersConfig = field(default_factory=AnswersConfig)
    prediction: PredictionConfig = field(default_factory=PredictionConfig)
    idle: IdleConfig = field(default_factory=IdleConfig)
    generation: GenerationConfig = field(default_factory=GenerationConfig)
    decoding: DecodingConfig = field(default_factory=DecodingConfig)


def within_context(given: int | None, default: int, context_tokens: int) -> int:
    """A length in tokens: the one given, else the default or an eighth of the model's context if that is less."""
    return given if given is not None else min(default, max(8, context_tokens // CONTEXT_SHARE))


def default_home(environment: Mapping[str, str] = os.environ) -> Path:
    """The folder named by KVWEAVE_HOME, else the platform's data folder."""
    return Path(environment.get("KVWEAVE_HOME") or platformdirs.user_data_dir("kvweave", appauthor=False))


def read_config(
    home: Path | None = None, environment: Mapping[str, str] = os.environ, **given: Any
) -> Config:
    """Build the settings from `config.toml` under `home`, the environment, and `given`, which wins.

    `given` holds field names of any component (`model`, `chunk_tokens`, `top_k`, …); None means "not given".
    Raises InvalidRequest for an unknown name, a wrong type or an impossible value, naming where it stands.
    """
    home = (home or default_home(environment)).expanduser().absolute()
    values = {
        **_read_toml(home / "config.toml"),
        **_read_environment(environment),
        **{name: value for name, value in given.items() if value is not None},
    }
    parts: dict[str, Any] = {}
    for part in dataclasses.fields(Config):
        if part.name == "home":
            continue
        component = _COMPONENTS.get(part.name)
        if component is None:
            parts |= _typed(Config, {part.name: values.pop(part.name)} if part.name in values else {})
            continue
        names = {f.name for f in dataclasses.fields(component)}
        parts[part.name] = component(**_typed(component, {n: values.pop(n) for n in names & values.keys()}))
    if values:
        raise InvalidRequest(f"unknown setting {sorted(values)[0]!r}; known are {', '.join(_known_names())}")
    config = Config(home=home, **parts)
    _check(config)
    return config


_COMPONENTS: dict[str, Any] = {
    "model": ModelConfig,
    "embedding": EmbeddingConfig,
    "chunking": ChunkingConfig,
    "retrieval": RetrievalConfig,
    "store": StoreConfig,
    "answers": AnswersConfig,
    "prediction": PredictionConfig,
    "idle": IdleConfig,
    "generation": GenerationConfig,
    "decoding": DecodingConfig,
}


def _read_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    """Settings from KVWEAVE_* variables, numbers parsed; an empty variable counts as not set."""
    found: dict[str, Any] = {}
    for component in (Config, *_COMPONENTS.values()):
        for name, hint in typing.get_type_hints(component).items():
            text = environment.get(f"KVWEAVE_{name.upper()}")
            kind = next((k for k in (int, float, str) if k is hint or k in typing.get_args(hint)), None)
            if not text or kind is None:
                continue
            try:
                found[name] = kind(text)
            except ValueError:
                raise InvalidRequest(f"KVWEAVE_{name.upper()} is {text!r}; it must be a number") from None
    return found


def _typed(component: type, values: dict[str, Any]) -> dict[str, Any]:
    """The values, if each has the type that the component states; an int will do for a float."""
    hints = typing.get_type_hints(component)
    for name, value in values.items():
        wanted = hints[name] | int if float in (hints[name], *typing.get_args(hints[name])) else hints[name]
        if not isinstance(value, wanted) or isinstance(value, bool):
            said = str(hints[name]).removeprefix("<class '").removesuffix("'>")
            raise InvalidRequest(f"setting {name} is {value!r}; it must be {said}")
    return values


def _known_names() -> list[str]:
    names = {"recipe", "prepare", "system"}
    for component in _COMPONENTS.values():
        names |= {f.name for f in dataclasses.fields(component)}
    return sorted(names)


def _read_toml(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{path} is not valid TOML: {error}") from error


def _check(config: Config) -> None:
    chunk_tokens, overlap = config.chunking.chunk_tokens, config.chunking.overlap_tokens
    new_tokens = config.generation.max_new_tokens
    temperature, top_p, seed = config.generation.temperature, config.generation.top_p, config.generation.seed
    budget, resident = config.decoding.kv_budget, config.decoding.resident_bytes
    most = 2**31  # tokens, chunks and seeds beyond this are typing errors, and overflow elsewhere
    bounds: list[tuple[bool, str]] = [
        (
            chunk_tokens is None or 8 <= chunk_tokens < most,
            f"chunk_tokens is {chunk_tokens}; at least 8 are needed",
        ),
        (overlap is None or 0 <= overlap < most, f"overlap_tokens is {overlap}; it cannot be negative"),
        (
            1 <= config.retrieval.top_k < most,
            f"top_k is {config.retrieval.top_k}; at least one chunk is needed",
        ),
        (
            new_tokens is None or 1 <= new_tokens < most,
            f"max_new_tokens is {new_tokens}; at least 1 is needed",
        ),
        (
            temperature == 0 or 1e-3 <= temperature < 1e3,
            f"temperature is {temperature}; use 0 (greedy) or a value from 0.001 to 1000",
        ),
        (
            0 <= config.answers.answer_threshold <= 1,
            f"answer_threshold is {config.answers.answer_threshold}; it lies between 0 and 1",
        ),
        (
            0 <= config.answers.answer_limit_bytes < 2**63,
            f"answer_limit_bytes is {config.answers.answer_limit_bytes}; it cannot be negative (0: keep no answers)",
        ),
        (
            1 <= config.prediction.prediction_stride <= 5,
            f"prediction_stride is {config.prediction.prediction_stride}; it lies between 1 and 5",
        ),
        (
            0 <= config.prediction.decode_cutoff <= 1,
            f"decode_cutoff is {config.prediction.decode_cutoff}; it lies between 0 and 1",
        ),
        *_idle_bounds(config.idle),
        (0 < top_p <= 1, f"top_p is {top_p}; it lies in (0, 1]"),
        (
            config.generation.prompt_lookup_tokens >= 0,
            f"prompt_lookup_tokens is {config.generation.prompt_lookup_tokens}; it cannot be negative (0: none are looked up)",
        ),
        (
            config.store.storage in ("auto", *STORAGES),
            f"storage is {config.store.storage!r}; choose one of auto, {', '.join(STORAGES)}",
        ),
        (
            budget is None or 0 < budget <= 1 or (budget < most and budget == int(budget)),
            f"kv_budget is {budget}; it is a share in (0, 1] or a whole number of entries",
        ),
        (
            resident is None or 0 < resident < 2**63,
            f"resident_bytes is {resident}; it must be above 0",
        ),
        (seed is None or 0 <= seed < 2**63, f"seed is {seed}; it lies between 0 and 2^63"),
    ]
    for holds, message in bounds:
        if not holds:
            raise InvalidRequest(message)


def _idle_bounds(idle: IdleConfig) -> list[tuple[bool, str]]:
    return [
        (
            idle.idle_power in ("mains", "any"),
            f"idle_power is {idle.idle_power!r}; choose mains (work ahead on mains power only) or any",
        ),
        *(
            (value is None or value >= 0, f"{name} is {value}; it cannot be negative")
            for name, value in (
                ("idle_quiet_s", idle.idle_quiet_s),
                ("idle_seconds_per_day", idle.idle_seconds_per_day),
                ("idle_flops_per_day", idle.idle_flops_per_day),
            )
        ),
    ]
