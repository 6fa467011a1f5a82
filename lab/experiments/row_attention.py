"""Measures attention of selected rows in one layer: with all rows, with a mask, and with kvweave's operators.

    .venv/bin/python lab/experiments/row_attention.py --output lab/results/row_attention.json

This is FusionRAG's fig. 14b, in a real shape. Fused attention without a mask computes every row; with a mask, it computes
only the selected rows, against every key. The mask is made before the timed part, since all layers share it. Every
implementation of kvweave that runs on the device is timed like a layer in the middle of a request, and its result is
compared with the mask's; `chosen` is the one that requests use. Keys and values are random. Rows are drawn evenly from the
context, since their positions affect the time. On a GPU, all rows use FlashAttention, and the mask uses the
memory-efficient kernel, for which keys and values are repeated before the timed part.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  torch's own name for it
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PretrainedConfig

from experiment import argument_parser, command_of, environment, median_and_range, run_script, write_result
from kvweave.models.loading import parse_device, parse_dtype
from kvweave.ops.attention import AttentionInput, AttentionSettings, KVRows, RowAttention
from kvweave.ops.blocked_attention import BlockedAttention, SplitAttention, additive_mask, can_split
from kvweave.ops.row_attention import has_triton, row_attention
from kvweave_lab.bench.measurement import MedianRange, elapsed_s, paired_ratios
from kvweave_lab.shapes import shape_config

ALL, MASK = "all rows", "a mask"
QUESTION_TOKENS = 32
"""Rows at the end that are computed at any ratio."""


def implementations(rows: Tensor, dtype: torch.dtype) -> list[RowAttention]:
    """Return kvweave's implementations that run on the device of the rows."""
    found: list[RowAttention] = [BlockedAttention([rows], dtype)]
    if rows.device.type == "cpu" and can_split():
        found.append(SplitAttention([rows], dtype))
    elif rows.device.type == "cuda" and has_triton():
        from kvweave.ops.paged_attention import PagedAttention

        found.append(PagedAttention([rows]))
    return found


class Layer:
    """One layer's query (1, H, N, D), keys and values (1, G, N, D) of a prompt, and the selected rows (T,)."""

    def __init__(
        self, config: PretrainedConfig, tokens: int, ratio: float, dtype: torch.dtype, device: torch.device
    ) -> None:
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        width = getattr(config, "head_dim", None) or config.hidden_size // heads
        generator = torch.Generator().manual_seed(0)
        self.query, self.keys, self.values = (
            torch.randn(1, count, tokens, width, generator=generator).to(device, dtype)
            for count in (heads, kv_heads, kv_heads)
        )
        context = tokens - QUESTION_TOKENS
        selected = torch.randperm(context, generator=generator)[: round(ratio * context)].sort().values
        self.rows = torch.cat([selected, torch.arange(context, tokens)]).to(device)
        self._scaling = width**-0.5

    def ways(self) -> dict[str, Callable[[], Tensor]]:
        """Return a step for each way; a step returns the attention of the rows, (1, H, T, D)."""
        rows, on_gpu = self.rows, self.query.device.type == "cuda"
        query = self.query[:, :, rows].contiguous()
        positions = torch.arange(self.keys.shape[2], device=rows.device)
        mask = additive_mask(rows, positions, None, query.dtype)
        keys, values = self.keys, self.values
        if on_gpu:  # no GPU kernel with a mask lets heads share keys
            keys, values = (
                part.repeat_interleave(query.shape[1] // part.shape[1], dim=1) for part in (keys, values)
            )
        inputs = [AttentionInput((), KVRows(self.keys, self.values, positions), rows[:0])]

        def only(backend: SDPBackend) -> AbstractContextManager[object]:
            return sdpa_kernel(backend) if on_gpu else nullcontext()

        def all_rows() -> Tensor:
            with only(SDPBackend.FLASH_ATTENTION):
                out = F.scaled_dot_product_attention(
                    self.query, self.keys, self.values, is_causal=True, scale=self._scaling, enable_gqa=True
                )
            return out[:, :, rows]

        def masked() -> Tensor:
            with only(SDPBackend.EFFICIENT_ATTENTION):
                return F.scaled_dot_product_attention(
                    query, keys, values, attn_mask=mask, scale=self._scaling, enable_gqa=not on_gpu
                )

        settings = AttentionSettings(self._scaling)
        own = {
            type(one).__name__: lambda one=one: one.attend(query, inputs, settings)
            for one in implementations(rows, query.dtype)
        }
        return {ALL: all_rows, MASK: masked, **own}


def measure(
    shape: str, context_tokens: int, ratio: float, dtype: str, device: str, rounds: int
) -> dict[str, Any]:
    """Return the result without the environment."""
    on = parse_device(device)
    layer = Layer(shape_config(shape), context_tokens, ratio, parse_dtype(dtype) or torch.bfloat16, on)
    ways = layer.ways()

    def synchronized(step: Callable[[], Tensor]) -> None:
        step()
        if on.type == "cuda":
            torch.cuda.synchronize()

    expected = ways[MASK]().float()
    differences = {
        name: float((step().float() - expected).abs().max()) for name, step in ways.items()
    }  # also warms up
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds):
        for name in list(ways)[:: -1 if number % 2 else 1]:
            times[name].append(elapsed_s(lambda step=ways[name]: synchronized(step)))
    return {
        "shape": shape,
        "dtype": str(layer.query.dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name(on) if on.type == "cuda" else str(on),
        "context_tokens": context_tokens,
        "ratio": ratio,
        "computed_rows": layer.rows.numel(),
        "rounds": rounds,
        "chosen": type(row_attention([layer.rows], layer.query.dtype)).__name__,
        "rows": [
            {
                "way": name,
                "seconds": median_and_range(MedianRange.of(own)),
                "of_all": median_and_range(paired_ratios(times[ALL], own)),
                "of_mask": median_and_range(paired_ratios(times[MASK], own)),
                "largest_difference": differences[name],
            }
            for name, own in times.items()
        ],
    }


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--shape", default="qwen2.5-0.5b")
    parser.add_argument("--context-tokens", type=int, default=32768)
    parser.add_argument("--ratio", type=float, default=0.15)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    result = measure(args.shape, args.context_tokens, args.ratio, args.dtype, args.device, args.rounds)
    result |= environment(command_of(args))
    write_result(result, args.output)


if __name__ == "__main__":
    run_script(main)
