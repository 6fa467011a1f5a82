"""llama.cpp at the shape of a model: its weights in the GGUF format, run through the Python binding, with its prefix cache.

Needs the extra `peers` (llama-cpp-python, which is compiled when it is installed, and gguf). The weights are the model's own, in 16
bits or in the 8 that llama.cpp's users prefer; there is no vocabulary, since prompts come as token ids.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvweave.models.adapter import Adapter

FORMATS = ("BF16", "Q8_0")
"""Of weights, as GGUF calls them: the model's own and the usual 8 bits. Vectors are in 32 bits, as in every GGUF file; rows that are not made of whole blocks in 16."""

ARCHITECTURES = ("qwen2", "llama")

_OUTSIDE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_INSIDE = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def why_not(adapter: Adapter) -> str | None:
    """Why llama.cpp cannot be measured beside this model; None if it can."""
    try:
        import gguf  # noqa: F401
        import llama_cpp  # noqa: F401
    except ImportError as error:
        return f"{error.name} is not installed; pip install 'kvweave[peers]'"
    config = adapter.model.config
    if config.model_type not in ARCHITECTURES:
        return f"no GGUF file is written of the architecture {config.model_type}"
    turning = config.rope_parameters["rope_type"]
    return None if turning == "default" else f"no GGUF file is written of rotation of the type {turning}"


class LlamaCpp:
    """One model file, loaded; prompts of up to `tokens`."""

    def __init__(self, path: Path, tokens: int) -> None:
        from llama_cpp import Llama

        threads = torch.get_num_threads()
        self._llama = Llama(
            model_path=str(path),
            n_ctx=tokens,
            n_threads=threads,
            n_threads_batch=threads,
            flash_attn=True,  # as llama.cpp's own programs choose
            verbose=False,
        )

    def prefill(self, token_ids: Sequence[int], kept_tokens: int = 0) -> None:
        """Compute a prompt up to its last token's logits; of what was computed last, the first tokens are kept."""
        self._llama.n_tokens = kept_tokens  # what lies behind is dropped by the next call
        self._llama.eval(list(token_ids[kept_tokens:]))

    @property
    def logits(self) -> Tensor:
        """Of the last token computed, (vocabulary,)."""
        from llama_cpp import llama_get_logits_ith

        found = llama_get_logits_ith(self._llama.ctx, -1)
        return torch.tensor(found[: self._llama.n_vocab()])

    def close(self) -> None:
        self._llama.close()


@contextmanager
def opened(adapter: Adapter, folder: Path, weights: str, tokens: int) -> Iterator[LlamaCpp]:
    """The model as llama.cpp runs it, its weights in a format of GGUF; the file is in `folder` for as long."""
    path = folder / f"{weights}.gguf"
    write(adapter, path, weights)
    llama = LlamaCpp(path, tokens)
    try:
        yield llama
    finally:
        llama.close()
        path.unlink()


def write(adapter: Adapter, path: Path, weights: str) -> None:
    """The model's weights and shape as a GGUF file."""
    import gguf

    config = adapter.model.config
    writer = gguf.GGUFWriter(str(path), config.model_type)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("no_vocab")
    kind = gguf.GGMLQuantizationType[weights]
    # A head that is tied to the embedding is not among the parameters.
    for name, weight in adapter.model.named_parameters():
        numbers: Any = _as_llama_cpp_has_it(name, weight.detach().float(), config).cpu().numpy()
        if weight.dim() == 1:
            writer.add_tensor(tensor_name(name), numbers)
        else:
            block, _ = gguf.GGML_QUANT_SIZES[kind]
            own = gguf.GGMLQuantizationType.F16 if weight.shape[1] % block else kind
            writer.add_tensor(tensor_name(name), gguf.quants.quantize(numbers, own), raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _as_llama_cpp_has_it(name: str, weight: Tensor, config: Any) -> Tensor:
    """Of the architecture llama, queries and keys have the two numbers that are rotated together beside each other."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    turned = heads.get(name.split(".")[-2])
    if config.model_type != "llama" or turned is None:
        return weight
    return weight.view(turned, 2, -1, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


def tensor_name(name: str) -> str:
    """What GGUF calls a parameter of a Llama or Qwen2 model."""
    module, _, kind = name.rpartition(".")
    if module in _OUTSIDE:
        return f"{_OUTSIDE[module]}.{kind}"
    _, _, layer, inside = module.split(".", 3)
    return f"blk.{layer}.{_INSIDE[inside]}.{kind}"
