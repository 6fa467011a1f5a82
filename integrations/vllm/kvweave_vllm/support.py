"""What the plug-in was not tested with or cannot work with is refused when vLLM starts, each in one line."""

import sys
from typing import Any, Final

import vllm

from kvweave.models.rotary import rope_regime

TESTED: Final = ("0.32.0",)
"""Versions of vLLM that the tests of this package pass with."""


def check_config(config: Any) -> None:
    """Raise ValueError for the first thing in a vLLM configuration that cannot work."""
    model, parallel = config.model_config, config.parallel_config
    version = vllm.__version__.partition("+")[0]
    refused = {
        f"vLLM {version}, which is not tested: install {' or '.join(TESTED)}": version not in TESTED,
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "data parallelism in one server: start several": parallel.data_parallel_size > 1,
        "context parallelism": max(
            parallel.decode_context_parallel_size, parallel.prefill_context_parallel_size
        )
        > 1,
        "vLLM's V2 model runner, which is not tested: set VLLM_USE_V2_MODEL_RUNNER=0": config.use_v2_model_runner,
        "LoRA adapters": config.lora_config is not None,
        "multimodal models": model.is_multimodal_model,
        "multi-head latent attention (MLA)": model.use_mla,
        "recurrent layers": model.is_hybrid or model.has_inner_state,
        "models that vLLM runs by transformers' code": model.using_transformers_backend(),
        "rotary frequencies that depend on the length": rope_regime(model.hf_config, sys.maxsize) != "fixed",
        "quantised weights": model.quantization is not None,
        "speculative decoding": config.speculative_config is not None,
        "encoders": model.is_encoder_decoder or model.runner_type != "generate",
    }
    for what, found in refused.items():
        if found:
            raise ValueError(f"kvweave does not work with {what}")


def check_layers(runner: Any) -> None:
    """Raise ValueError for attention that cannot work, once the model is loaded and has its pages."""
    if len(runner.attn_groups) > 1:
        raise ValueError(
            "kvweave does not work with several groups of KV blocks: add --disable-hybrid-kv-cache-manager"
        )
    layers = runner.vllm_config.compilation_config.static_forward_context
    for group in runner.attn_groups[0]:
        backend = group.backend.get_name()
        refused = {
            f"{backend}, which attends before all KV is written": group.backend.forward_includes_kv_cache_update,
            f"{backend}, whose blocks are smaller than vLLM's": group.kernel_block_size is not None,
            "layers that do not write keys and values for every token": not all(
                hasattr(layers[name].impl, "do_kv_cache_update") for name in group.layer_names
            ),
            "layers that share another layer's keys and values": any(
                getattr(layer, "kv_sharing_target_layer_name", None) is not None for layer in layers.values()
            ),
        }
        for what, found in refused.items():
            if found:
                raise ValueError(f"kvweave does not work with {what}")
