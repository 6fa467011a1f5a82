"""Opens the shared tier at an address."""

from urllib.parse import urlsplit

from kvweave.errors import InvalidRequest
from kvweave.kvstore.tiers.object_store import ObjectTier
from kvweave.kvstore.tiers.redis import SCHEMES, RedisTier
from kvweave.kvstore.tiers.tier import RemoteTier


def open_remote_tier(url: str, namespace: str) -> RemoteTier:
    """Return the tier at an address, for one namespace; sends no request yet.

    Args:
        url: see `RedisTier` and `ObjectTier`.
        namespace: entries of other namespaces are never seen.

    Raises:
        MissingExtra: the client for this kind of server is not installed.
        InvalidRequest: no such kind of address.
    """
    scheme = urlsplit(url).scheme
    if not scheme:
        raise InvalidRequest(
            f"{url!r} is no address of a shared tier; write for example redis://host:6379/0 or s3://bucket/prefix"
        )
    return RedisTier(url, namespace) if scheme in SCHEMES else ObjectTier(url, namespace)
