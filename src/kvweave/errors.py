"""The exceptions that kvweave raises on purpose. A message names what was wrong, the value, the limit, and what to do."""


class KvweaveError(Exception):
    """Base of all errors raised on purpose; the message can be shown to users unchanged."""


class InvalidRequest(KvweaveError, ValueError):
    """An argument that cannot be honoured."""


class PromptTooLong(InvalidRequest):
    """The prompt and the requested answer need more tokens than the model's context."""


class UnknownRecipe(InvalidRequest):
    """No recipe has this name."""


class DocumentError(KvweaveError):
    """Something that the user named could not be indexed."""


class PathNotFound(DocumentError, FileNotFoundError):
    """A path that does not exist."""

    def __str__(self) -> str:
        """Return the message alone: OSError would add its errno."""
        return " ".join(str(part) for part in self.args)


class UnreadableDocument(DocumentError):
    """A file that was read but is no usable text: binary, damaged, encrypted, empty or of an unknown kind."""


class InaccessibleDocument(DocumentError):
    """A file that cannot be opened or read now: no permission, an input error, or it no longer exists."""


class KnowledgeBaseError(KvweaveError):
    """A knowledge base cannot serve the request."""


class EmptyKnowledgeBase(KnowledgeBaseError):
    """The knowledge base holds no documents."""


class KnowledgeBaseNotFound(KnowledgeBaseError):
    """There is no knowledge base of this name."""


class KnowledgeBaseMismatch(KnowledgeBaseError):
    """The knowledge base was made with another model, embedding model or system prompt."""


class ModelError(KvweaveError):
    """A model cannot be used."""


class ModelNotFound(ModelError):
    """No such folder or hub id, or a folder without weights or tokenizer."""


class NotEnoughMemory(ModelError):
    """The weights do not fit into memory; the message names the bits that would."""


class UnsupportedModel(ModelError):
    """The model's attention has a mechanism that the fused cache cannot represent; the message names it."""


class StoreError(KvweaveError):
    """The chunk-KV store cannot serve the request."""


class StoreTooNew(StoreError):
    """The store was written by a newer version of the format."""


class StoreBusy(StoreError):
    """Another process held the catalogue's lock for longer than this one waits."""


class StoreFull(StoreError):
    """No space is left on the disk for the catalogue; the change is rolled back."""


class StoreReadOnly(StoreError):
    """The folder can be read but not written to: questions are answered from it, and nothing is changed."""


class EntriesInUse(StoreError):
    """Running requests use all that could be evicted; the new entry is not stored."""


class DamagedEntry(StoreError):
    """A stored entry failed its checks, or the rest of it cannot be loaded; the store counts and logs this as a miss."""


class TierUnavailable(StoreError):
    """A tier does not respond, refuses or is full; the KV is computed instead, and the store retries later."""


class ServerError(KvweaveError):
    """A running server cannot be used by a command."""


class ServerUnavailable(ServerError):
    """The server cannot be reached, or ended before its reply did."""


class ServerBusy(ServerError):
    """The server has no room for the request, for longer than the command waits."""


class ServerRefused(ServerError):
    """The server does not honour the request; the message is the server's own, `status` that of the HTTP reply."""

    def __init__(self, message: str, *, status: int) -> None:
        super().__init__(message)
        self.status = status


class EngineError(KvweaveError):
    """The vLLM server that the setting `engine` names does not do what it is asked."""


class EngineUnavailable(EngineError):
    """The vLLM server cannot be reached, has no room, or ended before its reply did."""


class EngineRefused(InvalidRequest):
    """The vLLM server refuses a request as invalid; the message is its own, `field` the field that it names."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class Unauthorized(KvweaveError):
    """A request came without an API key that the server knows."""


class Cancelled(KvweaveError):
    """A request was given up: its caller has left, or the server is closing."""


class MissingExtra(KvweaveError, ImportError):
    """An optional dependency is needed and not installed; the message names the extra."""


def is_of_library(error: BaseException) -> bool:
    """Return whether a library may have raised this for a damaged file: any Exception, and the panics of libraries in Rust."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def one_line(error: BaseException) -> str:
    """Return the message of a library's error on one line of at most 300 characters; its kind if it has none."""
    return " ".join(str(error).split())[:300] or type(error).__name__
