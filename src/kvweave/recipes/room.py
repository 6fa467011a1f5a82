"""How much room of the store what is made of chunks takes; knows nothing of what is there already."""

from kvweave.core import Storage
from kvweave.models.adapter import Adapter
from kvweave.ops.quantise import BITS, coded_bytes

ENTRY_OVERHEAD_BYTES = 8192
"""An entry's header and token ids, generously."""


def kv_bytes(adapter: Adapter, tokens: int, storage: Storage = "exact") -> int:
    """An entry of KV of so many tokens, at most."""
    shape = adapter.geometry
    if storage not in BITS:
        return tokens * shape.token_bytes + ENTRY_OVERHEAD_BYTES
    dimensions = (shape.layers, 2, shape.kv_heads, tokens, shape.head_width)
    return coded_bytes(dimensions, shape.dtype, storage) + ENTRY_OVERHEAD_BYTES


def note_bytes(tokens: int, numbers: int = 1) -> int:
    """A note with so many float32 numbers about each of so many tokens, at most."""
    return 4 * tokens * numbers + ENTRY_OVERHEAD_BYTES
