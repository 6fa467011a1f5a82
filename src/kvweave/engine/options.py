"""What may be named with one question."""

from dataclasses import dataclass

from kvweave.core import BankUse


@dataclass(frozen=True, slots=True)
class Options:
    """As `KnowledgeBase.stream` describes it; None leaves it to the settings."""

    recipe: str | None = None
    prepare: str | None = None
    ratio: float | None = None
    coverage: float | None = None
    top_k: int | None = None
    drop_chunks: bool = False
    bank: BankUse = "serve"
