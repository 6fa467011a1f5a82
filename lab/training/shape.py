"""How the rows of a training stage look, and the documents that they are made of."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shape:
    """How rows of a stage look.

    Attributes:
        context: tokens of the context part, padded to it.
        questions: tokens of the question part.
        chunks: fewest and most chunks of a document.
        chunk_tokens: smallest and largest size of a document's chunks.
        sparse: share of documents that are mostly haystack.
        easy: share of documents whose names are everyday words.
        spliced: share of documents whose values are invented words, of several tokens as a rule.
        stopping: weight of the token that ends an answer, beside 1 of the others.
        reworded: share of documents with sentences that no template foresees.
        stepwise: how much more often than usual tasks of several steps are written.
        varied: share of documents most of whose sentences are none of the train split's own.
        garbled: share of the sentences of varied documents that have lost many of their words.
        joined: share of documents whose values are tokens put together, whatever they are elsewhere.
        alike: share of documents whose names end alike.
        owned: whether hints say of a thing, too, whose it is.
    """

    context: int
    questions: int
    chunks: tuple[int, int]
    chunk_tokens: tuple[int, int]
    sparse: float
    easy: float = 0.0
    spliced: float = 0.0
    stopping: float = 0.3
    reworded: float = 0.0
    stepwise: float = 1.0
    varied: float = 0.0
    garbled: float = 0.0
    joined: float = 0.0
    alike: float = 0.0
    owned: bool = False
