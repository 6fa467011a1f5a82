"""Puts the idle work of a knowledge base together: of its parts, by its settings.

Knows nothing of when it is done.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

from kvweave.config import PredictionConfig
from kvweave.engine.ahead import Ahead
from kvweave.engine.choices import Choices
from kvweave.engine.foresight import Foresight
from kvweave.engine.idle_record import IdleRecord
from kvweave.engine.idle_work import IdleWork
from kvweave.engine.lazy_parts import LazyParts
from kvweave.engine.options import Options
from kvweave.engine.pipeline import Parts
from kvweave.engine.records import Records
from kvweave.engine.repeats import Repeats
from kvweave.engine.terms import Terms
from kvweave.predict.population import extent


@dataclass(frozen=True, slots=True)
class IdleSetup:
    """What idle work is made of: `work` makes that of one run. No model is loaded before a step needs it."""

    records: Records
    parts: LazyParts
    repeats: Repeats
    choices: Choices
    terms: Terms
    idle_record: IdleRecord
    prediction: PredictionConfig

    def work(self, breathe: Callable[[], None]) -> IdleWork:
        """The work of one run, which calls `breathe` between parts that run no model."""
        parts = cache(self.parts.for_request)
        return IdleWork(
            Ahead(parts, replace(self.repeats, outlook=None), self.terms.system, self.choices.decoded_from),
            self._foresight(parts),
            self.records.outlook,
            self.records.store,
            self.idle_record,
            extent(self.repeats.threshold, self.prediction.decode_cutoff),
            breathe,
        )

    def _foresight(self, parts: Callable[[], Parts]) -> Foresight | None:
        """What predicts questions as users are expected to ask them: by the settings alone; None if no answer is kept."""
        recipe = self.choices.recipe()
        chunks = sum(document.chunks for document in self.records.shelf.list())
        expected = self.choices.circumstances(recipe, Options(), min(self.choices.top_k(), chunks))
        if expected is None or not self.records.answers.limit_bytes:
            return None
        return Foresight(
            parts,
            self.records.shelf,
            self.records.answers,
            self.records.outlook,
            recipe,
            expected,
            self.terms.system,
            self.repeats.threshold,
            self.prediction.prediction_stride,
        )
