"""The exception tree: everything kvweave raises on purpose.

    KvweaveError
    ├── InvalidRequest            an argument that cannot be honoured
    │   ├── PromptTooLong         more tokens than the model's context
    │   └── UnknownRecipe
    ├── DocumentError             something named by the user could not be indexed
    │   ├── PathNotFound
    │   ├── UnreadableDocument    was read, and is no usable text; skipped and reported among good ones
    │   └── InaccessibleDocument  could not be opened or read now; what was indexed of it may still be right
    ├── KnowledgeBaseError
    │   ├── EmptyKnowledgeBase
    │   └── KnowledgeBaseMismatch made with another model, embedding or prompt
    ├── ModelError
    │   ├── ModelNotFound         no such folder or hub id, or no weights in it
    │   └── UnsupportedModel      says which mechanism is missing
    ├── StoreError
    │   ├── StoreTooNew           written by a newer format version
    │   ├── StoreBusy             another process holds the lock for too long
    │   ├── StoreFull             no space left on the disk for the catalogue
    │   ├── EntriesInUse          running requests use what would have to go; caught inside: not stored
    │   ├── DamagedEntry          caught inside: counted as a miss, never used
    │   └── TierUnavailable       a shared tier does not answer; caught inside: computed instead
    ├── EvaluationStopped         a process of an evaluation ended before its time
    └── MissingExtra              names the extra to install

A message says what was wrong, the value, the limit, and what to do.
"""


class KvweaveError(Exception):
    """Base of every error raised on purpose; its text is fit to be shown to a user as it is."""


class InvalidRequest(KvweaveError, ValueError):
    """An argument has a value that cannot be honoured."""


class PromptTooLong(InvalidRequest):
    """The prompt and the requested answer need more tokens than the model's context holds."""


class UnknownRecipe(InvalidRequest):
    """No recipe has this name."""


class DocumentError(KvweaveError):
    """Something the user named could not be indexed."""


class PathNotFound(DocumentError, FileNotFoundError):
    """A path that does not exist."""

    def __str__(self) -> str:
        """The plain message: OSError would print its errno."""
        return " ".join(str(part) for part in self.args)


class UnreadableDocument(DocumentError):
    """A file that was read and is not usable text: binary, damaged, encrypted, empty or of an unknown kind."""


class InaccessibleDocument(DocumentError):
    """A file that could not be opened or read now: no permission, an input error, or it has vanished."""


class KnowledgeBaseError(KvweaveError):
    """A knowledge base cannot serve the request."""


class EmptyKnowledgeBase(KnowledgeBaseError):
    """There is nothing to answer from."""


class KnowledgeBaseMismatch(KnowledgeBaseError):
    """The knowledge base was made with another model, embedding model or system prompt."""


class ModelError(KvweaveError):
    """A model cannot be used."""


class ModelNotFound(ModelError):
    """No such folder or hub id, or a folder without weights or tokenizer."""


class UnsupportedModel(ModelError):
    """The model's attention works in a way the canvas cannot represent; the text names it."""


class StoreError(KvweaveError):
    """The chunk-KV store cannot serve the request."""


class StoreTooNew(StoreError):
    """The store was written by a newer version of the format."""


class StoreBusy(StoreError):
    """Another process kept the catalogue locked for longer than the wait allows."""


class StoreFull(StoreError):
    """No space is left on the disk for the catalogue; what was being written is undone."""


class EntriesInUse(StoreError):
    """Running requests use what would have to go to make room; the new entry is not stored."""


class DamagedEntry(StoreError):
    """A stored entry failed its checks, or the rest of it cannot be had any more; the store turns this into a logged miss."""


class TierUnavailable(StoreError):
    """A place for entries does not answer, refuses or has no room; the store computes instead, and tries again later."""


class EvaluationStopped(KvweaveError):
    """A process that answered prompts beside others ended before its time; what was answered until then is kept."""


class MissingExtra(KvweaveError, ImportError):
    """An optional part is needed and not installed; the text names the extra."""
