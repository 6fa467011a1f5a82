"""Settings: one frozen dataclass per component. They are read once and passed to constructors.

Order of precedence: arguments or flags, then environment variables (`KVWEAVE_` and the setting's name in
capitals), then `config.toml` in the home folder, then the defaults here. `docs/reference/settings.md` is made from the
docstrings.
"""

import dataclasses
import inspect
import os
import re
import tomllib
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

import platformdirs

from kvweave.errors import InvalidRequest
from kvweave.types import STORAGES

DEFAULT_CHUNK_TOKENS = 512
DEFAULT_NEW_TOKENS = 256
DEFAULT_THINKING_TOKENS = 2048
DEFAULT_IDLE_SECONDS_PER_DAY = 3600.0
"""Daily seconds of background work per knowledge base that no user asked for: 4 % of a day.

Predicting 60 questions about 10 documents and answering them took one thread 185 s with a model of 270 million parameters. The
budget is enough for a model twenty times as slow.
"""
LOOPBACK: Final = ("127.0.0.1", "::1", "localhost")
TRANSFORMERS: Final = "transformers"
VLLM: Final = "vllm="
"""What the setting `engine` begins with before the addresses of vLLM servers."""
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
        engine: What runs the model: transformers in this process, or vllm=URL, a vLLM server with the plug-in kvweave-vllm. Several
            addresses are separated by commas.
        engine_key: Key that requests to the vLLM server carry as `Authorization: Bearer KEY`. Default: none.
    """

    model: str | None = None
    dtype: str = "auto"
    weights: str = "auto"
    device: str = "auto"
    auxiliary: str | None = None
    engine: str = TRANSFORMERS
    engine_key: str | None = None


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
        answer_error_bound: Greatest expected share of wrong answers among those given to questions that the model judges to ask the
            same, 0..0.5; at 0 it judges none.
        check_answers: Replace an answer by "The documents do not say." if its words are not in the passages. The answer then
            appears only when it is complete.
    """

    answer_threshold: float = 0.85
    answer_limit_bytes: int = 100_000_000
    answer_error_bound: float = 0.02
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
    """The bound that a recipe must meet in calibration.

    Attributes:
        calibrate_tokens: Least share of the tokens of full attention's answers that a recipe chooses too, 0..1.
    """

    calibrate_tokens: float = 0.95


@dataclass(frozen=True, slots=True)
class IdleConfig:
    """Background work.

    Attributes:
        idle_quiet_s: Seconds without a request before `kvweave idle --watch` starts to work.
        idle_power: mains to work only on mains power, any to work on battery too.
        idle_seconds_per_day: Daily budget in seconds of work, or inf. Default: 3600 for a server, `--watch` and `--low-load`,
            else inf.
        idle_load: Highest load of other programs per core, averaged over a minute, for a server, `--watch` and
            `--low-load`.
        idle_memory_pressure: Highest percentage of time that programs wait for memory, for the same work (Linux).
    """

    idle_quiet_s: float = 60.0
    idle_power: str = "mains"
    idle_seconds_per_day: float | None = None
    idle_load: float = 0.5
    idle_memory_pressure: float = 10.0


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
        fallback_margin: In greedy decoding after reused chunks, compute the prompt in full, once, before the first token whose logit
            leads by less than this, and go on exactly; 0 never does. Needs all KV in memory.
        think: Let a reasoning model think before it answers; its thoughts are not part of the answer. Models whose chat
            template has no switch think, or do not, whatever this says.
    """

    max_new_tokens: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    prompt_lookup_tokens: int = 31
    fallback_margin: float = 0.0
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
class ServerConfig:
    """The server, `kvweave serve`.

    Attributes:
        host: Address to listen on. Any but this machine's own (127.0.0.1, ::1, localhost) needs a key.
        port: Port to listen on; 0 takes a free one.
        api_key: Keys that requests must carry as `Authorization: Bearer KEY`, separated by commas. Default: none.
        tenants: TOML file with a table `[tenants]` of `name = "KEY"` or `name = "sha256:HEX"` lines. Each key has knowledge bases of
            its own, under `tenants/name`.
        cors_origins: Origins of web pages that may use the server, separated by commas; * allows any.
        max_running: Most requests computed at once.
        max_queue: Most requests that wait; one more is refused with status 429.
        max_body_bytes: Largest body of a request that is no upload.
        max_upload_bytes: Largest body of an upload.
        max_connections: Most open connections; a new one then replaces the longest idle.
        client_timeout_s: Longest wait for a client that sends or reads too slowly.
        ping_s: Seconds of silence in a stream before a comment line shows that the connection lives.
        grace_s: Seconds that running requests have to finish after SIGTERM.
        async_kv: Load stored KV of a request while others are computed.
        share_kv: Keep one copy in memory of stored KV that several running requests use.
        idle_work: Do background work while no request runs.
        vllm_metrics: Also export metrics under vLLM's names.
    """

    host: str = "127.0.0.1"
    port: int = 8420
    api_key: str | None = None
    tenants: str | None = None
    cors_origins: str | None = None
    max_running: int = 16
    max_queue: int = 64
    max_body_bytes: int = 8_000_000
    max_upload_bytes: int = 600_000_000
    max_connections: int = 1000
    client_timeout_s: float = 20.0
    ping_s: float = 5.0
    grace_s: float = 30.0
    async_kv: bool = True
    share_kv: bool = True
    idle_work: bool = True
    vllm_metrics: bool = False


@dataclass(frozen=True, slots=True)
class Config:
    """All settings of a knowledge base.

    Attributes:
        home: Folder that holds everything. Default: KVWEAVE_HOME, else the platform's data folder.
        recipe: How stored KV is reused and, without `prepare`, prepared. auto is the calibrated recipe, and weave-shifted until a
            calibration.
        prepare: How chunk KV is prepared. Default: as the recipe does it.
        system: The instruction that every prompt starts with; the first add fixes it. Default: that of the prompt template.
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


def default_home(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the folder that KVWEAVE_HOME names, else the platform's data folder; raises InvalidRequest without either."""
    named = environment.get("KVWEAVE_HOME")
    try:
        folder = named or platformdirs.user_data_dir("kvweave", appauthor=False)
    except RuntimeError:
        raise _unknown("the platform's data folder") from None
    return without_tilde(folder)


def without_tilde(folder: str | Path) -> Path:
    """Return a folder with the user's home in place of `~`; raises InvalidRequest if that is not known."""
    try:
        return Path(folder).expanduser()
    except RuntimeError:
        raise _unknown(str(folder)) from None


def _unknown(folder: str) -> InvalidRequest:
    """Return the error for a folder in the home of a user who has none: no HOME, and an id that the system does not know."""
    return InvalidRequest(
        f"{folder} is in the home folder of a user, which is not known here: HOME is not set, and the system has no such user; "
        "name a folder with --home or KVWEAVE_HOME"
    )


def read_config(
    home: Path | None = None, environment: Mapping[str, str] = os.environ, **given: Any
) -> Config:
    """Return the settings from `given`, the environment, and `config.toml` under `home`, in this order of precedence.

    `given` has fields of any component (`model`, `chunk_tokens`, `top_k`, …); None means "not given".

    Raises:
        InvalidRequest: an unknown name, a wrong type or an impossible value; the message names the setting.
    """
    home, known = without_tilde(home or default_home(environment)).absolute(), all_settings()
    values = {
        **_read_toml(home / "config.toml"),
        **_read_environment(environment),
        **{name: value for name, value in given.items() if value is not None},
    }
    if unknown := sorted(values.keys() - known.keys()):
        raise InvalidRequest(f"unknown setting {unknown[0]!r}; known are {', '.join(sorted(known))}")
    parts: dict[str, dict[str, Any]] = {"": {}, **{part: {} for part in _COMPONENTS}}
    for name, value in values.items():
        known[name].check_type(value)
        parts[known[name].part][name] = value
    components = {part: component(**parts[part]) for part, component in _COMPONENTS.items()}
    for component in components.values():
        check_bounds(component)
    return Config(home=home, **parts[""], **components)


_COMPONENTS: dict[str, Any] = {
    each.name: each.default_factory
    for each in dataclasses.fields(Config)
    if each.default_factory is not dataclasses.MISSING
}


class Setting(NamedTuple):
    """The name, default and type hint of a setting, and the field of Config that holds its component, "" for Config itself."""

    name: str
    default: Any
    hint: Any
    part: str

    @property
    def kind(self) -> type:
        """The type of a value that is not None: bool, int, float or str."""
        return next(
            kind for kind in (bool, int, float, str) if kind in (self.hint, *typing.get_args(self.hint))
        )

    @property
    def help(self) -> str:
        """The help text, on one line."""
        return meanings(_COMPONENTS.get(self.part, Config))[self.name]

    def value(self, config: Config) -> Any:
        return getattr(getattr(config, self.part) if self.part else config, self.name)

    def check_type(self, value: object) -> None:
        """Raise InvalidRequest for a value of a wrong type; int passes as float."""
        accepted = self.hint | int if self.kind is float else self.hint
        if not isinstance(value, accepted) or (isinstance(value, bool) and self.kind is not bool):
            expected = str(self.hint).removeprefix("<class '").removesuffix("'>")
            raise InvalidRequest(f"setting {self.name} is {value!r}; it must be {expected}")


@cache
def all_settings() -> Mapping[str, Setting]:
    """Return all settings by name, those of Config itself first."""
    found = {}
    for part, component in {"": Config, **_COMPONENTS}.items():
        hints = typing.get_type_hints(component)
        for each in dataclasses.fields(component):
            if part or each.name not in ("home", *_COMPONENTS):
                found[each.name] = Setting(each.name, each.default, hints[each.name], part)
    return found


@cache
def meanings(component: Any) -> Mapping[str, str]:
    """Return the texts under "Attributes:" in a dataclass's docstring by field, each on one line."""
    _, _, text = (inspect.getdoc(component) or "").partition("Attributes:\n")
    found = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", text.split("\n\n")[0], re.M)
    return {name: " ".join(meaning.split()) for name, meaning in found}


def environment_variable(name: str) -> str:
    """Return the environment variable of a setting."""
    return f"KVWEAVE_{name.upper()}"


def split(text: str | None) -> tuple[str, ...]:
    """Return the parts of a comma-separated setting."""
    return tuple(part.strip() for part in (text or "").split(",") if part.strip())


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
    for name, setting in all_settings().items():
        if not (text := environment.get(environment_variable(name))):
            continue
        try:
            found[name] = _SWITCHED[text.lower()] if setting.kind is bool else setting.kind(text)
        except (ValueError, KeyError):
            expected = "true or false" if setting.kind is bool else "a number"
            raise InvalidRequest(f"{environment_variable(name)} is {text!r}; it must be {expected}") from None
    return found


_SWITCHED = dict(zip("1 true yes on 0 false no off".split(), [True] * 4 + [False] * 4, strict=True))

Bound = tuple[Callable[[Any], bool], str]
_MOST: Final = 2**31
"""Tokens, chunks and seconds beyond this are typing errors, and overflow elsewhere."""
_BOUNDS: Final[Mapping[str, Bound]] = {
    "engine": (
        lambda value: (
            value == TRANSFORMERS or bool(value.startswith(VLLM) and split(value.removeprefix(VLLM)))
        ),
        f"write {TRANSFORMERS}, or {VLLM}http://host:8000",
    ),
    "storage": (("auto", *STORAGES).__contains__, f"choose one of auto, {', '.join(STORAGES)}"),
    "chunk_tokens": (lambda value: 8 <= value < _MOST, "at least 8 are needed"),
    "overlap_tokens": (lambda value: 0 <= value < _MOST, "it cannot be negative"),
    "top_k": (lambda value: 1 <= value < _MOST, "at least one chunk is needed"),
    **dict.fromkeys(
        ("answer_threshold", "decode_cutoff", "calibrate_tokens"),
        (lambda value: 0 <= value <= 1, "it must be between 0 and 1"),
    ),
    "answer_limit_bytes": (lambda value: 0 <= value < 2**63, "it cannot be negative (0: keep no answers)"),
    "answer_error_bound": (
        lambda value: 0 <= value <= 0.5,
        "it must be between 0 (judge no questions) and 0.5",
    ),
    "prediction_stride": (lambda value: 1 <= value <= 5, "it must be between 1 and 5"),
    **dict.fromkeys(
        (each.name for each in dataclasses.fields(IdleConfig)),
        (lambda value: value >= 0, "it cannot be negative"),
    ),
    "idle_power": (("mains", "any").__contains__, "choose mains (work ahead on mains power only) or any"),
    "max_new_tokens": (lambda value: 1 <= value < _MOST, "at least 1 is needed"),
    "temperature": (
        lambda value: value == 0 or 1e-3 <= value < 1e3,
        "use 0 (greedy) or a value from 0.001 to 1000",
    ),
    "top_p": (lambda value: 0 < value <= 1, "it must be in (0, 1]"),
    "seed": (lambda value: 0 <= value < 2**63, "it must be between 0 and 2^63"),
    "prompt_lookup_tokens": (lambda value: value >= 0, "it cannot be negative (0: none are looked up)"),
    "fallback_margin": (lambda value: 0 <= value < _MOST, "it cannot be negative (0: never)"),
    "kv_budget": (
        lambda value: 0 < value <= 1 or (1 < value < _MOST and value == int(value)),
        "it is a share in (0, 1] or a whole number of entries",
    ),
    "resident_bytes": (lambda value: 0 < value < 2**63, "it must be above 0"),
    "port": (lambda value: 0 <= value < 2**16, "it must be between 0 (a free one) and 65535"),
    "max_queue": (lambda value: value >= 0, "it cannot be negative (0: none waits)"),
    **dict.fromkeys(
        ("max_running", "max_body_bytes", "max_upload_bytes", "max_connections"),
        (lambda value: value >= 1, "at least 1 is needed"),
    ),
    **dict.fromkeys(("client_timeout_s", "ping_s"), (lambda value: 0 < value < _MOST, "it must be above 0")),
    "grace_s": (lambda value: 0 <= value < _MOST, "it cannot be negative"),
}
"""Which values of a setting are possible, and the rest of the message about one that is not. None is always possible."""


def check_bounds(component: Any) -> None:
    """Raise InvalidRequest, naming the setting, if a component has an impossible value."""
    for each in dataclasses.fields(component):
        value = getattr(component, each.name)
        if value is None or each.name not in _BOUNDS:
            continue
        is_possible, message = _BOUNDS[each.name]
        if not is_possible(value):
            raise InvalidRequest(f"{each.name} is {value!r}; {message}")
