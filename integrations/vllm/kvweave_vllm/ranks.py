"""What the ranks of vLLM's tensor-parallel group do together: whole heads for selectors and the store, and one answer of the store."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from vllm.distributed import get_tp_group

from kvweave.errors import StoreError
from kvweave.kvstore.format import Content
from kvweave.kvstore.keys import EntryKey, LookUp
from kvweave.kvstore.kv_store import KVStore
from kvweave.kvstore.tiers.leases import Lease
from kvweave.types import KVProvenance

Result = TypeVar("Result")


class Heads:
    """The heads that this rank computes, `key_heads` of the keys, among those of all ranks.

    Where there are fewer key heads than ranks, several ranks compute the same one (`copies`).

    Attributes:
        total: key heads of all ranks.
    """

    def __init__(self, key_heads: int, model_key_heads: int) -> None:
        self._group = get_tp_group()
        self._copies = max(1, self._group.world_size // model_key_heads)
        first = self._group.rank_in_group * key_heads // self._copies
        self._own = slice(first, first + key_heads)
        self.total = key_heads * self._group.world_size // self._copies

    def whole(self, tensor: Tensor) -> Tensor:
        """Return all query heads of a layer, (T, heads, D), from this rank's; all ranks call it."""
        gathered: Tensor = self._group.all_gather(tensor.contiguous(), 1)
        return gathered

    def whole_keys(self, tensor: Tensor) -> Tensor:
        """Return all key or value heads of a layer, (T, total, D), from this rank's; all ranks call it."""
        return self.whole(tensor)[:, :: self._copies]

    def own_keys(self, tensor: Tensor) -> Tensor:
        """Return this rank's of all key or value heads (T, total, D)."""
        return tensor if self.total == self._own.stop - self._own.start else tensor[:, self._own].contiguous()

    def agreed(self, chosen: Result) -> Result:
        """Return what rank 0 has chosen; all ranks call it."""
        agreed: Result = self._group.broadcast_object(chosen)
        return agreed


def new_group() -> Any:
    """Return another process group of the tensor-parallel ranks, on CPUs, for a thread of its own; None for one rank.

    All ranks call it.
    """
    group = get_tp_group()
    return None if group.world_size == 1 else torch.distributed.new_group(group.ranks, backend="gloo")


def on_first(group: Any, work: Callable[[], Result]) -> Result:
    """Return what `work` returns on rank 0 of a group, which alone runs it; all ranks call it.

    Raises StoreError on all ranks if it fails.
    """
    said: list[Any] = [None, None]
    if torch.distributed.get_rank(group) == 0:
        try:
            said[0] = work()
        except Exception as error:
            said[1] = f"{type(error).__name__}: {error}"
    torch.distributed.broadcast_object_list(said, group=group, group_src=0)
    if said[1] is not None:
        raise StoreError(said[1])
    result: Result = said[0]
    return result


class AgreedStore(KVStore):
    """One rank's face of a store that all ranks open: rank 0 looks up and stores, and all get the same answers.

    Each rank reads the entries that rank 0 found itself; one that another rank cannot read is not found. All ranks make the
    same calls in the same order, in one thread each, and `group` belongs to that thread. Errors of rank 0 are StoreErrors on all.
    """

    def __init__(self, base: KVStore, group: Any) -> None:
        self._base, self._group = base, group
        self._rank: int = torch.distributed.get_rank(group)
        self.namespace = base.namespace
        self._location = base._location

    @property
    def limit_bytes(self) -> int:
        return self._base.limit_bytes

    @property
    def used_bytes(self) -> int:
        return self._base.used_bytes

    def lease(self) -> Lease:
        return self._base.lease()

    def close(self) -> None:
        """Do nothing: whoever opened the store closes it."""

    def _find(
        self, look_ups: Sequence[LookUp], lease: Lease | None, *, whole: bool = False
    ) -> list[tuple[EntryKey, Content] | None]:
        found: list[tuple[EntryKey, Content] | None] = []
        if not look_ups:
            return found

        def look_up() -> list[str | None]:  # whole, so that no rank finds damage that others do not see
            found[:] = self._base._find(look_ups, lease, whole=True)
            return [None if one is None else one[0].digest for one in found]

        chosen = on_first(self._group, look_up)
        if self._rank:
            look_ups = [
                replace(each, candidates=[key for key in each.candidates if key.digest == digest])
                for each, digest in zip(look_ups, chosen, strict=True)
            ]
            try:
                look_up()
            except (StoreError, OSError):
                found[:] = [None] * len(look_ups)
        missing = torch.tensor([one is None for one in found], dtype=torch.uint8)
        torch.distributed.all_reduce(missing, torch.distributed.ReduceOp.MAX, self._group)
        return [None if lost else one for lost, one in zip(missing.tolist(), found, strict=True)]

    def _listed(self, keys: Sequence[str]) -> Collection[str]:
        return on_first(self._group, lambda: set(self._base._listed(keys)))

    def _versions(self, model: str, chunks: Sequence[str]) -> Mapping[str, list[KVProvenance]]:
        return on_first(self._group, lambda: self._base._versions(model, chunks))

    def _import(self, look_ups: Sequence[LookUp]) -> list[bool]:
        return on_first(self._group, lambda: self._base._import(look_ups))

    def _put(
        self,
        key: EntryKey,
        model_name: str,
        content: Content,
        sources: Sequence[str],
        max_versions: int | None,
    ) -> bool:
        return on_first(self._group, lambda: self._base._put(key, model_name, content, sources, max_versions))
