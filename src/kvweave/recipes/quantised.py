"""Any preparation's KV in fewer bits: a preparation around another one."""

from dataclasses import dataclass

from kvweave.errors import InvalidRequest
from kvweave.kvstore.keys import quantised
from kvweave.models.adapter import Adapter
from kvweave.recipes.context import Ids, PrepareContext
from kvweave.recipes.features import FeatureExtractor
from kvweave.recipes.prepare import Prepare, Prepared, packed
from kvweave.types import KVProvenance, Storage


@dataclass(frozen=True, slots=True)
class Quantised(Prepare):
    """What `of` prepares, stored as int8 or int4, and unpacked whenever it is placed in a prompt.

    It is never exact, whatever it was made behind: it stands in no exact path, and what a request computes behind it is
    not remembered. Exact KV of the same making, which another process may have stored, is accepted where it is missing.
    Raises InvalidRequest for a preparation that keeps exact versions.
    """

    of: Prepare
    coding: Storage

    def __post_init__(self) -> None:
        if self.of.max_versions is not None:
            raise InvalidRequest(
                f"a preparation that keeps exact versions of chunks cannot be stored as {self.coding}, which is never "
                "exact; use storage exact, or another preparation"
            )

    def provenances(self, adapter: Adapter, prefix: Ids, chunk_tokens: int) -> tuple[KVProvenance, ...]:
        """Each of the other preparation's, quantised and then as it is."""
        plain = self.of.provenances(adapter, prefix, chunk_tokens)
        return tuple(
            each for provenance in plain for each in (quantised(provenance, self.coding), provenance)
        )

    def make(self, ctx: PrepareContext, chunk: Ids) -> Prepared:
        """What the other one makes, quantised; other chunks' KV that it takes and stores on the way is as the shop stores it."""
        made = self.of.make(ctx, chunk)
        return Prepared(packed(made.kv, self.coding), made.sources)

    @property
    def extractors(self) -> tuple[FeatureExtractor, ...]:
        """The other one's."""
        return self.of.extractors

    @property
    def entries(self) -> int:
        """As many as the other one leaves."""
        return self.of.entries

    @property
    def storage(self) -> Storage:
        """In fewer bits."""
        return self.coding
