"""A newcomer joins the nearest cluster, and no cluster is ever split: the static update that PQCache stands for.

Paper: DynaKV §2.3, its baseline. Differs from PQCache: keys are compared as they are, without product quantisation,
and clusters are fetched whole, so that only the update differs between strategies.
"""

from torch import Tensor

from kvweave.decode.budget import Allowance
from kvweave.decode.clusters.joining import join, nearest_clusters
from kvweave.decode.clusters.retrieval import ClusterRetriever


class Static(ClusterRetriever):
    """Appends to the nearest cluster, whose centroid and variance follow."""

    def newcomers(self, keys: Tensor, entries: Tensor, allowed: Allowance) -> None:
        """Append one entry per head."""
        for head, (cluster, distance) in enumerate(nearest_clusters(self, keys)):
            join(self, head, cluster, keys[head], entries[head], distance)
