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
LONGROPE = {
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
_SLIDING = {
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
_MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}

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
    "phi3-longrope": ("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 64}),
    "glm4": ("glm4", {"head_dim": 8, "partial_rotary_factor": 0.5}),
    "gemma": ("gemma", {"head_dim": 8}),
    "gemma2": ("gemma2", {"head_dim": 8, **_SLIDING}),
    "gemma3": ("gemma3_text", {"head_dim": 8, **_SLIDING}),
    "granite": ("granite", {}),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", {**_SLIDING}),
    "cohere": ("cohere", {}),
    "cohere2": ("cohere2", {**_SLIDING}),
    "starcoder2": ("starcoder2", {}),
    "phi": ("phi", {}),
    "gpt-neox": ("gpt_neox", {}),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0, 1]}),
    "exaone4": ("exaone4", {**_SLIDING}),
    "seed-oss": ("seed_oss", {"head_dim": 8}),
    "helium": ("helium", {"head_dim": 8}),
    "arcee": ("arcee", {}),
    "ernie4.5": ("ernie4_5", {}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3-moe": ("qwen3_moe", {**_MOE, "head_dim": 8, "num_experts": 4}),
    "olmoe": ("olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    "apertus": ("apertus", {}),
    "persimmon": ("persimmon", {}),
    "glm": ("glm", {"head_dim": 8}),
    "glm4-moe": ("glm4_moe", {**_MOE, "head_dim": 8, "n_routed_experts": 4}),
    "bitnet": ("bitnet", {}),
    "olmo": ("olmo", {}),
    "qwen2-moe": ("qwen2_moe", {**_MOE, "num_experts": 4, "shared_expert_intermediate_size": 24}),
    "ministral3": ("ministral3", {}),
    "vaultgemma": ("vaultgemma", {"head_dim": 8, **_SLIDING}),
    "granitemoe": ("granitemoe", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "phimoe": ("phimoe", {"num_local_experts": 4}),
    "cwm": ("cwm", {"head_dim": 8}),
    "minimax-m2": ("minimax_m2", {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2}),
}


def tiny_model(
    family: str = "llama", *, dtype: torch.dtype = torch.float32, seed: int = 0, **settings: Any
) -> PreTrainedModel:
    """Return a seeded random model, small enough to run in milliseconds.

    Args:
        family: a name in FAMILIES, or a model type of transformers.
        settings: fields of its configuration that differ from the family's.
    """
    kind, own = FAMILIES.get(family, (family, {}))
    config = AutoConfig.for_model(kind, **{**_SMALL, **own, **settings})
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
