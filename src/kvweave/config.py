"""Settings: one frozen dataclass per component. They are read once and passed to constructors.

Order of precedence: arguments or flags, then environment variables (`KVWEAVE_` and the setting's name in
capitals), then `config.toml` in the home folder, then the defaults here. `docs/reference/settings.md` is made from the
docstrings.
"""

import dataclasses
import os
import tomllib
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

from kvweave.errors import InvalidRequest
from kvweave.home import default_home as default_home
from kvweave.home import without_tilde
from kvweave.server_config import ServerConfig, server_bounds

DEFAULT_CHUNK_TOKENS = 512
DEFAULT_NEW_TOKENS = 256
DEFAULT_THINKING_TOKENS = 2048
DEFAULT_IDLE_SECONDS_PER_DAY = 3600.0
"""Daily seconds of background work per knowledge base that no user asked for: 4 % of a day.

Predicting 60 questions about 10 documents and answering them took one thread 185 s with a model of 270 million parameters. The
budget is enough for a model twenty times as slow.
"""
EMBEDDING_MODELS = {"multilingual": "sentence-transformers/paraphrase-multilingual-MiniLM-L12-v2"}
"""Short names of embedding models."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The models.

    Attributes:
        model: Hub id, local folder, GGUF file or hub/repo:QUANT. Default: the model the knowledge base was made with, else
            the shipped one.
        dtype: auto, float32, bfloat16 or float16. auto takes the checkpoint's, but float32 on a CPU without units for it.
        weights: auto, full, int8 or int4: the bits of the linear layers' weights. auto is full, or int8 where only that
            fits into memory.
        device: auto, cpu, cuda or cuda:N. auto takes a GPU if there is one.
        auxiliary: Hub id or folder of the small model that `cacheclip` selects tokens with. Default: the shipped one.
    """

    model: str | None = None
    dtype: str = "auto"
    weights: str = "auto"
    device: str = "auto"
    auxiliary: str | None = None


@dataclass(frozen=True, slots=True)
class EmbeddingConfig:
    """The embedding model.

    Attributes:
        embedding_model: Hub id or folder of sentence-transformers, or multilingual. Default: all-MiniLM-L6-v2, which knows
            English, from the extra `offline` if that is installed.
    """

    embedding_model: str | None = None


@dataclass(frozen=True, slots=True)
class ChunkingConfig:
    """Chunks, in tokens of the answering model.

    Both default to what the knowledge base was made with.

    Attributes:
        chunk_tokens: Longest chunk. For a new knowledge base: 512, or an eighth of the model's context if that is less.
        overlap_tokens: Tokens that a chunk shares with the previous one. For a new knowledge base: 0.
    """

    chunk_tokens: int | None = None
    overlap_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class RetrievalConfig:
    """Retrieval.

    Attributes:
        top_k: Number of chunks to retrieve.
        reranker: Hub id or folder of a cross-encoder of sentence-transformers that reranks the best chunks. Default: none.
    """

    top_k: int = 5
    reranker: str | None = None


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """The store of chunk KV. Every limit is a hard cap; None leaves it as it was last set.

    Attributes:
        limit_bytes: Limit of KV on disk. Initially 10 % of the free space, up to 20 GB; kept afterwards.
        host_bytes: Limit of KV copies in the process's memory; initially 0.
        device_bytes: Limit of KV copies in device memory; initially 0.
        shared: Address of a tier that several machines share, such as redis://host:6379/0 or s3://bucket/prefix.
        shared_bytes: Limit of the shared tier; initially 20 GB.
        storage: How prepared KV is stored: auto, exact, int8 or int4. auto is int8, but exact for recipes that keep exact
            versions of chunks.
    """

    limit_bytes: int | None = None
    host_bytes: int | None = None
    device_bytes: int | None = None
    shared: str | None = None
    shared_bytes: int | None = None
    storage: str = "auto"


@dataclass(frozen=True, slots=True)
class AnswersConfig:
    """The answer cache, and the check of answers.

    Attributes:
        answer_threshold: Least cosine similarity at which an earlier answer becomes a draft, and questions are compared for prediction, 0..1 (PerCache's τ).
        answer_limit_bytes: Cap of the answer cache; 0 turns it off.
        check_answers: Replace an answer by "The documents do not say." if its words are not in the passages. The answer then
            appears only when it is complete.
    """

    answer_threshold: float = 0.85
    answer_limit_bytes: int = 100_000_000
    check_answers: bool = False


@dataclass(frozen=True, slots=True)
class PredictionConfig:
    """Predicted questions.

    Attributes:
        prediction_stride: Number of questions predicted per round, 1..5.
        decode_cutoff: Precompute answers to predicted questions up to this `answer_threshold`, 0..1; above it, precompute only
            their KV (PerCache §4.3.2).
    """

    prediction_stride: int = 5
    decode_cutoff: float = 0.87


@dataclass(frozen=True, slots=True)
class CalibrationConfig:
    """Bounds that a recipe must meet in calibration.

    Attributes:
        calibrate_first_tokens: Least share of questions whose first token is full attention's, 0..1.
        calibrate_answers: The same for whole answers.
    """

    calibrate_first_tokens: float = 0.98
    calibrate_answers: float = 0.98


@dataclass(frozen=True, slots=True)
class IdleConfig:
    """Background work.

    Attributes:
        idle_quiet_s: Seconds without a request before `kvweave idle --watch` starts to work.
        idle_power: mains to work only on mains power, any to work on battery too.
        idle_seconds_per_day: Daily budget in seconds of work, or inf. Default: 3600 for a server, `--watch` and `--low-load`,
            else inf.
        idle_flops_per_day: Daily budget in floating-point operations. Default: no limit.
        idle_load: Highest load of other programs per core, averaged over a minute, for a server, `--watch` and
            `--low-load`.
        idle_memory_pressure: Highest percentage of time that programs wait for memory, for the same work (Linux).
        idle_temperature: Highest temperature of the processor in °C, for the same work, if the system reports it.
    """

    idle_quiet_s: float = 60.0
    idle_power: str = "mains"
    idle_seconds_per_day: float | None = None
    idle_flops_per_day: float | None = None
    idle_load: float = 0.5
    idle_memory_pressure: float = 10.0
    idle_temperature: float = 85.0


@dataclass(frozen=True, slots=True)
class GenerationConfig:
    """Decoding.

    Attributes:
        max_new_tokens: Longest answer, thoughts included. Default: 256, with `think` 2048, or an eighth of the model's
            context if that is less.
        temperature: 0 is greedy.
        top_p: Nucleus sampling keeps the most likely tokens of this total probability, in (0, 1].
        seed: Seed of sampling.
        prompt_lookup_tokens: Most draft tokens copied from the prompt and checked in one pass, in greedy decoding; 0 turns
            it off.
        think: Let a reasoning model think before it answers. Models whose chat template has no switch think, or do not,
            whatever this says.
    """

    max_new_tokens: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    prompt_lookup_tokens: int = 31
    think: bool = False


@dataclass(frozen=True, slots=True)
class DecodingConfig:
    """KV while decoding. With both None, all KV is in memory and decoding attends to all of it.

    With either one, the KV is in a file, and decoding reads the entries that it selects.

    Attributes:
        kv_budget: KV entries per step, layer and KV head: a share of those stored up to 1, above it a number.
        resident_bytes: Hard bound of the KV in memory while decoding.
    """

    kv_budget: float | None = None
    resident_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Config:
    """All settings of a knowledge base.

    Attributes:
        home: Folder that holds everything. Default: KVWEAVE_HOME, else the platform's data folder.
        recipe: How stored KV is reused and, without `prepare`, prepared. auto is the calibrated recipe, and weave until a
            calibration.
        prepare: How chunk KV is prepared. Default: as the recipe does it.
        system: The instruction that every prompt starts with. Default: that of the prompt template.
        use_server: Let `ask`, `chat` and `mcp` use a running server of the same home.
        wait: Let `kvweave add` and uploads to a server return when all chunk KV is computed too.
    """

    home: Path
    recipe: str = "auto"
    prepare: str | None = None
    system: str | None = None
    use_server: bool = True
    wait: bool = False
    model: ModelConfig = field(default_factory=ModelConfig)
    embedding: EmbeddingConfig = field(default_factory=EmbeddingConfig)
    chunking: ChunkingConfig = field(default_factory=ChunkingConfig)
    retrieval: RetrievalConfig = field(default_factory=RetrievalConfig)
    store: StoreConfig = field(default_factory=StoreConfig)
    answers: AnswersConfig = field(default_factory=AnswersConfig)
    prediction: PredictionConfig = field(default_factory=PredictionConfig)
    calibration: CalibrationConfig = field(default_factory=CalibrationConfig)
    idle: IdleConfig = field(default_factory=IdleConfig)
    generation: GenerationConfig = field(default_factory=GenerationConfig)
    decoding: DecodingConfig = field(default_factory=DecodingConfig)
    server: ServerConfig = field(default_factory=ServerConfig)


def read_config(
    home: Path | None = None, environment: Mapping[str, str] = os.environ, **given: Any
) -> Config:
    """Return the settings from `given`, the environment, and `config.toml` under `home`, in this order of precedence.

    `given` has fields of any component (`model`, `chunk_tokens`, `top_k`, …); None means "not given".

    Raises:
        InvalidRequest: an unknown name, a wrong type or an impossible value; the message names the setting.
    """
    home = without_tilde(home or default_home(environment)).absolute()
    values = {
        **_read_toml(home / "config.toml"),
        **_read_environment(environment),
        **{name: value for name, value in given.items() if value is not None},
    }
    plain = _take(values, Config, _PLAIN)
    components = {
        name: component(**_take(values, component, _field_names(component)))
        for name, component in _COMPONENTS.items()
    }
    if values:
        raise InvalidRequest(
            f"unknown setting {sorted(values)[0]!r}; known are {', '.join(sorted(setting_names()))}"
        )
    config = Config(home=home, **plain, **components)
    _check(config)
    return config


_COMPONENTS: dict[str, Any] = {
    each.name: each.default_factory
    for each in dataclasses.fields(Config)
    if each.default_factory is not dataclasses.MISSING
}
_PLAIN = [each.name for each in dataclasses.fields(Config) if each.name not in ("home", *_COMPONENTS)]


def _field_names(component: Any) -> list[str]:
    return [each.name for each in dataclasses.fields(component)]


def setting_names() -> set[str]:
    """Return the names of all settings, as `read_config` takes them."""
    return {*_PLAIN, *(name for component in _COMPONENTS.values() for name in _field_names(component))}


def environment_variable(name: str) -> str:
    """Return the environment variable of a setting."""
    return f"KVWEAVE_{name.upper()}"


def _read_toml(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{path} is not valid TOML: {error}") from error


def _read_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings of KVWEAVE_* variables with parsed numbers and switches. An empty variable counts as not set."""
    found: dict[str, Any] = {}
    for component in (Config, *_COMPONENTS.values()):
        for name, hint in typing.get_type_hints(component).items():
            text = environment.get(environment_variable(name))
            kind = next((k for k in (bool, int, float, str) if k is hint or k in typing.get_args(hint)), None)
            if not text or kind is None:
                continue
            try:
                found[name] = _SWITCHED[text.lower()] if kind is bool else kind(text)
            except (ValueError, KeyError):
                expected = "true or false" if kind is bool else "a number"
                raise InvalidRequest(
                    f"{environment_variable(name)} is {text!r}; it must be {expected}"
                ) from None
    return found


_SWITCHED = dict(zip("1 true yes on 0 false no off".split(), [True] * 4 + [False] * 4, strict=True))


def _take(values: dict[str, Any], component: Any, names: Iterable[str]) -> dict[str, Any]:
    """Remove the named values from `values` and return them. Raise InvalidRequest for a value of a wrong type; int passes as float."""
    hints = typing.get_type_hints(component)
    taken = {name: values.pop(name) for name in names if name in values}
    for name, value in taken.items():
        hint = hints[name]
        accepted = hint | int if float in (hint, *typing.get_args(hint)) else hint
        if not isinstance(value, accepted) or (isinstance(value, bool) and hint is not bool):
            expected = str(hint).removeprefix("<class '").removesuffix("'>")
            raise InvalidRequest(f"setting {name} is {value!r}; it must be {expected}")
    return taken


Bound: TypeAlias = tuple[bool, str]
"""Whether a setting's value is valid, and the error message if it is not."""

_MOST = 2**31  # tokens, chunks and seeds beyond this are typing errors, and overflow elsewhere


def _check(config: Config) -> None:
    bounds = (
        _prompt_bounds(config.chunking, config.retrieval),
        generation_bounds(config.generation),
        _answer_bounds(config.answers, config.prediction),
        _calibration_bounds(config.calibration),
        _idle_bounds(config.idle),
        _kv_bounds(config.store, config.decoding),
        server_bounds(config.server),
    )
    for holds, message in chain.from_iterable(bounds):
        if not holds:
            raise InvalidRequest(message)


def _prompt_bounds(chunking: ChunkingConfig, retrieval: RetrievalConfig) -> Iterator[Bound]:
    chunk_tokens, overlap, top_k = chunking.chunk_tokens, chunking.overlap_tokens, retrieval.top_k
    yield (
        chunk_tokens is None or 8 <= chunk_tokens < _MOST,
        f"chunk_tokens is {chunk_tokens}; at least 8 are needed",
    )
    yield overlap is None or 0 <= overlap < _MOST, f"overlap_tokens is {overlap}; it cannot be negative"
    yield 1 <= top_k < _MOST, f"top_k is {top_k}; at least one chunk is needed"


def generation_bounds(generation: GenerationConfig) -> Iterator[Bound]:
    """Yield whether each value is valid, and the error message if it is not."""
    new_tokens, lookup_tokens = generation.max_new_tokens, generation.prompt_lookup_tokens
    temperature, top_p, seed = generation.temperature, generation.top_p, generation.seed
    yield (
        new_tokens is None or 1 <= new_tokens < _MOST,
        f"max_new_tokens is {new_tokens}; at least 1 is needed",
    )
    yield (
        temperature == 0 or 1e-3 <= temperature < 1e3,
        f"temperature is {temperature}; use 0 (greedy) or a value from 0.001 to 1000",
    )
    yield 0 < top_p <= 1, f"top_p is {top_p}; it must be in (0, 1]"
    yield (
        lookup_tokens >= 0,
        f"prompt_lookup_tokens is {lookup_tokens}; it cannot be negative (0: none are looked up)",
    )
    yield seed is None or 0 <= seed < 2**63, f"seed is {seed}; it must be between 0 and 2^63"


def _answer_bounds(answers: AnswersConfig, prediction: PredictionConfig) -> Iterator[Bound]:
    threshold, limit_bytes = answers.answer_threshold, answers.answer_limit_bytes
    stride, cutoff = prediction.prediction_stride, prediction.decode_cutoff
    yield 0 <= threshold <= 1, f"answer_threshold is {threshold}; it must be between 0 and 1"
    yield (
        0 <= limit_bytes < 2**63,
        f"answer_limit_bytes is {limit_bytes}; it cannot be negative (0: keep no answers)",
    )
    yield 1 <= stride <= 5, f"prediction_stride is {stride}; it must be between 1 and 5"
    yield 0 <= cutoff <= 1, f"decode_cutoff is {cutoff}; it must be between 0 and 1"


def _calibration_bounds(calibration: CalibrationConfig) -> Iterator[Bound]:
    for name in ("calibrate_first_tokens", "calibrate_answers"):
        value = getattr(calibration, name)
        yield 0 <= value <= 1, f"{name} is {value}; it must be between 0 and 1"


def _idle_bounds(idle: IdleConfig) -> Iterator[Bound]:
    yield (
        idle.idle_power in ("mains", "any"),
        f"idle_power is {idle.idle_power!r}; choose mains (work ahead on mains power only) or any",
    )
    for name in (
        *("idle_quiet_s", "idle_seconds_per_day", "idle_flops_per_day"),
        *("idle_load", "idle_memory_pressure", "idle_temperature"),
    ):
        value = getattr(idle, name)
        yield value is None or value >= 0, f"{name} is {value}; it cannot be negative"


def _kv_bounds(store: StoreConfig, decoding: DecodingConfig) -> Iterator[Bound]:
    from kvweave.types import STORAGES  # imports torch, which `kvweave --help` does without

    budget, resident = decoding.kv_budget, decoding.resident_bytes
    yield (
        store.storage in ("auto", *STORAGES),
        f"storage is {store.storage!r}; choose one of auto, {', '.join(STORAGES)}",
    )
    yield (
        budget is None or 0 < budget <= 1 or (budget < _MOST and budget == int(budget)),
        f"kv_budget is {budget}; it is a share in (0, 1] or a whole number of entries",
    )
    yield resident is None or 0 < resident < 2**63, f"resident_bytes is {resident}; it must be above 0"
