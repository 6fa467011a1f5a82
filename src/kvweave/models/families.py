"""What the canvas cannot represent, by configuration: the reasons, told before a pass is run.

Everything not refused here or by the probe is supported; the parity table in the tests and docs lists the
families that are checked.
"""

from typing import Any

from kvweave.errors import UnsupportedModel

# Layer types that keep keys and values for every position; the others hold a recurrent or compressed state.
KV_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})

# Configuration fields whose presence (truthy) means a mechanism without per-token rotary keys in every layer.
REFUSED_FIELDS = {
    "kv_lora_rank": "multi-head latent attention (compressed keys)",
    "num_kv_shared_layers": "layers that share another layer's keys and values",
    "attention_chunk_size": "chunked local attention",
    "is_encoder_decoder": "an encoder",
    "alibi": "ALiBi positions instead of rotary ones",
}


def refuse_by_config(config: Any) -> None:
    """Raise UnsupportedModel, naming the mechanism, if the configuration shows one that cannot work."""
    text = config.get_text_config(decoder=True)
    name = type(config).__name__
    for field, mechanism in REFUSED_FIELDS.items():
        if getattr(config, field, None) or getattr(text, field, None):
            raise UnsupportedModel(
                f"{name} uses {mechanism} ({field}); kvweave supports decoders with rotary KV"
            )
    rope = getattr(text, "rope_parameters", None) or {}
    if any(isinstance(part, dict) and part.get("rope_type") == "dynamic" for part in rope.values()):
        raise UnsupportedModel(
            f"{name} scales positions dynamically per layer type; kvweave supports it for all layers alike"
        )
    others = sorted(set(getattr(text, "layer_types", None) or ()) - KV_LAYER_TYPES)
    if others:
        raise UnsupportedModel(
            f"{name} has layers of type {', '.join(others)}; kvweave needs keys and values for every token in "
            f"every layer ({', '.join(sorted(KV_LAYER_TYPES))})"
        )
