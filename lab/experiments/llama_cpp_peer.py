"""Runs a model in llama.cpp, by its Python binding and with its prefix cache.

Needs the extra `peers`: gguf and llama-cpp-python, which is compiled during installation. The weights are the model's own,
in 16 bits or in the 8 bits that are usual with llama.cpp. The file has no vocabulary, since prompts are token ids.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvweave.models.adapter import Adapter

FORMATS = ("BF16", "Q8_0")
"""GGUF's names of weight formats: the model's own and the usual 8 bits.

Vectors have 32 bits, as in every GGUF file. Rows that do not consist of whole blocks have 16 bits.
"""

ARCHITECTURES = ("qwen2", "llama")

_MODEL_TENSORS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_LAYER_TENSORS = {
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


def unsupported_reason(adapter: Adapter) -> str | None:
    """Return why llama.cpp cannot run this model; None if it can."""
    try:
        import gguf  # noqa: F401
        import llama_cpp  # noqa: F401
    except ImportError as error:
        return f"{error.name} is not installed; pip install 'kvweave[peers]'"
    config = adapter.model.config
    if config.model_type not in ARCHITECTURES:
        return f"GGUF files of the architecture {config.model_type} are not supported"
    rope_type = config.rope_parameters["rope_type"]
    return None if rope_type == "default" else f"GGUF files with RoPE of type {rope_type} are not supported"


class LlamaCpp:
    """A loaded model file, for prompts of up to `tokens`."""

    def __init__(self, path: Path, tokens: int) -> None:
        from llama_cpp import Llama

        threads = torch.get_num_threads()
        self._llama = Llama(
            model_path=str(path),
            n_ctx=tokens,
            n_threads=threads,
            n_threads_batch=threads,
            flash_attn=True,  # as in llama.cpp's own programs
            verbose=False,
        )

    def prefill(self, token_ids: Sequence[int], kept_tokens: int = 0) -> None:
        """Compute a prompt up to its last token's logits; keep the KV of its first tokens from the last call."""
        self._llama.n_tokens = kept_tokens  # the next call drops later tokens
        self._llama.eval(list(token_ids[kept_tokens:]))

    @property
    def logits(self) -> Tensor:
        """Logits of the last computed token, (vocabulary,)."""
        from llama_cpp import llama_get_logits_ith

        logits = llama_get_logits_ith(self._llama.ctx, -1)
        return torch.tensor(logits[: self._llama.n_vocab()])

    def close(self) -> None:
        self._llama.close()


@contextmanager
def open_llama_cpp(adapter: Adapter, folder: Path, weights: str, tokens: int) -> Iterator[LlamaCpp]:
    """Load the model into llama.cpp with weights in a GGUF format; its file is in `folder` meanwhile."""
    path = folder / f"{weights}.gguf"
    write_gguf(adapter, path, weights)
    llama = LlamaCpp(path, tokens)
    try:
        yield llama
    finally:
        llama.close()
        path.unlink()


def write_gguf(adapter: Adapter, path: Path, weights: str) -> None:
    """Write the model's weights and shape as a GGUF file."""
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
    # An output head that is tied to the embedding is not among the parameters.
    for name, weight in adapter.model.named_parameters():
        numbers: Any = _llama_cpp_layout(name, weight.detach().float(), config).cpu().numpy()
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


def _llama_cpp_layout(name: str, weight: Tensor, config: Any) -> Tensor:
    """Return a weight in llama.cpp's layout: for Llama models, it places rotated pairs of queries and keys side by side."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    count = heads.get(name.split(".")[-2])
    if config.model_type != "llama" or count is None:
        return weight
    return weight.view(count, 2, -1, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


def tensor_name(name: str) -> str:
    """Return GGUF's name of a parameter of a Llama or Qwen2 model."""
    module, _, kind = name.rpartition(".")
    if module in _MODEL_TENSORS:
        return f"{_MODEL_TENSORS[module]}.{kind}"
    _, _, layer, inside = module.split(".", 3)
    return f"blk.{layer}.{_LAYER_TENSORS[inside]}.{kind}"
