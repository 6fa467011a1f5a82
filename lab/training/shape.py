"""The shape of a training stage's rows and documents."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of rows and of the documents in them.

    Attributes:
        context: tokens of the padded context part.
        questions: tokens of the question part.
        chunks: minimal and maximal number of chunks of a document.
        chunk_tokens: minimal and maximal size of a document's chunks.
        sparse: share of documents that are mostly haystack.
        easy: share of documents whose names are everyday words.
        spliced: share of documents whose values are invented words, usually of several tokens.
        stopping: weight of the token that ends an answer; other answer tokens have 1.
        reworded: share of documents with sentences that differ from all templates.
        stepwise: factor on the frequency of tasks of several steps.
        varied: share of documents that mostly use further sentences.
        garbled: share of the sentences of varied documents in which many words are replaced.
        joined: share of documents whose values are composed of arbitrary tokens.
        alike: share of documents whose names share endings.
        owned: whether hints also name a thing's owner.
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
