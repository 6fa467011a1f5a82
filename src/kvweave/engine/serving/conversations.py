"""Conversations of a knowledge base in a server: each turn resumes the conversation and stores it again.

Between two turns nothing of it is in memory, and no lock is held. So `kvweave chat` goes on where the server left it, and the
other way round.
"""

from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from typing import cast

from kvweave.cancellation import cancellable, check_cancelled
from kvweave.engine.serving.serving import Tenant


def turn(
    tenant: Tenant, kb: str, name: str, question: str, top_k: int | None, given_up: Callable[[], bool]
) -> Iterator[str]:
    """Yield the answer to the next turn of a conversation; it is stored before the iterator ends.

    A turn that is given up, or whose iterator is closed, does not count.

    Raises:
        Cancelled: `given_up` returned True.
        KnowledgeBaseNotFound, EmptyKnowledgeBase, InvalidRequest, PromptTooLong, StoreError: as `KnowledgeBase.send`.
    """
    with tenant.bases.using(kb) as base:
        deleted = tenant.bases.closing(kb)

        def stopped() -> bool:
            return given_up() or deleted()

        # Not held while the caller has a piece: what cancels belongs to the thread, which may serve another request then.
        with cancellable(stopped):
            conversation = base.conversation(name)
        sending = cast("Generator[str, None, None]", base.send(conversation, question, top_k=top_k))
        with conversation, closing(sending) as pieces:
            while True:
                with cancellable(stopped):
                    check_cancelled()
                    piece = next(pieces, None)
                if piece is None:
                    return
                yield piece


def start_over(tenant: Tenant, kb: str, name: str) -> None:
    """Empty a conversation; raises KnowledgeBaseNotFound, and InvalidRequest while a process has it open."""
    with tenant.bases.using(kb) as base, base.conversation(name, new=True):
        pass
