"""What a model is asked; for a question to a knowledge base, the chunks that are found for it and the prompt made of them."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field

from kvweave.answer_cache.records import AnswerProvenance, Vector
from kvweave.answering.cached_answers import CachedAnswers, provenance
from kvweave.decode.settings import OffloadSettings
from kvweave.errors import KnowledgeBaseError
from kvweave.index.documents import DocumentTable, row_id
from kvweave.index.search import FoundChunk
from kvweave.index.vector_index import VectorIndex
from kvweave.index.words import shared_words
from kvweave.kvstore.kv_store import KVStore
from kvweave.kvstore.tiers.leases import Lease
from kvweave.models.adapter import Adapter
from kvweave.options import AskOptions
from kvweave.recipes.recipe import Recipe
from kvweave.remote.model import AnyModel
from kvweave.results import Answer, FoundPassage, Source
from kvweave.state.components import RequestContext
from kvweave.types import NO_CONTEXT, Place, Prompt, QuestionContext, TokenizedPrompt


@dataclass(slots=True)
class Asked(ABC):
    """What a model is asked, from the options to the first token. `assemble` makes the prompt and sets what is found on the way.

    Attributes:
        options: of the question.
        recipe: the recipe that they name.
        kv: how KV is offloaded while the answer is decoded; None keeps all of it in memory.
        sources: the chunks in the prompt.
        drafts: token ids that the answer may consist of.
        retrieve_s: seconds of the search.
        without_vector: how many chunks of the knowledge base had no vector at the search.
        judge_s: seconds in which the model judged a stored question, before.
    """

    options: AskOptions
    recipe: Recipe
    kv: OffloadSettings | None
    sources: tuple[Source, ...] = field(default=(), init=False)
    drafts: Sequence[tuple[int, ...]] = field(default=(), init=False)
    retrieve_s: float = field(default=0.0, init=False)
    without_vector: int = field(default=0, init=False)
    judge_s: float = field(default=0.0, init=False)

    @abstractmethod
    def assemble(self, store: KVStore, lease: Lease, most: int) -> TokenizedPrompt:
        """Return the prompt, with room for an answer of `most` tokens; raises PromptTooLong, InvalidRequest, …."""

    def keep(self, answer: Answer) -> None:  # noqa: B027 - a chat keeps none
        """Keep a finished answer where that is worth it; the default keeps none."""


@dataclass(slots=True)
class KBQuestion(Asked):
    """A question to a knowledge base, answered from the chunks that are found for it."""

    context: RequestContext
    cached: CachedAnswers
    question: str
    vector: Callable[[], Vector]
    question_context: QuestionContext = NO_CONTEXT
    origin: AnswerProvenance | None = field(default=None, init=False)

    def assemble(self, store: KVStore, lease: Lease, most: int) -> TokenizedPrompt:
        """Retrieve the chunks, and start loading their KV while the prompt is tokenized; raises KnowledgeBaseError for a lost index."""
        context, options = self.context, self.options
        began = time.perf_counter()
        # Read before the search: a document that comes in later makes the answer old.
        epoch = self.cached.answers.epoch
        self.without_vector = context.documents.without_vector_count()
        found = best_chunks(context.index, context.documents, self.question, self.vector(), options.top_k)
        self.retrieve_s = time.perf_counter() - began
        self.origin = provenance(found, epoch)
        self._prefetch(found, lease)
        prompt, kept = _assemble(context.model, self.question, options, found, most, self.question_context)
        self.sources = sources_of(context.documents, kept)
        self.drafts = self._drafts()
        return prompt

    def keep(self, answer: Answer) -> None:
        """Put the answer into the answer cache, unless the options say otherwise."""
        options = self.options
        if not options.cacheable or not self.cached.accepts(answer):
            return
        cut = answer.finish_reason == "length" and not options.keep_cut
        if self.origin is not None and not cut:
            kept = answer.text, answer.sources, self.origin
            self.cached.keep(self.question, self.vector(), options, *kept, took_s=answer.timing.total_s)

    def _prefetch(self, found: list[FoundChunk], lease: Lease) -> None:
        """Start loading the KV of the found chunks, while the prompt is tokenized."""
        context, recipe, adapter = self.context, self.recipe, self.context.model
        if not recipe.match.position_independent or not isinstance(adapter, Adapter):
            return
        prefix = adapter.template.prefix_ids(self.options.system, think=self.options.generation.think)
        chunks = context.documents.chunks_at([(chunk.source, chunk.position) for chunk in found])
        wanted = [
            (chunk.kv_digest, recipe.prepare.provenances(adapter, prefix, chunk.kv_tokens))
            for chunk in chunks
        ]
        context.store.prefetch(adapter.fingerprint, wanted, lease)

    def _drafts(self) -> list[tuple[int, ...]]:
        """Return token ids that the answer may consist of: those of an earlier answer to a near question."""
        model, options = self.context.model, self.options
        if not isinstance(model, Adapter):
            return []  # a recurrent state cannot take back the drafts that are rejected
        if not options.cacheable or options.cache != "use" or self.kv is not None:
            return []
        nearest = self.cached.answers.nearest(self.vector(), options, self.cached.threshold)
        if nearest is None:
            return []
        # The cache has stripped the space that a reply may begin with.
        return [model.template.tokenize(each) for each in (nearest.text, f" {nearest.text}")]


def sources_of(documents: DocumentTable, found: Sequence[FoundChunk]) -> tuple[Source, ...]:
    """Return found chunks as sources, with the places where people find them."""
    places = documents.places([(chunk.source, chunk.position) for chunk in found])
    return tuple(
        Source(
            chunk.source,
            chunk.start,
            chunk.end,
            chunk.text,
            chunk.score,
            place.page,
            place.heading,
            place.line,
        )
        for chunk in found
        for place in [places.get((chunk.source, chunk.position), Place())]
    )


def explained(
    question: str, found: Sequence[FoundChunk], sources: Sequence[Source]
) -> tuple[FoundPassage, ...]:
    """Return found chunks, whose sources are given in the same order, with the reason why each was found."""
    return tuple(
        FoundPassage(source=source, words=shared_words(question, each.text), **asdict(each.reason))
        for source, each in zip(sources, found, strict=True)
    )


def best_chunks(
    index: VectorIndex, documents: DocumentTable, question: str, vector: Vector, top_k: int
) -> list[FoundChunk]:
    """Return the best chunks for a question, best first; raises KnowledgeBaseError for a lost or damaged index."""
    top_k = min(top_k, documents.chunk_count())
    began_s = time.time()
    found = index.search(question, vector, top_k, documents.visible_versions())
    rows = {row_id(chunk.version, chunk.position): chunk for chunk in found}
    damaged = documents.damaged_texts({row: chunk.text for row, chunk in rows.items()})
    if damaged:
        # The next `add` then writes them again.
        index.delete({rows[row].version for row in damaged}, before_s=began_s)
        raise KnowledgeBaseError(
            f"the index holds another text of {rows[damaged[0]].source} than was added: a file of it is damaged; run `kvweave add` "
            "on that document again"
        )
    if not found:
        raise KnowledgeBaseError(
            "the index holds none of the listed documents; run `kvweave add` on them again"
        )
    return found


def prompt_for(context: RequestContext, question: str, top_k: int, system: str) -> Prompt:
    """Return the prompt that a question would be answered from, without computing it; raises as `best_chunks` does."""
    found = best_chunks(
        context.index, context.documents, question, context.encoder.encode([question])[0], top_k
    )
    chunks = tuple(chunk.text for chunk in reading_order(found))
    return Prompt(question, chunks, system)


def tokenized_prompt_for(
    context: RequestContext, question: str, vector: Vector, options: AskOptions
) -> TokenizedPrompt:
    """Return the tokens that a question would be answered from, without computing them; raises as `best_chunks` does."""
    found = best_chunks(context.index, context.documents, question, vector, options.top_k)
    most = options.max_new_tokens(context.model.geometry.context_tokens)
    return _assemble(context.model, question, options, found, most)[0]


def _assemble(
    model: AnyModel,
    question: str,
    options: AskOptions,
    found: list[FoundChunk],
    most: int,
    question_context: QuestionContext = NO_CONTEXT,
) -> tuple[TokenizedPrompt, list[FoundChunk]]:
    """Return the tokenized prompt and the chunks in it, in prompt order; `most` tokens stay free for the answer."""
    while True:
        ordered = reading_order(found)
        texts = tuple(f.text for f in ordered)
        prompt = model.template.render(
            Prompt(
                question,
                texts,
                options.system,
                think=options.generation.think,
                earlier=question_context.earlier,
                instruction=question_context.instruction,
            )
        )
        too_long = prompt.tokens + most > model.geometry.context_tokens
        if not (too_long and options.drop_chunks and found):
            model.check_length(prompt.tokens, most)
            return prompt, ordered
        found = found[:-1]


def reading_order(found: list[FoundChunk]) -> list[FoundChunk]:
    """Order documents by their best chunk's rank, and the chunks of a document as they follow each other in it.

    A sentence may only make sense after the one before the cut.
    """
    ranks: dict[str, int] = {}
    for rank, chunk in enumerate(found):
        ranks.setdefault(chunk.source, rank)
    return sorted(found, key=lambda chunk: (ranks[chunk.source], chunk.position))
