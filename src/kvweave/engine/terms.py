"""What holds in a knowledge base: what its first documents settled, which the settings must not contradict.

Loads no model; what a loaded one is compared with is for `identity` to say.
"""

from dataclasses import dataclass
from pathlib import Path

from kvweave.config import Config
from kvweave.core import ModelFingerprint
from kvweave.engine.identity import Identity
from kvweave.models.template import DEFAULT_SYSTEM


@dataclass(frozen=True, slots=True)
class Terms:
    """The settings beside what is settled."""

    config: Config
    identity: Identity

    @property
    def system(self) -> str:
        """The instruction that every prompt starts with: settled by the first `add`, since KV is computed behind it.

        Raises KnowledgeBaseMismatch if the settings name another.
        """
        return self._value("system", self.config.system, DEFAULT_SYSTEM)

    @property
    def overlap_tokens(self) -> int:
        """How far chunks overlap; raises as `system`."""
        return int(self._value("overlap_tokens", self.config.chunking.overlap_tokens, 0))

    @property
    def names_settled_model(self) -> bool:
        """Whether no other model is asked for than the one that banked answers come from, as far as names tell."""
        wanted, settled = self.config.model, self.identity.get
        return wanted.model in (None, settled("model_name")) and wanted.dtype in (
            "auto",
            settled("model_dtype"),
        )

    def chunk_tokens(self, default: int) -> int:
        """How long chunks are, by default as given here; raises as `system`."""
        return int(self._value("chunk_tokens", self.config.chunking.chunk_tokens, default))

    def settle(self, model: ModelFingerprint, facts: dict[str, str]) -> None:
        """Write down what this knowledge base is made with, now that documents come in; raises as `Identity.settle`."""
        given = self.config.embedding.embedding_model
        if given is not None:
            folder = Path(given).expanduser()
            facts = {**facts, "embedding_source": str(folder.absolute()) if folder.exists() else given}
        self.identity.settle(model, facts)

    def _value(self, fact: str, given: object, default: object) -> str:
        """What holds of a fact: the value given or else settled, which must not contradict."""
        if given is not None:
            self.identity.check(fact, str(given))
            return str(given)
        return self.identity.get(fact) or str(default)
