"""What a model's shape says about operations and bytes: the shape that latency is replayed on. Times nothing."""

from dataclasses import dataclass, replace
from typing import Any, Final, Self

from kvweave.models.adapter import Adapter
from kvweave.models.flops import PassCost
from kvweave.models.support import attention_modules
from kvweave_lab.eval.personas.passes import Pass
from kvweave_lab.eval.personas.systems import Projections

PROJECTIONS: Final[dict[Projections, tuple[str, ...]]] = {
    "KV": ("k_proj", "v_proj"),
    "QKV": ("q_proj", "k_proj", "v_proj"),
}


@dataclass(frozen=True, slots=True)
class Shape:
    """A model's shape.

    Attributes:
        cost: operations of its passes.
        projected: operations of a row's projections through all layers, by what is projected.
        token_bytes: of a token's K and V in all layers.
        query_bytes: of its Q.
    """

    cost: PassCost
    projected: dict[Projections, int]
    token_bytes: int
    query_bytes: int

    @classmethod
    def of(cls, adapter: Adapter) -> Self:
        """Read it off a model whose layers have projections of their own."""
        config: Any = adapter.model.config.get_text_config(decoder=True)
        geometry = adapter.geometry
        queries = geometry.layers * config.num_attention_heads * geometry.head_width
        return cls(
            PassCost.of(adapter.model),
            {
                name: 2 * sum(part.weight.numel() for part in projections_of(adapter, name))
                for name in PROJECTIONS
            },
            geometry.token_bytes,
            queries * geometry.dtype.itemsize,
        )

    def flops(self, took: Pass) -> float:
        """Of a pass with ordinary reuse: stored tokens are not run."""
        layers = len(self.cost.windows)
        behind = took.steps + sum(took.checks)
        rows = took.rows + took.selecting + behind
        keys = took.keys + took.selecting_keys + took.decoded_keys
        return (
            self.cost.per_row * rows + self.cost.per_key * layers * keys + self.cost.per_logits * (1 + behind)
        )

    def projection_reuse_flops(self, took: Pass, skipped: Projections) -> float:
        """With projection reuse: every token is run, but the projections of stored ones are skipped (PerCache §4.2.2)."""
        everything = replace(took, exact=0, stale=0, recomputed=0, selecting=0)
        return self.flops(everything) - self.projected[skipped] * took.matched

    def stored_bytes(self, tokens: int, kept: Projections) -> int:
        """Of stored tokens with what is kept of them."""
        return tokens * (self.token_bytes + (self.query_bytes if kept == "QKV" else 0))


def projections_of(adapter: Adapter, name: Projections) -> list[Any]:
    """The modules that project, layer by layer; none where a model projects all at once."""
    modules = attention_modules(adapter.model).values()
    return [
        getattr(module, part) for module in modules for part in PROJECTIONS[name] if hasattr(module, part)
    ]
