"""Popular families that cannot be used as other models are, by what stands in the way.

One place that `kvweave doctor` and the documentation are made from. What decides is code that looks at each model itself:
`support.py` for placing stored KV, `snapshot_adapter.py` for continuing from stored states. A test builds a tiny model of every
family named here and compares.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limitation:
    """What stands in the way of some families.

    Attributes:
        reason: words of the error.
        families: names for people → transformers' model type.
    """

    reason: str
    families: Mapping[str, str]


PREFIX_ONLY: tuple[Limitation, ...] = (
    Limitation(
        "linear-attention, state-space or convolution layers",
        {
            "Qwen3-Next": "qwen3_next",
            "Qwen3.5": "qwen3_5_text",
            "Qwen3.5 MoE": "qwen3_5_moe_text",
            "Granite 4 hybrid": "granitemoehybrid",
            "Falcon-H1": "falcon_h1",
            "LFM2": "lfm2",
            "LFM2 MoE": "lfm2_moe",
            "Nemotron-H": "nemotron_h",
            "Bamba": "bamba",
            "Zamba2": "zamba2",
            "OLMo hybrid": "olmo_hybrid",
            "Mamba 2": "mamba2",
        },
    ),
    Limitation("attention sinks", {"gpt-oss": "gpt_oss"}),
    Limitation(
        "multi-head latent attention",
        {
            "DeepSeek V2": "deepseek_v2",
            "DeepSeek V3": "deepseek_v3",  # Kimi K2 is of this type
            "Kimi Linear": "kimi_linear",
            "GLM-4.7-Flash": "glm4_moe_lite",
        },
    ),
    Limitation("chunked local attention", {"Llama 4": "llama4_text"}),
    Limitation(
        "layers that share another layer's keys and values",
        {"Gemma 3n": "gemma3n_text", "Gemma 4 E2B": "gemma4_text"},
    ),
    Limitation(
        "ALiBi, learned or fused positions", {"GPT-2": "gpt2", "OPT": "opt", "BLOOM": "bloom", "MPT": "mpt"}
    ),
    Limitation("changes keys after rotating them", {"HunYuan": "hunyuan_v1_dense", "nanochat": "nanochat"}),
    Limitation(
        "does not hand extra arguments to its attention function",
        {"StableLM": "stablelm", "Nemotron": "nemotron", "Falcon": "falcon"},
    ),
)
"""Families that stored KV cannot be placed in: they answer with recipe prefix alone, from stored states of exact prefixes."""

REFUSED: tuple[Limitation, ...] = (
    Limitation(
        "does not read the recurrent state of its cache",
        {"Mamba": "mamba", "Falcon Mamba": "falcon_mamba", "Jamba": "jamba"},
    ),
    Limitation("a part of its state outside of its cache", {"RecurrentGemma": "recurrent_gemma"}),
    Limitation("uses cache of its own", {"MiniMax-01": "minimax"}),
    Limitation("takes no cache of transformers", {"RWKV": "rwkv"}),
    Limitation("cannot continue from a copied state", {"xLSTM": "xlstm"}),
    Limitation(
        "layers of class DynamicIndexedLayer", {"DeepSeek V3.2": "deepseek_v32", "GLM-5": "glm_moe_dsa"}
    ),
    Limitation("layers of class DeepseekV4HCACache", {"DeepSeek V4": "deepseek_v4"}),
    Limitation("rotary frequencies depend on the length", {"MiniCPM3": "minicpm3"}),
)
"""Families that cannot be used at all, by why their state cannot be stored either."""


def listed(limitations: tuple[Limitation, ...]) -> str:
    """Return the families with their reasons, in one line for people."""
    return "; ".join(f"{', '.join(each.families)} ({each.reason})" for each in limitations)
