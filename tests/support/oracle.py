"""The same computations in plain transformers: stock sdpa or eager attention with explicit 4D masks."""

import copy

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from kvweave.models.rotary import Rotation


class ScatterLayer(DynamicLayer):
    """Writes the rows of a pass, or only those in `written`, into prefilled full-length tensors."""

    def __init__(
        self, keys: torch.Tensor, values: torch.Tensor, rows: torch.Tensor, written: torch.Tensor
    ) -> None:
        super().__init__()
        self.keys, self.values, self.rows = keys.clone(), values.clone(), rows
        self.is_written = torch.isin(rows, written)
        self.is_initialized = True

    def update(self, key_states, value_states, *args, **kwargs):
        self.keys[:, :, self.rows[self.is_written]] = key_states[:, :, self.is_written]
        self.values[:, :, self.rows[self.is_written]] = value_states[:, :, self.is_written]
        return self.keys, self.values


def stock(model: PreTrainedModel) -> PreTrainedModel:
    """Switch to the library's own attention: eager for models without sdpa support (soft caps)."""
    try:
        model.set_attn_implementation("sdpa")
    except ValueError:
        model.set_attn_implementation("eager")
    if getattr(model.config, "attn_logit_softcapping", None):
        model.set_attn_implementation("eager")
    return model


def full_prefill(
    model: PreTrainedModel, ids: list[int], rotation: Rotation
) -> tuple[torch.Tensor, DynamicCache]:
    """Return last logits (1, vocab) and the cache of an ordinary prefill, all layers in full."""
    rotation.reset_lengths()
    cache = DynamicCache()
    with torch.no_grad():
        out = model(torch.tensor([ids]), past_key_values=cache, use_cache=True, logits_to_keep=1)
    return out.logits[:, -1], cache


def partial_prefill(
    model: PreTrainedModel,
    ids: list[int],
    rows: torch.Tensor,
    held: list[tuple[torch.Tensor, torch.Tensor]],
    *,
    written: list[torch.Tensor] | None = None,
    rotary: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the last logits of a pass over `rows`, with the other positions' rotated K,V in `held`.

    `written` lists per layer the rows that replace the held ones (by default all), `rotary` the positions of all tokens
    if these are not their indices.
    """
    written = written or [rows] * len(held)
    window = getattr(model.config, "sliding_window", None)
    positions = torch.arange(len(ids))
    causal = positions[None, :] <= rows[:, None]
    near = causal & (positions[None, :] > rows[:, None] - window) if window else causal

    def additive(visible: torch.Tensor) -> torch.Tensor:
        return torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)[None, None]

    types = set(getattr(model.config, "layer_types", None) or [])
    mask = additive(near if types == {"sliding_attention"} or (not types and window) else causal)
    if len(types) > 1:
        mask = {"full_attention": additive(causal), "sliding_attention": additive(near)}
    with torch.no_grad():
        out = model(
            torch.tensor([ids])[:, rows],
            position_ids=(rows if rotary is None else rotary[rows])[None],
            attention_mask=mask,
            past_key_values=Cache(
                layers=[ScatterLayer(k, v, rows, w) for (k, v), w in zip(held, written, strict=True)]
            ),
            use_cache=True,
            logits_to_keep=1,
        )
    return out.logits[:, -1]


def twin(model: PreTrainedModel) -> PreTrainedModel:
    """Return a model of plain transformers with the same weights, which take no more memory."""
    config = copy.deepcopy(model.config)  # it names the attention, and ours must keep its own
    with torch.device("meta"):
        plain = AutoModelForCausalLM.from_config(config, dtype=model.dtype, attn_implementation="eager")
    plain.load_state_dict(model.state_dict(), assign=True)
    for name, buffer in model.named_buffers():
        owner, _, leaf = name.rpartition(".")
        plain.get_submodule(owner).register_buffer(leaf, buffer.clone(), persistent=False)
    plain.generation_config = copy.deepcopy(model.generation_config)
    return stock(plain).eval()
