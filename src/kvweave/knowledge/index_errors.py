"""LanceDB's failures as ours: it raises plain RuntimeErrors, ValueErrors and OSErrors that say little to a person."""

from collections.abc import Iterator
from contextlib import contextmanager

from kvweave.errors import StoreError


@contextmanager
def told_as_store_errors() -> Iterator[None]:
    """Turn what LanceDB raises into a StoreError that says what to do."""
    try:
        yield
    except (RuntimeError, ValueError, OSError) as error:
        why = (str(error).splitlines() or [type(error).__name__])[0]
        raise StoreError(
            f"the index of chunks cannot be used: {why[:200]}. Another process may have emptied it just now: try again; "
            "else delete the folder `vectors` of this knowledge base and add the documents again"
        ) from error
