"""Predicts questions with the model: runs the jobs that `background/planning` chooses, screens the replies and stores the rest.

Predicted questions are queued in the answer cache; `jobs` computes their KV and answers.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from kvweave.answer_cache.cache import AnswerCache
from kvweave.answer_cache.evidence import (
    ASKING,
    NEAR_DUPLICATE_COSINE,
    is_answerable,
    is_invented,
    is_near_duplicate,
    is_other_language,
    is_unclear,
    names_answer,
    parse_questions,
    repeats,
    unknown_words,
)
from kvweave.answer_cache.guard import base
from kvweave.answer_cache.predictions import (
    ChunkRef,
    DropReason,
    PredictionOrigin,
    PredictionStore,
    SummaryPart,
)
from kvweave.answer_cache.records import Vector
from kvweave.answering.pipeline import reply_to
from kvweave.background.planning import Job, PredictFromDocuments, PredictFromHistory, Summarise, next_job
from kvweave.background.prompts import PromptSet, Request, prompts_for
from kvweave.background.source_passages import Asked, answers_in, nearest_first, shared_words
from kvweave.config import DEFAULT_NEW_TOKENS, GenerationConfig
from kvweave.index.documents import DocumentTable, version_of
from kvweave.kvstore.memory_store import MemoryStore
from kvweave.models.prompt import SEPARATOR, PromptTemplate
from kvweave.options import AskOptions, within_context
from kvweave.recipes.methods import recipe_named
from kvweave.recipes.names import EXACT
from kvweave.recipes.recipe import Recipe
from kvweave.state.components import RequestContext
from kvweave.text import clean_text
from kvweave.types import Message, Prompt, ReplyFormat, Span, TokenizedPrompt

BATCH_SHARE: Final = 4
"""A batch of chunks takes at most this fraction (1/4) of the model's context, and so do the summary's parts in a prompt."""

_TEMPERATURE, _TOP_P = 0.8, 0.9  # of all draws from the same notes but the first


def generation_for(draw: int) -> GenerationConfig:
    """Return how a reply is decoded: the first draw greedily, others sampled with their number as seed."""
    if draw == 0:
        return GenerationConfig()
    return GenerationConfig(temperature=_TEMPERATURE, top_p=_TOP_P, seed=draw)


def request_prompt(
    template: PromptTemplate, notes: Sequence[str], request: Request, system: str
) -> TokenizedPrompt:
    """Return the tokens of a request about notes; `system` is the knowledge base's own instruction."""
    before = system if request.system is None else request.system
    if request.plain:
        # The worked examples are one span, the same before all notes; the space after them belongs to the notes' first token.
        shown = before.rstrip(" ")
        text = f"{before[len(shown) :]}{' '.join(notes)}{request.text}"
        head, rest = template.text_ids(shown), template.tokenize(text)
        end = len(head) + len(rest)
        spans = (
            Span("system", 0, 0),
            Span("chunk", 0, len(head), 0),
            Span("question", len(head), end),
        )
        return TokenizedPrompt((*head, *rest), spans, (len(head), end), ReplyFormat(one_line=True))
    if (
        request.system is not None
    ):  # notes and request in one message: what stands before a question is for questions
        said = SEPARATOR.join((*notes, request.text))
        turns = [Message("system", request.system)]
        if request.example is not None:
            turns += map(Message, ("user", "assistant"), request.example)
        ids, form = template.render_chat([*turns, Message("user", said)])
        whole = Span("system", 0, 0), Span("question", 0, len(ids))
        return TokenizedPrompt(ids, whole, (0, len(ids)), form)
    return template.render(Prompt(request.text, tuple(notes), before, several_lines=True))


@dataclass(frozen=True, slots=True)
class Candidate:
    """A predicted question with its vector; `dropped` says why it is not worth an answer, None if it is.

    `answer` are the words that the model was to ask for; empty if it chose.
    """

    question: str
    vector: Vector
    dropped: DropReason | None
    answer: str


@dataclass(eq=False)
class QuestionPredictor:
    """Predicts questions as users are expected to ask them under `options`, from what `predictions` holds.

    Attributes:
        context: loads the parts of a request when first called.
        recipe: how stored chunk KV is reused when the model reads chunks, as for requests.
        system: the instruction that prompts start with.
        threshold: τ.
        stride: how many questions are predicted at a time (PerCache §4.1.2).
        examples: the KV of worked examples, which stand before all notes.
    """

    context: Callable[[], RequestContext]
    documents: DocumentTable
    answers: AnswerCache
    predictions: PredictionStore
    recipe: Recipe
    options: AskOptions
    system: str
    threshold: float
    stride: int
    examples: MemoryStore = field(default_factory=MemoryStore)

    def next_job(self) -> Job | None:
        """Return the next job, or None, for which no model is loaded."""
        return next_job(
            self.predictions,
            self._listed(),
            lambda: min(self.prompts.batch_tokens, self._most_tokens),
            lambda: self.prompts.earlier_questions,
        )

    def chunks_to_summarise(self) -> int:
        """Return how many chunks the corpus summary lacks."""
        return len(self.predictions.summary.missing(self._listed()))

    def do(self, job: Job) -> None:
        """Run a job; it stores nothing before its end."""
        if isinstance(job, Summarise):
            self._summarise(job)
        elif isinstance(job, PredictFromDocuments):
            self._predict_from_documents(job)
        else:
            self._predict_from_history(job)

    # The three jobs

    def _summarise(self, job: Summarise) -> None:
        texts = self.context().index.texts([chunk.name for chunk in job.chunks])
        notes = [texts[chunk.name] for chunk in job.chunks if chunk.name in texts]
        request, dropped = self.prompts.summarise(), None
        summary = "\n\n".join(
            notes
        )  # without one that can be trusted, questions are predicted from the chunks themselves
        if notes and request is not None:
            reply = self.reply(notes, request, draw=0)
            dropped = _summary_fault(reply, notes) if reply else None
            summary = summary if dropped else reply
        with self.answers.transaction():
            if {chunk.version for chunk in job.chunks} <= self.documents.visible_versions():
                self.predictions.summary.put(job.chunks, summary)
                if dropped:
                    self.predictions.summary.record_drop(dropped)

    def _predict_from_documents(self, job: PredictFromDocuments) -> None:
        def done() -> bool:
            return self.predictions.summary.record_round(job.part.id)

        draws = range(job.part.rounds * self._draws, (job.part.rounds + 1) * self._draws)
        if self._asks_for_answers:
            asked = answers_in(job.part.text)[draws.start : draws.stop]
            self._store(self._replies_to(asked), "knowledge", [job.part], done)
            return
        parts = self._that_fit([job.part, *job.others])
        notes, prompts = [part.text for part in parts], self.prompts
        requests = [prompts.predict_from_documents(self._per_reply, draw) for draw in draws]
        replies = [
            (self.reply(notes, request, draw), "") for request, draw in zip(requests, draws, strict=True)
        ]
        self._store(replies, "knowledge", parts, done)

    def _predict_from_history(self, job: PredictFromHistory) -> None:
        def seen() -> bool:
            self.predictions.history.mark_seen(job.number)
            return True

        if self._asks_for_answers:
            part = max(job.parts, key=lambda each: shared_words(each.text, job.earlier))
            asked = answers_in(part.text)[part.rounds * self._draws :]
            nearest = nearest_first(asked, job.earlier)[: self._draws]
            self._store(self._replies_to(nearest), "history", [part], seen)
            return
        request = self.prompts.predict_from_history(job.earlier, self._per_reply)
        replies: list[tuple[str, str]] = []
        used: dict[SummaryPart, None] = {}
        others = list(job.parts)
        if self._draws == 1:
            others.sort(key=lambda each: -shared_words(each.text, job.earlier))
        for draw in range(self._draws):
            start = draw % len(others)
            # A model that reads one part at a time gets another one for every draw.
            parts = self._that_fit([*others[start:], *others[:start]])
            used |= dict.fromkeys(parts)
            replies.append((self.reply([part.text for part in parts], request, draw), ""))
        self._store(replies, "history", list(used), seen)

    # Asking the model

    @property
    def prompts(self) -> PromptSet:
        """The requests that the model understands; loads it."""
        adapter = self.context().preparing_model
        return prompts_for(adapter.fingerprint.name, chat=adapter.template.is_chat)

    @property
    def _asks_for_answers(self) -> bool:
        """Whether the prompt names the thing to ask for, because the model does not choose well."""
        return self.prompts.ask_for("", "") is not None

    def _replies_to(self, asked: Sequence[Asked]) -> list[tuple[str, str]]:
        """Return the model's questions to answers in passages, each with the answer."""
        requests = [(each, self.prompts.ask_for(each.answer, each.opening)) for each in asked]
        return [
            (self.reply([each.passage], request, 0), each.answer)
            for each, request in requests
            if request is not None
        ]

    @property
    def _per_reply(self) -> int:
        return min(self.stride, self.prompts.questions_per_reply)

    @property
    def _draws(self) -> int:
        return math.ceil(self.stride / self.prompts.questions_per_reply)

    @property
    def _most_tokens(self) -> int:
        return self.context().preparing_model.geometry.context_tokens // BATCH_SHARE

    def _listed(self) -> list[ChunkRef]:
        rows = self.documents.all_chunks()
        return [ChunkRef(row.row_id, version_of(row.row_id), row.kv_tokens) for row in rows]

    def _that_fit(self, parts: Sequence[SummaryPart]) -> list[SummaryPart]:
        """Return as many of the first parts as fit in front of a request, one at least."""
        template, taken, tokens = self.context().preparing_model.template, list(parts[:1]), 0
        for part in parts:
            tokens += len(template.chunk_ids(part.text))
            if part not in taken:
                if tokens > self._most_tokens:
                    break
                taken.append(part)
        return taken[: self.prompts.max_parts]

    def reply(self, notes: Sequence[str], request: Request, draw: int) -> str:
        """Return the model's reply to a request about notes. It depends on nothing else, so a caller may memoize it."""
        context = self.context()
        adapter = context.preparing_model
        prompt = request_prompt(adapter.template, notes, request, self.system)
        limit = adapter.geometry.context_tokens
        if request.example is not None and prompt.tokens >= limit:
            prompt = request_prompt(adapter.template, notes, replace(request, example=None), self.system)
        most = within_context(request.max_tokens, DEFAULT_NEW_TOKENS, limit)
        most = min(most, limit - prompt.tokens)
        if most < 1:
            return ""
        how = generation_for(draw), most
        if request.system is not None:  # no stored chunk fits what it reads
            exact = recipe_named(EXACT)
            decoded = reply_to(adapter, self.examples, exact, prompt, *how, keep=request.plain)
        else:
            decoded = reply_to(adapter, context.store, self.recipe, prompt, *how)
        return f"{request.lead} {decoded.text.strip()}".strip()

    # Storing what is new

    def _store(
        self,
        replies: Iterable[tuple[str, str]],
        origin: PredictionOrigin,
        parts: Sequence[SummaryPart],
        done: Callable[[], bool],
    ) -> None:
        """Store the new questions of replies, each with the answer that it was to ask for, empty if the model chose.

        `done`, in the same commit, returns whether the job still counts.
        """
        new: list[Candidate] = []
        for text, answer in replies:
            for question in map(clean_text, parse_questions(text, self._per_reply)):
                candidate = self._candidate(question, answer, new)
                if candidate is not None:
                    new.append(candidate)
        versions = frozenset(version for part in parts for version in part.versions)
        with self.answers.transaction():
            if not versions <= self.documents.visible_versions() or not done():
                return
            for each in new:
                if each.dropped is not None:
                    self.predictions.predicted.add(each.question, origin, versions, each.dropped)
            for each in [each for each in new if each.dropped is None][: self.stride]:
                self.predictions.predicted.add(each.question, origin, versions, answer=each.answer)
                self.answers.add_predicted(each.question, each.vector, self.options)

    def _candidate(self, question: str, answer: str, others: Sequence[Candidate]) -> Candidate | None:
        """Return a predicted question unless it is known, nearly known, or depends on the date."""
        if self.predictions.predicted.contains(question) or self.answers.matcher.is_time_sensitive(question):
            return None
        context = self.context()
        vector = context.encoder.encode([question])[0]
        near = self.answers.similar(vector, self.options, min(self.threshold, NEAR_DUPLICATE_COSINE))
        near += [(other.question, float(vector @ other.vector)) for other in others]
        if any(self._is_same(question, other, cosine) for other, cosine in near):
            return None
        found = context.index.search(question, vector, self.options.top_k, self.documents.visible_versions())
        dropped = self.fault(question, vector, [chunk.text for chunk in found])
        if dropped is None and names_answer(question, answer):
            dropped = "names its answer"
        return Candidate(question, vector, dropped, answer)

    def fault(self, question: str, vector: Vector, chunks: Sequence[str]) -> DropReason | None:
        """Return the reason not to answer a question, judged by the chunks found for it, or None if it is worth an answer."""
        if repeats(question):
            return "repetition"
        if is_unclear(question):
            return "unclear"
        if is_other_language(question, chunks):
            return "other language"
        if not is_answerable(question, chunks):
            return "unanswerable"
        unknown = unknown_words(question, chunks)
        if not all(base(word) in ASKING or self._is_indexed(word, vector) for word in unknown):
            return "unknown words"
        return None

    def _is_indexed(self, word: str, vector: Vector) -> bool:
        """Return whether any chunk has a word, also with another ending."""
        found = self.context().index.search(word, vector, 3, self.documents.visible_versions())
        return any(chunk.reason.word_rank is not None for chunk in found)

    def _is_same(self, question: str, other: str, cosine: float) -> bool:
        if question == other or is_near_duplicate(question, other, cosine):
            return True
        # What only a model could tell apart counts as the same: that costs no more than a prediction.
        return self.answers.matcher.compare(question, other, cosine, self.threshold).sameness != "different"


def _summary_fault(summary: str, chunks: Sequence[str]) -> DropReason | None:
    """Return the reason not to predict questions from a summary, or None if it is fit for that."""
    if repeats(summary):
        return "repetition"
    if is_other_language(summary, chunks):
        return "other language"
    return "unknown words" if is_invented(summary, chunks) else None
