"""Keeps the weights of a loaded model's linear layers in 8 or 4 bits. Its classes stay unmodified; its modules are replaced.

Linear layers, the output head and the embedding are replaced one by one, so that the full weights are not in memory beside
the packed ones. The embedding and the output head have 8 bits in either case. A pair that shares its weight is held twice: in rows
to look up, and packed to multiply.
Other weights (norms, biases, routers, fused experts) keep their dtype.
"""

import ctypes
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvweave.errors import InvalidRequest
from kvweave.extras import require
from kvweave.models.precision import WeightBits
from kvweave.ops.quantised_linear import (
    GROUP,
    PackedWeight,
    digest_tensors,
    fits_groups,
    pack_int4,
    pack_int8,
    quantise_channels,
    quantise_groups,
    quantise_rows_in_groups,
)

_LEAST_OUTPUTS = 16
"""Layers with fewer outputs keep their dtype: gates and routers, which are sensitive and small."""


class QuantisedLinear(nn.Module):
    """Replaces `nn.Linear`: takes and returns float32 (…, K) and (…, N).

    Attributes:
        in_features, out_features: K and N.
        bias: (N,) or None.
        packed: the weight.
        digest: names the weight's values, on every CPU the same.
        bits: as chosen for the model; the head's are int8, and those of a shape that the 4-bit kernel cannot take.
    """

    def __init__(self, linear: nn.Linear, bits: WeightBits) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = None if linear.bias is None else nn.Parameter(linear.bias.detach().float(), False)
        self.packed: PackedWeight
        if bits == "int4" and fits_groups(self.out_features, self.in_features):
            self.packed = pack_int4(*quantise_groups(linear.weight))
        else:
            self.packed = pack_int8(*quantise_channels(linear.weight))
        self.digest, self.bits = self.packed.digest, bits

    @property
    def weight(self) -> Tensor:
        """A tensor with the weight's shape (N, K) and without its values."""
        return torch.empty(self.out_features, self.in_features, device="meta")

    def forward(self, states: Tensor) -> Tensor:
        """Return states @ weight.T + bias."""
        shape = (*states.shape[:-1], self.out_features)
        rows = states.reshape(-1, self.in_features)
        if not rows.shape[0]:
            return states.new_empty(shape)
        product = self.packed.multiply(rows)
        return (product if self.bias is None else product.add_(self.bias)).view(shape)


class QuantisedEmbedding(nn.Module):
    """Replaces `nn.Embedding`, and those that multiply by a fixed factor: 8 bits per number, a scale for every 32 numbers.

    Attributes:
        num_embeddings, embedding_dim: the table's shape (V, K).
        digest, bits: as of a linear layer.
    """

    def __init__(self, table: nn.Embedding, factor: Tensor | None) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = table.num_embeddings, table.embedding_dim
        self.bits: WeightBits = "int8"
        codes, scales = quantise_rows_in_groups(table.weight)
        self.digest = digest_tensors(codes, scales)
        self.register_buffer("codes", codes, persistent=False)
        self.register_buffer("scales", scales if factor is None else scales * factor, persistent=False)
        self.codes: Tensor
        self.scales: Tensor

    @property
    def weight(self) -> Tensor:
        """A tensor with the table's shape (V, K) and without its values."""
        return torch.empty(self.num_embeddings, self.embedding_dim, device="meta")

    def forward(self, ids: Tensor) -> Tensor:
        """Return the rows of the table at token ids (…,): (…, K)."""
        codes, scales = self.codes[ids], self.scales[ids]  # (…, K), (…, groups)
        grouped = codes.unflatten(-1, (scales.shape[-1], -1)).float()
        embedded: Tensor = grouped.mul_(scales[..., None]).flatten(-2)
        return embedded


def quantise_weights(model: PreTrainedModel, bits: WeightBits, device: torch.device) -> None:
    """Keep the weights of a model's linear layers in 8 or 4 bits from now on.

    On a CPU, the embedding has 8 bits too, and the model computes in float32. A GPU's weights are packed by torchao, and the
    model computes in its own dtype; it is moved there. Raises MissingExtra on a GPU without torchao, InvalidRequest on other
    devices.
    """
    if device.type == "cuda":
        _quantise_on_gpu(model.to(device), bits)
    elif device.type == "cpu":
        _quantise_on_cpu(model, bits)
    else:
        raise InvalidRequest(
            f"weights in {bits} need a CPU or a CUDA GPU, not {device.type}; leave --weights out"
        )


def _quantise_on_cpu(model: PreTrainedModel, bits: WeightBits) -> None:
    replaced: dict[nn.Module, nn.Module] = {}
    head = model.get_output_embeddings()
    for parent in list(model.modules()):
        for name, module in list(parent.named_children()):
            if module not in replaced:
                new = _quantised(module, "int8" if module is head else bits)
                if new is None:
                    continue
                replaced[module] = new
                module.register_parameter("weight", None)  # which the list of modules would keep
            setattr(parent, name, replaced[module])
    model.float()
    for kept in model.parameters():
        kept.data = kept.data.clone()  # what it was a view of, the mapped file, is no longer needed
    model.config.dtype = torch.float32
    with suppress(
        OSError, AttributeError
    ):  # return the temporary copies to the system, which glibc keeps otherwise
        ctypes.CDLL(None).malloc_trim(0)


def _quantised(module: nn.Module, bits: WeightBits) -> nn.Module | None:
    """Return a replacement of a module; None if it keeps its weights."""
    if type(module) is nn.Linear and module.out_features >= _LEAST_OUTPUTS:
        return QuantisedLinear(module, bits)
    if isinstance(module, nn.Embedding):
        plain = type(module).forward is nn.Embedding.forward
        factor: Tensor | None = None if plain else getattr(module, "embed_scale", None)
        if plain or isinstance(factor, Tensor):
            return QuantisedEmbedding(module, factor)
    return None


def quantised_modules(model: nn.Module) -> dict[str, Any]:
    """Return the modules with weights in fewer bits, by name. Each has `digest`, `bits` and a `weight` of the right shape."""
    return {name: module for name, module in model.named_modules() if hasattr(module, "digest")}


def weight_bits(model: nn.Module) -> WeightBits:
    """Return the bits of a model's linear layers."""
    found: set[WeightBits] = {module.bits for module in quantised_modules(model).values()}
    return next((bits for bits in ("int4", "int8") if bits in found), "full")


def _quantise_on_gpu(model: PreTrainedModel, bits: WeightBits) -> None:
    require("gpu-weights", f"packing weights in {bits} on a GPU", "torchao")
    from torchao.quantization import Int4WeightOnlyConfig, Int8WeightOnlyConfig, quantize_

    if bits == "int4":
        model.to(torch.bfloat16)  # the one dtype that its kernel multiplies in
    chosen = [module for module in model.modules() if _packs_on_gpu(module, model, bits)]
    for module in chosen:
        # The layout is the GPU's; the values follow from these.
        own: Any = module
        own.digest, own.bits = f"{bits} {digest_tensors(own.weight.detach().cpu())}", bits
    config = (
        Int8WeightOnlyConfig()
        if bits == "int8"
        else Int4WeightOnlyConfig(group_size=GROUP, int4_packing_format="tile_packed_to_4d")
    )
    quantize_(model, config, filter_fn=lambda module, _: hasattr(module, "digest"))


def _packs_on_gpu(module: nn.Module, model: PreTrainedModel, bits: WeightBits) -> bool:
    """Whether a module's weight is packed on a GPU. A head that shares the embedding's weight is not: it would be held twice."""
    if type(module) is not nn.Linear or module.out_features < _LEAST_OUTPUTS:
        return False
    if module is model.get_output_embeddings() and module.weight is model.get_input_embeddings().weight:
        return False
    return bits == "int8" or fits_groups(module.out_features, module.in_features)
