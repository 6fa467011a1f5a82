"""The model as all systems use it: each distinct prompt is computed once, however many systems ask for it.

Exact reuse does not change an answer. So all systems that reuse only exact KV get full attention's answer, computed once,
together with the KV that their own pass would have stored. With stale KV in a prompt, the answer is computed once for
this prompt with this KV. Knows neither questions nor systems.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Self, TypeAlias

from kvweave.answering.generation import Decoded, generate
from kvweave.answering.speculative import PromptLookupDrafter
from kvweave.background.prediction import generation_for, request_prompt
from kvweave.background.prompts import Request
from kvweave.config import GenerationConfig
from kvweave.kvstore.kv_store import KVStore
from kvweave.kvstore.memory_store import MemoryStore
from kvweave.models.adapter import Adapter
from kvweave.recipes.context import StoreEntry
from kvweave.recipes.methods import recipe_named
from kvweave.recipes.recipe import Recipe, remember, run
from kvweave.recipes.request import Matched, PrefillRequest, PrefillResult
from kvweave.types import KVProvenance, TokenizedPrompt
from kvweave_lab.eval.personas.wording import LIMIT_TOKENS, LongReplies

_PREFIX: Final = recipe_named("prefix")
_GREEDY: Final = generation_for(0)
_ANSWER_TOKENS: Final = 32
"""Limit of an answer; generated users ask for a few words."""
_REQUEST_TOKENS: Final = 96
"""Limit of summaries and predicted questions."""


@dataclass(frozen=True, slots=True)
class ModelPass:
    """Token counts of one prompt and the reply to it, which costs are computed from.

    Attributes:
        prompt: tokens of the prompt.
        exact: prompt tokens whose stored KV equals what would be computed.
        stale: prompt tokens whose stored KV was computed after other text.
        recomputed: stale tokens that were computed again.
        selection_rows: rows that were run over stale KV to select these.
        decoded: tokens of the reply.
        accepted_draft_tokens: decoded tokens that prompt lookup drafted.
        draft_passes: rows of each pass that verified a draft, including the reply's last token before it.
        stored_spans: tokens of each span with stored KV, in order.
    """

    prompt: int
    exact: int = 0
    stale: int = 0
    recomputed: int = 0
    selection_rows: int = 0
    decoded: int = 0
    accepted_draft_tokens: int = 0
    draft_passes: tuple[int, ...] = ()
    stored_spans: tuple[int, ...] = ()

    @classmethod
    def parse(cls, content: Mapping[str, Any]) -> Self:
        """Return a pass from its JSON values."""
        values: dict[str, Any] = dict(content)
        values |= {name: tuple(values[name]) for name in ("draft_passes", "stored_spans")}
        return cls(**values)

    @property
    def rows(self) -> int:
        """Rows that ordinary reuse computes."""
        return self.prompt - self.exact - self.stale + self.recomputed

    @property
    def reused(self) -> int:
        """Tokens that ordinary reuse does not compute."""
        return self.exact + self.stale - self.recomputed

    @property
    def keys(self) -> int:
        """Sum over the computed rows of the keys that each attends to, in one layer.

        Exact tokens come first, then stale ones, then fresh ones. Recomputed tokens are assumed to be spread evenly.
        """
        fresh = self.prompt - self.exact - self.stale
        of_fresh = fresh * (self.prompt - fresh) + _sum_to(fresh)
        return of_fresh + round(self.recomputed * (self.exact + (self.stale + 1) / 2))

    @property
    def selection_keys(self) -> int:
        """The same sum over the selection rows, which are at the end of the prompt."""
        return self.selection_rows * (self.prompt - self.selection_rows) + _sum_to(self.selection_rows)

    @property
    def decoded_keys(self) -> int:
        """The same sum over the rows after the prompt: single decoding steps, and passes that verify drafts.

        Drafts are assumed to be at the beginning of the reply.
        """
        of_steps = self.steps * (self.prompt + self.draft_pass_tokens) + _sum_to(self.steps)
        return of_steps + sum(rows * self.prompt + _sum_to(rows) for rows in self.draft_passes)

    @property
    def steps(self) -> int:
        """Tokens decoded singly: neither drafted nor part of a draft's pass, without the reply's last token."""
        return max(0, self.decoded - 1 - self.draft_pass_tokens)

    @property
    def draft_pass_tokens(self) -> int:
        """Reply tokens from passes that verify drafts: the accepted ones, and the one before them in each pass."""
        return self.accepted_draft_tokens + len(self.draft_passes)


def _sum_to(count: int) -> int:
    return count * (count + 1) // 2


TextPath: TypeAlias = tuple[int, ...]
"""The token ids up to a chunk's end; they identify KV computed after exactly this text."""


@dataclass(frozen=True, slots=True)
class Reply:
    """A reply and its cost.

    Attributes:
        text: of the reply.
        model_pass: its token counts.
        context: tokens of the retrieved chunks.
        found: context tokens with stored KV.
        exact_chunks: paths and tokens of the chunks whose exact KV was found.
        stored_paths: paths of the chunks whose exact KV was stored.
    """

    text: str
    model_pass: ModelPass
    context: int = 0
    found: int = 0
    exact_chunks: tuple[tuple[TextPath, int], ...] = ()
    stored_paths: tuple[TextPath, ...] = ()


@dataclass(frozen=True, slots=True)
class _StaleResult:
    text: str
    ids: tuple[int, ...]
    recomputed: int
    new_entries: tuple[StoreEntry, ...]


class MemoizedModel:
    """Answers the prompts of all systems over one user's documents, each distinct prompt once.

    Args:
        adapter: the model.

    Attributes:
        long_replies: makes long replies of the model's answers.
    """

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter
        self.long_replies = LongReplies(adapter.template.tokenize, adapter.tokenizer.decode)
        self._exact_kv = MemoryStore()  # of every path that was computed
        self._answers: dict[tuple[int, ...], tuple[str, tuple[int, ...]]] = {}
        self._stale: dict[tuple[str, tuple[int, ...], tuple[KVProvenance | None, ...]], _StaleResult] = {}
        self._replies: dict[tuple[tuple[str, ...], Request, int], Reply] = {}

    def answer(
        self,
        recipe: Recipe,
        store: KVStore,
        prompt: TokenizedPrompt,
        *,
        store_kv: bool,
        looks_up: bool = False,
        long: bool = False,
    ) -> Reply:
        """Answer a prompt with a recipe over a store; with `store_kv`, store the KV that the recipe stores.

        With `looks_up`, drafts from the prompt are counted; they do not change the reply. With `long`, the reply is a long
        one that begins with the answer.
        """
        request = PrefillRequest(self.adapter, store, prompt, recipe.budget(None, None))
        matched = recipe.match.find(request, recipe.prepare)
        if any(each.origin == "reused" for each in matched):
            reply, ids = self._answer_over_stale(recipe, request, matched, store_kv)
        else:
            stored = self._store_exact(recipe, request, matched) if store_kv else ()
            text, ids = self._exact_answer(prompt)
            reply = _reply(text, prompt, matched, _pass_over(prompt, matched), stored)
        most = _ANSWER_TOKENS
        if long:
            text, ids = self._long_reply(prompt, reply.text)
            reply, most = replace(reply, text=text), LIMIT_TOKENS
        model_pass = replace(reply.model_pass, decoded=len(ids))
        if looks_up:
            model_pass = _with_drafts(model_pass, ids, PromptLookupDrafter(prompt.token_ids), most)
        return replace(reply, model_pass=model_pass)

    def _long_reply(self, prompt: TokenizedPrompt, answer: str) -> tuple[str, tuple[int, ...]]:
        chunks = [
            self.adapter.tokenizer.decode(prompt.ids(span)) for span in prompt.spans if span.kind == "chunk"
        ]
        return self.long_replies.reply(answer, chunks, seed=" ".join(chunks))

    def prefill(self, recipe: Recipe, store: KVStore, prompt: TokenizedPrompt) -> Reply:
        """Compute and store a prompt's KV without a reply."""
        request = PrefillRequest(self.adapter, store, prompt, recipe.budget(None, None))
        matched = recipe.match.find(request, recipe.prepare)
        if any(each.origin == "reused" for each in matched):
            reply, _ = self._answer_over_stale(recipe, request, matched, store_kv=True)
            return replace(reply, text="")
        stored = self._store_exact(recipe, request, matched)
        return _reply("", prompt, matched, _pass_over(prompt, matched), stored)

    def generate(self, notes: Sequence[str], request: Request, draw: int, system: str) -> Reply:
        """Return the reply to a request about notes under full attention, sampled as `QuestionPredictor` samples."""
        key = (tuple(notes), request, draw)
        if key not in self._replies:
            prompt = request_prompt(self.adapter.template, notes, request, system)
            result = run(_PREFIX, self.adapter, self._exact_kv, prompt)
            remember(result)
            text, ids = self._decode(result, prompt, generation_for(draw), _REQUEST_TOKENS)
            text = f"{request.lead} {text}".strip()
            self._replies[key] = Reply(text, ModelPass(prompt.tokens, decoded=len(ids)))
        return self._replies[key]

    def _exact_answer(self, prompt: TokenizedPrompt) -> tuple[str, tuple[int, ...]]:
        """Return full attention's answer and its token ids."""
        if prompt.token_ids not in self._answers:
            result = run(_PREFIX, self.adapter, self._exact_kv, prompt)
            remember(result)
            self._answers[prompt.token_ids] = self._decode(result, prompt, _GREEDY, _ANSWER_TOKENS)
        return self._answers[prompt.token_ids]

    def _store_exact(
        self, recipe: Recipe, request: PrefillRequest, matched: Sequence[Matched]
    ) -> tuple[TextPath, ...]:
        """Store the exact KV of fresh spans that this recipe's own pass would store; return the chunks' paths."""
        wanted = [
            number
            for number, each in enumerate(matched)
            if each.origin == "fresh" and each.span.kind in recipe.match.stored_kinds
        ]
        if not wanted:
            return ()
        provenances = {number: request.exact_provenance(number) for number in wanted}
        model, prompt = self.adapter.fingerprint, request.prompt
        keys = [(prompt.ids(prompt.spans[number]), [provenances[number]]) for number in wanted]
        if not all(self._exact_kv.find(model, keys)):
            remember(run(_PREFIX, self.adapter, self._exact_kv, prompt))
        for number, found in zip(wanted, self._exact_kv.find(model, keys), strict=True):
            assert found is not None
            StoreEntry(found[0], provenances[number], request.sources(number)).put(request.store, model)
        return _chunk_paths(prompt, [matched[number] for number in wanted])

    def _answer_over_stale(
        self,
        recipe: Recipe,
        request: PrefillRequest,
        matched: Sequence[Matched],
        store_kv: bool,
    ) -> tuple[Reply, tuple[int, ...]]:
        """Return the recipe's reply, whose pass does not count decoding, and its token ids."""
        prompt = request.prompt
        key = (recipe.name, prompt.token_ids, tuple(each.provenance for each in matched))
        if key not in self._stale:
            result = run(recipe, self.adapter, request.store, prompt)
            text, ids = self._decode(result, prompt, _GREEDY, _ANSWER_TOKENS)
            self._stale[key] = _StaleResult(text, ids, len(result.selected), result.new_entries)
        done = self._stale[key]
        stored: tuple[TextPath, ...] = ()
        if store_kv:
            for entry in done.new_entries:
                entry.put(request.store, self.adapter.fingerprint)
            provenances = {entry.provenance for entry in done.new_entries}
            stored = _chunk_paths(
                prompt, [m for n, m in enumerate(matched) if request.exact_provenance(n) in provenances]
            )
        selects = recipe.select.selective and not request.budget.recomputes_none
        question_rows = prompt.user_rows[1] - prompt.spans[-1].start  # up to the user's last token
        model_pass = replace(
            _pass_over(prompt, matched),
            recomputed=done.recomputed,
            selection_rows=question_rows if selects else 0,
        )
        return _reply(done.text, prompt, matched, model_pass, stored), done.ids

    def _decode(
        self, result: PrefillResult, prompt: TokenizedPrompt, settings: GenerationConfig, most: int
    ) -> tuple[str, tuple[int, ...]]:
        decoded = Decoded()
        pieces = generate(
            self.adapter,
            result.kv_cache,
            prompt.token_ids,
            result.logits,
            settings,
            most,
            decoded,
            form=prompt.reply,
        )
        for _ in pieces:
            pass
        return decoded.text.strip(), tuple(decoded.ids)


def _pass_over(prompt: TokenizedPrompt, matched: Sequence[Matched]) -> ModelPass:
    tokens = {"exact": 0, "reused": 0, "fresh": 0}
    for each in matched:
        tokens[each.origin] += each.span.tokens
    stored = tuple(each.span.tokens for each in matched if each.origin != "fresh")
    return ModelPass(prompt.tokens, tokens["exact"], tokens["reused"], stored_spans=stored)


def _with_drafts(
    model_pass: ModelPass, ids: Sequence[int], drafter: PromptLookupDrafter, most: int
) -> ModelPass:
    """Return the pass with the drafts that `SpeculativeDecoder` would verify while decoding these ids, of at most `most`."""
    passes, accepted_tokens, done = [], 0, 1
    while done <= min(len(ids), most - 1):
        draft = drafter.propose(ids[:done], room=most - 1 - done)
        accepted = next(
            (n for n, token in enumerate(draft) if done + n >= len(ids) or ids[done + n] != token), len(draft)
        )
        if draft:
            passes.append(1 + len(draft))
            drafter.record(accepted)
        accepted_tokens += accepted
        done += 1 + accepted
    return replace(model_pass, accepted_draft_tokens=accepted_tokens, draft_passes=tuple(passes))


def _chunk_paths(prompt: TokenizedPrompt, matched: Sequence[Matched]) -> tuple[TextPath, ...]:
    return tuple(prompt.token_ids[: each.span.end] for each in matched if each.span.kind == "chunk")


def _reply(
    text: str,
    prompt: TokenizedPrompt,
    matched: Sequence[Matched],
    model_pass: ModelPass,
    stored_paths: tuple[TextPath, ...],
) -> Reply:
    chunks = [each for each in matched if each.span.kind == "chunk"]
    exact = [each for each in chunks if each.origin == "exact"]
    return Reply(
        text,
        model_pass,
        context=sum(each.span.tokens for each in chunks),
        found=sum(each.span.tokens for each in chunks if each.origin != "fresh"),
        exact_chunks=tuple(
            zip(_chunk_paths(prompt, exact), (each.span.tokens for each in exact), strict=True)
        ),
        stored_paths=stored_paths,
    )
