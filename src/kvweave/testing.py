"""Public test doubles: a tiny model of every supported family, and a tokenizer for them.

All weights are random and seeded; nothing is downloaded.
"""

from collections.abc import Mapping
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from kvweave.models.adapter import Adapter

VOCABULARY = 320
_SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.3,  # wide enough that a wrong key shows in the logits
}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [2.0, 3.0, 4.0, 5.0],
    "original_max_position_embeddings": 64,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
_DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
_MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
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

# Name → (transformers model type, settings in addition to _SMALL). Each row goes through the parity tests.
FAMILIES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-3": ("llama", {"rope_parameters": _LLAMA3}),
    "llama-yarn": ("llama", {"rope_parameters": _YARN}),
    "llama-dynamic": ("llama", {"rope_parameters": _DYNAMIC, "max_position_embeddings": 64}),
    "qwen2": ("qwen2", {}),
    "qwen2-sliding": ("qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"head_dim": 8}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-sliding": ("mistral", {"sliding_window": 16}),
    "phi3": ("phi3", {}),
    "phi3-partial": ("phi3", {"partial_rotary_factor": 0.5}),
    "phi3-sliding": ("phi3", {"sliding_window": 16}),
    "phi3-longrope": ("phi3", {"rope_parameters": _LONGROPE, "original_max_position_embeddings": 64}),
    "glm4": ("glm4", {"head_dim": 8, "partial_rotary_factor": 0.5}),
    "gemma": ("gemma", {"head_dim": 8}),
    "gemma2": ("gemma2", {"head_dim": 8, "sliding_window": 16, "layer_types": _MIXED}),
    "gemma3": ("gemma3_text", {"head_dim": 8, "sliding_window": 16, "layer_types": _MIXED}),
    "granite": ("granite", {}),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", {"sliding_window": 16, "layer_types": _MIXED}),
    "cohere": ("cohere", {}),
    "cohere2": ("cohere2", {"sliding_window": 16, "layer_types": _MIXED}),
    "starcoder2": ("starcoder2", {}),
    "phi": ("phi", {}),
    "gpt-neox": ("gpt_neox", {}),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0, 1]}),
    "exaone4": ("exaone4", {"sliding_window": 16, "layer_types": _MIXED}),
    "seed-oss": ("seed_oss", {"head_dim": 8}),
    "helium": ("helium", {"head_dim": 8}),
    "arcee": ("arcee", {}),
    "ernie4.5": ("ernie4_5", {}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3-moe": (
        "qwen3_moe",
        {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    ),
    "olmoe": ("olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    "apertus": ("apertus", {}),
    "persimmon": ("persimmon", {}),
    "glm": ("glm", {"head_dim": 8}),
    "glm4-moe": (
        "glm4_moe",
        {"head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    ),
    "bitnet": ("bitnet", {}),
    "olmo": ("olmo", {}),
    "qwen2-moe": (
        "qwen2_moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 24,
        },
    ),
    "ministral3": ("ministral3", {}),
    "vaultgemma": ("vaultgemma", {"head_dim": 8, "sliding_window": 16, "layer_types": _MIXED}),
    "granitemoe": ("granitemoe", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "phimoe": ("phimoe", {"num_local_experts": 4}),
    "cwm": ("cwm", {"head_dim": 8}),
    "minimax-m2": ("minimax_m2", {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2}),
}

# Families whose stored KV cannot be placed: as above, and a word that the error message must contain.
REFUSED: Mapping[str, tuple[str, dict[str, Any], str]] = {
    "stablelm": ("stablelm", {}, "attention function"),
    "nemotron": ("nemotron", {}, "attention function"),
    "falcon": ("falcon", {"num_kv_heads": 2, "new_decoder_architecture": True}, "attention function"),
    "hunyuan": ("hunyuan_v1_dense", {"head_dim": 8}, "after rotating"),
    "nanochat": ("nanochat", {}, "after rotating"),
    "gpt-oss": ("gpt_oss", {"head_dim": 8, "num_local_experts": 4, "sliding_window": 16}, "attention sinks"),
    "gpt2": ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 4}, "rotary"),
    "opt": ("opt", {"word_embed_proj_dim": 32, "ffn_dim": 48}, "rotary"),
    "bloom": ("bloom", {}, "rotary"),
    "mpt": ("mpt", {"d_model": 32, "n_heads": 4, "n_layers": 2}, "rotary"),
    "mamba": ("mamba", {}, "linear_attention"),
    "falcon-mamba": ("falcon_mamba", {}, "linear_attention"),
    "mamba2": (
        "mamba2",
        {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1, "chunk_size": 8},
        "linear_attention",
    ),
    "jamba": ("jamba", {**_JAMBA, "num_experts": 4, "use_mamba_kernels": False}, "linear_attention"),
    "bamba": ("bamba", {**_MAMBA2, "attn_layer_indices": [1]}, "linear_attention"),
    "falcon-h1": ("falcon_h1", {**_MAMBA2, "mamba_d_ssm": 64, "head_dim": 8}, "hybrid"),
    "granite-4-hybrid": (
        "granitemoehybrid",
        {
            **_MAMBA2,
            "layer_types": ["mamba", "attention", "mamba"],
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "shared_intermediate_size": 32,
        },
        "linear_attention",
    ),
    "lfm2": ("lfm2", {"layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 8}, "conv"),
    "lfm2-moe": (
        "lfm2_moe",
        {**_MOE, "layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1},
        "conv",
    ),
    "nemotron-h": (
        "nemotron_h",
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
        "zamba2",
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
    "qwen3-next": (
        "qwen3_next",
        {**_MOE, **_DELTA, "head_dim": 8, "shared_expert_intermediate_size": 24},
        "linear_attention",
    ),
    "qwen3.5": ("qwen3_5_text", {**_DELTA, "head_dim": 8}, "linear_attention"),
    "qwen3.5-moe": (
        "qwen3_5_moe_text",
        {**_MOE, **_DELTA, "head_dim": 8, "shared_expert_intermediate_size": 24},
        "linear_attention",
    ),
    "olmo-hybrid": ("olmo_hybrid", _DELTA, "linear_attention"),
    "recurrent-gemma": (
        "recurrent_gemma",
        {
            "lru_width": 32,
            "attention_window_size": 16,
            "block_types": ["recurrent", "recurrent", "attention"],
        },
        "linear_attention|keeps KV for layers",  # transformers before 5.21 does not name the type
    ),
    "minimax": (
        "minimax",
        {
            "head_dim": 8,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "layer_types": _DELTA["layer_types"],
        },
        "linear_attention",
    ),
    "rwkv": ("rwkv", {}, "no attention layers"),
    "xlstm": ("xlstm", {}, "no attention layers"),
    "deepseek-v2": ("deepseek_v2", {**_LATENT, "topk_method": "greedy"}, "latent attention"),
    "deepseek-v3": ("deepseek_v3", _LATENT, "latent attention"),
    "deepseek-v3.2": ("deepseek_v32", _LATENT, "latent attention"),
    "glm-4.7-flash": ("glm4_moe_lite", _LATENT, "latent attention"),
    "glm-5": ("glm_moe_dsa", _LATENT, "latent attention"),
    "minicpm3": (
        "minicpm3",
        {**_LATENT, "rope_parameters": {**_LONGROPE, "factor": 8.0}},
        "latent attention",
    ),
    "kimi-linear": (
        "kimi_linear",
        {
            **_LATENT,
            "num_local_experts": 4,
            "linear_head_dim": 8,
            "linear_num_heads": 4,
            "layer_types": _DELTA["layer_types"],
        },
        "latent attention",
    ),
    "deepseek-v4": (
        "deepseek_v4",
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
    "llama-4": (
        "llama4_text",
        {"head_dim": 8, "num_local_experts": 4, "attention_chunk_size": 16, "intermediate_size_mlp": 48},
        "chunked local attention",
    ),
    "gemma-3n": (
        "gemma3n_text",
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
    "gemma-4": (
        "gemma4_text",
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


def tiny_model(
    family: str = "llama", *, dtype: torch.dtype = torch.float32, seed: int = 0
) -> PreTrainedModel:
    """Return a seeded random model of a family in FAMILIES or REFUSED, small enough to run in milliseconds."""
    kind, settings = FAMILIES[family] if family in FAMILIES else REFUSED[family][:2]
    config = AutoConfig.for_model(kind, **{**_SMALL, **settings})
    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return model.to(dtype).eval()


def tiny_tokenizer(chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer with a few merges and the control tokens `<pad> <bos> <eos>`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [
        ("t", "h"),
        ("th", "e"),
        ("i", "n"),
        ("Ġ", "the"),
        ("e", "r"),
        ("o", "n"),
        ("a", "n"),
        ("r", "e"),
    ]
    pieces = ["<pad>", "<bos>", "<eos>", *alphabet, *("".join(pair) for pair in merges)]
    core = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = chat_template
    return tokenizer


def tiny_adapter(family: str = "llama", *, dtype: torch.dtype = torch.float32, seed: int = 0) -> Adapter:
    """Return the adapter of a tiny model of a family."""
    return Adapter(tiny_model(family, dtype=dtype, seed=seed), tiny_tokenizer(), name=f"tiny-{family}")


def end_only_at(adapter: Adapter, *tokens: int) -> None:
    """Let the replies of a tiny model end at these tokens alone; without any, at their greatest length."""
    adapter.model.generation_config.eos_token_id = list(tokens)
    adapter.model.config.eos_token_id = None
    adapter.tokenizer.eos_token = None
