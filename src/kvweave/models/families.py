"""Popular families that cannot be used as other models are, by the mechanism that stands in the way.

One place that `kvweave doctor` and the documentation are made from. What decides is `support.py`, which looks at each model
itself; a test builds a tiny model of every family named here and compares.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Refusal:
    """A mechanism and the families that have it.

    Attributes:
        mechanism: as the error names it.
        families: names for people → transformers' model type.
    """

    mechanism: str
    families: Mapping[str, str]


REFUSALS: tuple[Refusal, ...] = (
    Refusal(
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
            "Mamba": "mamba",
            "Falcon Mamba": "falcon_mamba",
            "Jamba": "jamba",
            "RecurrentGemma": "recurrent_gemma",
            "MiniMax-01": "minimax",
        },
    ),
    Refusal("no attention layers", {"RWKV": "rwkv", "xLSTM": "xlstm"}),
    Refusal("attention sinks", {"gpt-oss": "gpt_oss"}),
    Refusal(
        "multi-head latent attention",
        {
            "DeepSeek V2": "deepseek_v2",
            "DeepSeek V3, Kimi K2": "deepseek_v3",
            "DeepSeek V3.2": "deepseek_v32",
            "GLM-4.7-Flash": "glm4_moe_lite",
            "GLM-5": "glm_moe_dsa",
            "MiniCPM3": "minicpm3",
            "Kimi Linear": "kimi_linear",
        },
    ),
    Refusal("compressed, indexed or other attention", {"DeepSeek V4": "deepseek_v4"}),
    Refusal("chunked local attention", {"Llama 4": "llama4_text"}),
    Refusal(
        "layers that share another layer's keys and values",
        {"Gemma 3n": "gemma3n_text", "Gemma 4 E2B, E4B": "gemma4_text"},
    ),
    Refusal("ALiBi, learned or fused positions", {"GPT-2": "gpt2", "OPT": "opt", "BLOOM": "bloom", "MPT": "mpt"}),
    Refusal("changes keys after rotating them", {"HunYuan": "hunyuan_v1_dense", "nanochat": "nanochat"}),
    Refusal(
        "does not hand extra arguments to its attention function",
        {"StableLM": "stablelm", "Nemotron": "nemotron", "Falcon": "falcon"},
    ),
)
