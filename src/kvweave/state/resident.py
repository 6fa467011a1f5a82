"""The models that one process keeps loaded for all its knowledge bases."""

from pathlib import Path
from typing import TYPE_CHECKING

from kvweave.config import TRANSFORMERS, Config, ModelConfig
from kvweave.once import once
from kvweave.state.active_requests import ProcessActivity

if TYPE_CHECKING:
    from kvweave.embedding import TextEncoder
    from kvweave.index.search import Rerank
    from kvweave.models.batcher import PassBatcher
    from kvweave.remote.model import AnyModel
    from kvweave.state.judge import Judge


class ResidentModels:
    """One model and one embedding model, loaded once, for all knowledge bases that are opened with them.

    Args:
        config: the settings; they name the models.
        share_kv: keep one copy in memory of the stored KV that concurrent requests use.
        async_kv: load stored KV while other requests compute.

    Attributes:
        activity: the running requests of the process: background work of every knowledge base yields to all of them.
        batcher: packs the passes of concurrent requests; None before the model is loaded, and for a model that is run plainly.
    """

    def __init__(self, config: Config, *, share_kv: bool = True, async_kv: bool = True) -> None:
        self.config = config
        self.activity = ProcessActivity()
        self.batcher: PassBatcher | None = None
        self._share_kv, self._async_kv = share_kv, async_kv

    @once
    def model(self) -> "AnyModel":
        """The model; loaded by the first access. Raises as `load_model` does."""
        from kvweave.models.adapter import Adapter

        model = load_model(self.config.model, self.config.home)
        if isinstance(model, Adapter):
            self.batcher = model.serve_many(share=self._share_kv, load_ahead=self._async_kv)
        return model

    @once
    def judge(self) -> "Judge | None":
        """Judges with the model whether questions ask the same; None if stored KV cannot be placed in it."""
        return judge_of(self.model, self.config.home)

    @once
    def encoder(self) -> "TextEncoder":
        """The embedding model; it loads with the first text or by `load`."""
        from kvweave.embedding import TextEncoder

        return TextEncoder(self.config.embedding.embedding_model)

    @once
    def rerank(self) -> "Rerank | None":
        """Scores texts for a question, if the settings name a model that does; it loads with the first question."""
        return load_reranker(self.config.retrieval.reranker)

    def load(self) -> None:
        """Load both, and what code a first request would import. Raises ModelNotFound, UnsupportedModel, …."""
        model, decoding = self.model, self.config.decoding
        if self.config.model.engine != TRANSFORMERS and (decoding.kv_budget or decoding.resident_bytes):
            from kvweave.models.snapshot_adapter import fused

            fused(model, "decoding with KV in a file (--kv-budget, --resident-bytes)")
        self.encoder.load()

    def full_prefill_s(self, prompt_tokens: int) -> float | None:
        """Estimate the seconds that computing a whole prompt takes, from the latest passes; None before there were any.

        It leaves out that attention takes longer the longer the prompt is.
        """
        rate = None if self.batcher is None else self.batcher.prompt_rows_per_s
        return None if rate is None else prompt_tokens / rate

    @property
    def shared_bytes(self) -> int:
        """The memory of the stored KV that running requests share."""
        spans = None if self.batcher is None else getattr(self.model, "spans", None)
        return 0 if spans is None else int(spans.bytes)

    def close(self) -> None:
        """End the thread that runs packed passes; requests have to have ended."""
        from kvweave.models.snapshot_adapter import fused

        if self.batcher is not None:
            self.batcher = None
            fused(self.model).serve_alone()


def load_model(wanted: ModelConfig, home: Path) -> "AnyModel":
    """Load the model that settings name, or connect to the servers that run it; raises as `load_any_model` and `connect` do."""
    if wanted.engine != TRANSFORMERS:
        from kvweave.remote.model import connect

        return connect(wanted, home)
    from kvweave.models.loading import load_any_model

    return load_any_model(
        wanted.model, dtype=wanted.dtype, weights=wanted.weights, device=wanted.device, home=home
    )


def judge_of(model: "AnyModel", home: Path) -> "Judge | None":
    """Return the judge that a model makes; None for one that stored KV cannot be placed in."""
    from kvweave.models.adapter import Adapter
    from kvweave.state.judge import Judge

    return Judge(model, home) if isinstance(model, Adapter) else None


def load_reranker(model: str | None) -> "Rerank | None":
    """Return the function that scores texts for a question by a model, which it loads with the first one; None without a model."""
    if model is None:
        return None
    from kvweave.embedding import Reranker

    return Reranker(model).scores
