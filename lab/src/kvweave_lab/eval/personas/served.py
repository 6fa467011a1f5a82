"""What one user's session under one system leaves: an account of every question and of the idle time around it."""

from dataclasses import dataclass

from kvweave_lab.eval.personas.passes import Pass


@dataclass(frozen=True, slots=True)
class Served:
    """One question and its answer.

    Attributes:
        question: as it was asked.
        answer: what the user got.
        rouge_l: of the answer, 0..1.
        exact_match: 1 if the answer is a reference, 0 if not.
        took: the pass that the answer took; None where the bank gave it.
        banked: the question whose answer the bank gave; None where it gave none.
        similarity: the cosine of both; 0 without.
        foreseen: whether it had been predicted, and nobody had asked it before.
        context: tokens of the chunks that were retrieved.
        found: of these, tokens with stored KV.
        found_ahead: of these, tokens whose KV a predicted question had left.
        bleu: of the answer, 0..1; None where sacrebleu is not installed.
    """

    question: str
    answer: str
    rouge_l: float
    exact_match: float
    took: Pass | None
    cache_hit: str | None = None
    similarity: float = 0.0
    foreseen: bool = False
    context: int = 0
    found: int = 0
    found_ahead: int = 0
    bleu: float | None = None

    @property
    def other_words(self) -> bool:
        """Whether the bank gave the answer to a question in other words than its own."""
        return self.cache_hit is not None and self.cache_hit != self.question


@dataclass(frozen=True, slots=True)
class IdleSpell:
    """Idle time before a question, or after the last: steps by kind, and operations on the shape that prices are for."""

    steps: dict[str, int]
    flops: float


@dataclass(frozen=True, slots=True)
class Held:
    """What lies stored at the end: questions with their bytes, and tokens whose KV is there."""

    questions: int
    answered: int
    answer_bytes: int
    kv_tokens: int
    predicted: int


@dataclass(frozen=True, slots=True)
class Session:
    """A trial's session with one user; `trial` and `user` name them."""

    trial: str
    user: str
    served: tuple[Served, ...]
    idle: tuple[IdleSpell, ...]
    held: Held
    took_s: float = 0.0

    @property
    def key(self) -> tuple[str, str]:
        """What names it in a journal."""
        return self.trial, self.user
