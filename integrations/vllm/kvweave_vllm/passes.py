"""Passes over chosen rows of prompts, through vLLM's own model, inside one of its steps.

A run of neighbouring rows [a, b) is one entry of a varlen batch: query length b − a, sequence length b, and its request's block
table. Every layer writes the rows' K and V into the pages before it attends, so rows see recomputed rows before them
and placed KV elsewhere, under the exact causal mask.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import CUDAGraphMode
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata

from kvweave_vllm.ranks import Heads

Observer = Callable[[int, Tensor, Tensor, Tensor], None]
"""Called at each layer, before it writes and attends, with the layer and its query, keys and values, (T, heads, D), of all ranks."""


@dataclass(frozen=True, slots=True)
class RequestRows:
    """Rows (T,) of one request, ascending prompt positions, with all its token ids (N,) and its block table (blocks,)."""

    rows: Tensor
    token_ids: Tensor
    blocks: Tensor


class NestedPasses:
    """Runs rows through the model of vLLM's model runner.

    Attributes:
        layers: the attention layers, in order.
        heads: this rank's heads.
    """

    def __init__(self, runner: Any) -> None:
        self.model: nn.Module = runner.model
        self.device: torch.device = runner.device
        self._config = runner.vllm_config
        self.block_tokens: int = runner.cache_config.block_size
        groups = [group for groups in runner.attn_groups for group in groups]
        context = self._config.compilation_config.static_forward_context
        names = sorted((name for group in groups for name in group.layer_names), key=layer_number)
        self.layers: list[Any] = [context[name] for name in names]
        self.heads = Heads(self.layers[0].num_kv_heads, runner.model_config.get_total_num_kv_heads())
        # Of our own: the step's metadata is built already, and may be in the buffers of its builders.
        self._builders = [
            (group.layer_names, group.backend.get_builder_cls()(group.kv_cache_spec, group.layer_names, self._config, self.device))
            for group in groups
        ]  # fmt: skip
        scheduler = self._config.scheduler_config
        self._most_rows: int = scheduler.max_num_batched_tokens
        self._most_runs: int | None = None if self.device.type == "cpu" else scheduler.max_num_seqs

    def slots(self, blocks: Tensor, rows: Tensor) -> Tensor:
        """Return where the KV of prompt positions (T,) is in the pages, (T,) int64."""
        return blocks.long()[rows // self.block_tokens] * self.block_tokens + rows % self.block_tokens

    def write(self, layer: int, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """Write this rank's of rotated keys and values (T, G, D) of a layer into the pages, as every backend can."""
        own = self.layers[layer]
        keys, values = (self.heads.own_keys(each) for each in (keys, values))
        own.impl.do_kv_cache_update(own, keys, values, own.kv_cache, slots.to(self.device))

    def run(self, requests: Sequence[RequestRows], observe: Observer | None = None) -> Tensor:
        """Run the rows of several requests; return the last hidden states of the last batch, (T, width).

        Without an observer, rows run in batches that vLLM's buffers hold, each request's in the order of their positions:
        later rows see earlier ones in the pages, so the batches change nothing.
        """
        runs = [(request, run) for request in requests for run in _runs(request.rows, self._most_rows)]
        if observe is not None:
            with self._observed(observe):
                return self._run(runs)
        hidden = None
        for batch in _batches(runs, self._most_rows, self._most_runs):
            hidden = self._run(batch)
        assert hidden is not None, "there are no rows"
        return hidden

    def probe(self, positions: Tensor, observe: Observer) -> None:
        """Run the tokens 0, 1, … at these positions (T,) with attention that returns zeros, for what the observer sees."""
        with ExitStack() as stack:
            for layer in self.layers:
                hook = layer.register_forward_hook(lambda module, args, output: torch.zeros_like(output))
                stack.callback(hook.remove)
            stack.enter_context(self._observed(observe))
            stack.enter_context(self._context(None, {}, positions.numel()))
            self.model(input_ids=torch.arange(positions.numel(), device=self.device), positions=positions)

    def _run(self, runs: Sequence[tuple[RequestRows, Tensor]]) -> Tensor:
        lengths = torch.tensor([len(run) for _, run in runs], dtype=torch.int32)
        ends = torch.tensor([int(run[-1]) + 1 for _, run in runs], dtype=torch.int32)
        starts = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
        table = torch.nn.utils.rnn.pad_sequence([request.blocks for request, _ in runs], batch_first=True)
        positions = torch.cat([run for _, run in runs])
        ids = torch.cat([request.token_ids[run] for request, run in runs])
        slots = torch.cat([self.slots(request.blocks, run) for request, run in runs])
        common = CommonAttentionMetadata(
            query_start_loc=starts.to(self.device),
            query_start_loc_cpu=starts,
            seq_lens=ends.to(self.device),
            num_reqs=len(runs),
            num_actual_tokens=len(positions),
            max_query_len=int(lengths.max()),
            max_seq_len=int(ends.max()),
            block_table_tensor=table.int().to(self.device),
            slot_mapping=slots.to(self.device),
            positions=positions.to(self.device),
        )
        metadata, mapping = {}, {}
        for names, builder in self._builders:
            built = builder.build(0, common)
            for name in names:
                metadata[name], mapping[name] = built, common.slot_mapping
        with self._context(metadata, mapping, len(positions)):
            hidden: Tensor = self.model(input_ids=ids.to(self.device), positions=common.positions)
        return hidden

    @contextmanager
    def _context(self, metadata: Any, mapping: dict[str, Tensor], tokens: int) -> Iterator[None]:
        """Enter the model outside of compiled code and graphs, whose sizes are those of vLLM's own batches."""
        with (
            torch.inference_mode(),
            set_forward_context(
                metadata,
                self._config,
                num_tokens=tokens,
                cudagraph_runtime_mode=CUDAGraphMode.NONE,
                slot_mapping=mapping,
                skip_compiled=True,
            ),
        ):
            yield

    @contextmanager
    def _observed(self, observe: Observer) -> Iterator[None]:
        def show(number: int, layer: Any, args: Any, kwargs: Any) -> None:
            query, key, value = (*args, *kwargs.values())[:3]
            observe(
                number,
                self.heads.whole(query.reshape(len(query), layer.num_heads, -1)),
                self.heads.whole_keys(key.reshape(len(key), layer.num_kv_heads, -1)),
                self.heads.whole_keys(value.reshape(len(value), layer.num_kv_heads, -1)),
            )

        with ExitStack() as stack:
            for number, layer in enumerate(self.layers):
                hook = layer.register_forward_pre_hook(partial(show, number), with_kwargs=True)
                stack.callback(hook.remove)
            yield


def layer_number(name: str) -> int:
    """Return the number in a layer's name, such as model.layers.3.self_attn.attn."""
    return next(int(part) for part in name.split(".") if part.isdigit())


def _runs(rows: Tensor, most: int) -> list[Tensor]:
    """Cut ascending rows into runs of neighbours of at most that length."""
    cuts = torch.nonzero(torch.diff(rows) != 1).flatten() + 1
    runs = torch.tensor_split(rows, cuts.tolist()) if len(rows) else ()
    return [part for run in runs for part in run.split(most)]


def _batches(
    runs: Sequence[tuple[RequestRows, Tensor]], most_rows: int, most_runs: int | None
) -> Iterator[list[tuple[RequestRows, Tensor]]]:
    batch: list[tuple[RequestRows, Tensor]] = []
    held = 0
    for request, run in runs:
        if batch and (held + len(run) > most_rows or len(batch) == most_runs):
            yield batch
            batch, held = [], 0
        batch.append((request, run))
        held += len(run)
    if batch:
        yield batch
