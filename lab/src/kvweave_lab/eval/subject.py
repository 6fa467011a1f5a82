"""What outcomes are about: everything outside prompt, recipe and budget that they depend on.

A journal keeps it with its outcomes, so that no table mixes two of them. Knows no journal.
"""

from typing import Any

from kvweave.embedding import TextEncoder
from kvweave.models.adapter import Adapter
from kvweave.recipes.auxiliary import auxiliary_named


def subject_of(adapter: Adapter, auxiliary: str | None = None) -> dict[str, Any]:
    """By name, as JSON would give it back.

    `auxiliary` is the model that recipes with an auxiliary model read with, None for the shipped one. The layers are those
    that `kvweave profile-layers` found, the embedding is the model by which a sample's other documents are similar.
    Raises ModelNotFound for an auxiliary model that is not there.
    """
    return {
        "model": adapter.fingerprint.digest,
        "dtype": dtype_of(adapter),
        "critical layers": list(adapter.critical_layers),
        "auxiliary": auxiliary_named(auxiliary).adapter.fingerprint.digest,
        "embedding": TextEncoder().name,
    }


def dtype_of(adapter: Adapter) -> str:
    """The number format of weights and KV."""
    return str(adapter.geometry.dtype).removeprefix("torch.")
