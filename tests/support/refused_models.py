"""Tiny models of the families that stored KV cannot be placed in."""

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from kvweave.testing import LONGROPE, VOCABULARY, tiny_model

_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_MAMBA2 = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
    "mamba_chunk_size": 8,
}
_JAMBA = {
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "expert_layer_period": 2,
    "expert_layer_offset": 1,
    "mamba_d_state": 8,
    "mamba_dt_rank": 4,
}
_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
_LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 24,
}

# transformers' model type → its settings, and a regular expression that the error message must contain
REFUSED: Mapping[str, tuple[dict[str, Any], str]] = {
    "stablelm": ({}, "attention function"),
    "nemotron": ({}, "attention function"),
    "falcon": ({"num_kv_heads": 2, "new_decoder_architecture": True}, "attention function"),
    "hunyuan_v1_dense": ({"head_dim": 8}, "after rotating"),
    "nanochat": ({}, "after rotating"),
    "gpt_oss": ({"head_dim": 8, "num_local_experts": 4, "sliding_window": 16}, "attention sinks"),
    "gpt2": ({"n_embd": 32, "n_layer": 2, "n_head": 4}, "rotary"),
    "opt": ({"word_embed_proj_dim": 32, "ffn_dim": 48}, "rotary"),
    "bloom": ({}, "rotary"),
    "mpt": ({"d_model": 32, "n_heads": 4, "n_layers": 2}, "rotary"),
    "mamba": ({}, "linear_attention"),
    "falcon_mamba": ({}, "linear_attention"),
    "mamba2": (
        {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1, "chunk_size": 8},
        "linear_attention",
    ),
    "jamba": ({**_JAMBA, "num_experts": 4, "use_mamba_kernels": False}, "linear_attention"),
    "bamba": ({**_MAMBA2, "attn_layer_indices": [1]}, "linear_attention"),
    "falcon_h1": ({**_MAMBA2, "mamba_d_ssm": 64, "head_dim": 8}, "hybrid"),
    "granitemoehybrid": (
        {
            **_MAMBA2,
            "layer_types": ["mamba", "attention", "mamba"],
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "shared_intermediate_size": 32,
        },
        "linear_attention",
    ),
    "lfm2": ({"layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 8}, "conv"),
    "lfm2_moe": ({**_MOE, "layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1}, "conv"),
    "nemotron_h": (
        {
            "hybrid_override_pattern": "M*M",
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "ssm_state_size": 8,
            "n_groups": 1,
            "chunk_size": 8,
            "head_dim": 8,
        },
        "linear_attention",
    ),
    "zamba2": (
        {
            "layers_block_type": ["mamba", "hybrid", "mamba"],
            "mamba_d_state": 8,
            "mamba_headdim": 16,
            "n_mamba_heads": 4,
            "mamba_ngroups": 1,
            "chunk_size": 8,
            "num_mem_blocks": 1,
            "use_mamba_kernels": False,
        },
        "hybrid",
    ),
    "qwen3_next": (
        {**_MOE, **_DELTA, "head_dim": 8, "shared_expert_intermediate_size": 24},
        "linear_attention",
    ),
    "qwen3_5_text": ({**_DELTA, "head_dim": 8}, "linear_attention"),
    "qwen3_5_moe_text": (
        {**_MOE, **_DELTA, "head_dim": 8, "shared_expert_intermediate_size": 24},
        "linear_attention",
    ),
    "olmo_hybrid": (_DELTA, "linear_attention"),
    "recurrent_gemma": (
        {
            "lru_width": 32,
            "attention_window_size": 16,
            "block_types": ["recurrent", "recurrent", "attention"],
        },
        "linear_attention|keeps KV for layers",
    ),  # transformers before 5.21 does not name the type
    "minimax": (
        {
            "head_dim": 8,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "layer_types": _DELTA["layer_types"],
        },
        "linear_attention",
    ),
    "rwkv": ({}, "no attention layers"),
    "xlstm": ({}, "no attention layers"),
    "deepseek_v2": ({**_LATENT, "topk_method": "greedy"}, "latent attention"),
    "deepseek_v3": (_LATENT, "latent attention"),
    "deepseek_v32": (_LATENT, "latent attention"),
    "glm4_moe_lite": (_LATENT, "latent attention"),
    "glm_moe_dsa": (_LATENT, "latent attention"),
    "minicpm3": ({**_LATENT, "rope_parameters": {**LONGROPE, "factor": 8.0}}, "latent attention"),
    "kimi_linear": (
        {
            **_LATENT,
            "num_local_experts": 4,
            "linear_head_dim": 8,
            "linear_num_heads": 4,
            "layer_types": _DELTA["layer_types"],
        },
        "latent attention",
    ),
    "deepseek_v4": (
        {
            "head_dim": 16,
            "num_key_value_heads": 1,
            "q_lora_rank": 16,
            "o_lora_rank": 16,
            "o_groups": 2,
            "index_n_heads": 2,
            "index_head_dim": 8,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
        },
        "heavily_compressed_attention",
    ),
    "llama4_text": (
        {"head_dim": 8, "num_local_experts": 4, "attention_chunk_size": 16, "intermediate_size_mlp": 48},
        "chunked local attention",
    ),
    "gemma3n_text": (
        {
            "head_dim": 8,
            "num_kv_shared_layers": 1,
            "layer_types": ["full_attention"] * 3,
            "vocab_size_per_layer_input": VOCABULARY,
            "hidden_size_per_layer_input": 8,
            "laurel_rank": 8,
        },
        "share another layer's keys",
    ),
    "gemma4_text": (
        {
            "head_dim": 8,
            "global_head_dim": 8,
            "num_kv_shared_layers": 1,
            "layer_types": ["full_attention"] * 3,
            "vocab_size_per_layer_input": VOCABULARY,
            "hidden_size_per_layer_input": 8,
        },
        "share another layer's keys",
    ),
}


def refused_model(kind: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Return a tiny model of a type in REFUSED."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some families warn about tiny configurations
        return tiny_model(kind, dtype=dtype, **REFUSED[kind][0])
