"""Prompts through the model, each different one once, however many systems read it.

What is reused exactly changes no answer: every system that reuses nothing else gets full attention's, computed once, with
the KV that its own pass would have left. Where stale KV stands in a prompt, the answer is that prompt's with that very KV.
Knows neither questions nor systems.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

from kvweave.config import GenerationConfig
from kvweave.engine.generation import Decoded, generate
from kvweave.engine.question_prediction import settings_of
from kvweave.engine.speculative import PromptLookupDrafter
from kvweave.kvstore.chunk_store import ChunkStore
from kvweave.kvstore.memory_store import MemoryStore
from kvweave.models.adapter import Adapter
from kvweave.recipes.entries import StoreEntry
from kvweave.recipes.methods import recipe_named
from kvweave.recipes.recipe import Recipe, remember, run
from kvweave.recipes.request import Matched, PrefillRequest, PrefillResult
from kvweave.types import KVProvenance, Prompt, TokenizedPrompt
from kvweave_lab.eval.personas.passes import Pass

_PATH: Final = recipe_named("prefix")
_GREEDY: Final = settings_of(0)
_MOST_TOKENS: Final = 32
"""Of an answer: what the generated users ask for is a few words."""
_MOST_TOLD: Final = 96
"""Of key content and predicted questions."""


TextPath: TypeAlias = tuple[int, ...]
"""The tokens up to a chunk's end: what names KV behind exactly this text."""


@dataclass(frozen=True, slots=True)
class Read:
    """A reply, and what it took.

    Attributes:
        text: of the reply.
        took: the pass.
        context: tokens of the chunks that were retrieved.
        found: of these, tokens with stored KV.
        behind: chunks whose KV was found behind exactly this text, and their tokens.
        left: chunks whose KV this reading has stored so.
    """

    text: str
    took: Pass
    context: int = 0
    found: int = 0
    behind: tuple[tuple[TextPath, int], ...] = ()
    left: tuple[TextPath, ...] = ()


@dataclass(frozen=True, slots=True)
class _Stale:
    text: str
    ids: tuple[int, ...]
    recomputed: int
    remembered: tuple[StoreEntry, ...]


class Reader:
    """Reads for all systems with the documents of one user; makes nothing that another user's reading needs.

    Args:
        adapter: the model.
    """

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter
        self._library = MemoryStore()  # the KV of every path that was read
        self._answers: dict[tuple[int, ...], tuple[str, tuple[int, ...]]] = {}
        self._stale: dict[tuple[str, tuple[int, ...], tuple[KVProvenance | None, ...]], _Stale] = {}
        self._told: dict[tuple[tuple[str, ...], str, int], Read] = {}

    def answer(
        self,
        recipe: Recipe,
        store: ChunkStore,
        prompt: TokenizedPrompt,
        *,
        keeps_kv: bool,
        foretelling: PromptLookupDrafter | None = None,
    ) -> Read:
        """The answer to a prompt by a recipe over a store, which gets the KV that is worth keeping if `keeps_kv`.

        What is foretold changes no answer either: what it saves is counted.
        """
        request = PrefillRequest(self.adapter, store, prompt, recipe.budget(None, None))
        matched = recipe.match.find(request, recipe.prepare)
        if any(each.origin == "reused" for each in matched):
            return self._over_stale(recipe, request, matched, keeps_kv, foretelling)
        left = self._keep(recipe, request, matched) if keeps_kv else ()
        text, ids = self._exactly(prompt)
        return _read(
            text, prompt, matched, _foretold(_pass(prompt, matched, len(ids)), ids, foretelling), left
        )

    def prefill(self, recipe: Recipe, store: ChunkStore, prompt: TokenizedPrompt) -> Read:
        """The same without a reply: the KV alone."""
        request = PrefillRequest(self.adapter, store, prompt, recipe.budget(None, None))
        matched = recipe.match.find(request, recipe.prepare)
        if any(each.origin == "reused" for each in matched):
            whole = self._over_stale(recipe, request, matched, keeps_kv=True, foretelling=None)
            return replace(whole, text="", took=replace(whole.took, decoded=0))
        left = self._keep(recipe, request, matched)
        return _read("", prompt, matched, _pass(prompt, matched, 0), left)

    def told(self, notes: Sequence[str], request: str, draw: int, system: str) -> Read:
        """The model's reply to a request about notes, read with full attention; drawn as `QuestionPredictor` draws."""
        key = (tuple(notes), request, draw)
        if key not in self._told:
            prompt = self.adapter.template.render(Prompt(request, tuple(notes), system))
            result = run(_PATH, self.adapter, self._library, prompt)
            remember(result)
            text, ids = self._generated(result, prompt, settings_of(draw), _MOST_TOLD)
            self._told[key] = Read(text, Pass(prompt.tokens, decoded=len(ids)))
        return self._told[key]

    def _exactly(self, prompt: TokenizedPrompt) -> tuple[str, tuple[int, ...]]:
        """Full attention's answer, and its token ids."""
        if prompt.token_ids not in self._answers:
            result = run(_PATH, self.adapter, self._library, prompt)
            remember(result)
            self._answers[prompt.token_ids] = self._generated(result, prompt, _GREEDY, _MOST_TOKENS)
        return self._answers[prompt.token_ids]

    def _keep(
        self, recipe: Recipe, request: PrefillRequest, matched: Sequence[Matched]
    ) -> tuple[TextPath, ...]:
        """Store what a pass by this recipe would remember, the exact KV of what was fresh; returns the chunks' paths."""
        wanted = [
            number
            for number, each in enumerate(matched)
            if each.origin == "fresh" and each.span.kind in recipe.match.remembers
        ]
        if not wanted:
            return ()
        provenances = {number: request.exact_provenance(number) for number in wanted}
        model, prompt = self.adapter.fingerprint, request.prompt
        asked = [(prompt.ids(prompt.spans[number]), [provenances[number]]) for number in wanted]
        if not all(self._library.find(model, asked)):
            remember(run(_PATH, self.adapter, self._library, prompt))
        for number, found in zip(wanted, self._library.find(model, asked), strict=True):
            assert found is not None
            StoreEntry(found[0], provenances[number], request.sources(number)).put(request.store, model)
        return _paths(prompt, [matched[number] for number in wanted])

    def _over_stale(
        self,
        recipe: Recipe,
        request: PrefillRequest,
        matched: Sequence[Matched],
        keeps_kv: bool,
        foretelling: PromptLookupDrafter | None,
    ) -> Read:
        prompt = request.prompt
        key = (recipe.name, prompt.token_ids, tuple(each.provenance for each in matched))
        if key not in self._stale:
            result = run(recipe, self.adapter, request.store, prompt)
            text, ids = self._generated(result, prompt, _GREEDY, _MOST_TOKENS)
            self._stale[key] = _Stale(text, ids, len(result.selected), result.remembered)
        done = self._stale[key]
        left: tuple[TextPath, ...] = ()
        if keeps_kv:
            for kept in done.remembered:
                kept.put(request.store, self.adapter.fingerprint)
            provenances = {kept.provenance for kept in done.remembered}
            left = _paths(
                prompt, [m for n, m in enumerate(matched) if request.exact_provenance(n) in provenances]
            )
        took = _foretold(_pass(prompt, matched, len(done.ids)), done.ids, foretelling)
        selects = recipe.select.selects and not request.budget.nothing
        asked = (
            prompt.user_rows[1] - prompt.spans[-1].start
        )  # rows behind the user's last word choose nothing
        selecting = asked if selects else 0
        took = replace(took, recomputed=done.recomputed, selecting=selecting)
        return _read(done.text, prompt, matched, took, left)

    def _generated(
        self, result: PrefillResult, prompt: TokenizedPrompt, settings: GenerationConfig, most: int
    ) -> tuple[str, tuple[int, ...]]:
        decoded = Decoded()
        pieces = generate(
            self.adapter, result.kv_cache, prompt.token_ids, result.logits, settings, most, decoded
        )
        for _ in pieces:
            pass
        return decoded.text.strip(), tuple(decoded.ids)


def _pass(prompt: TokenizedPrompt, matched: Sequence[Matched], decoded: int) -> Pass:
    tokens = {"exact": 0, "reused": 0, "fresh": 0}
    for each in matched:
        tokens[each.origin] += each.span.tokens
    return Pass(prompt.tokens, tokens["exact"], tokens["reused"], decoded=decoded)


def _foretold(took: Pass, ids: Sequence[int], foretelling: PromptLookupDrafter | None) -> Pass:
    """The same where what is told of the reply is checked, as `SpeculativeDecoder` does."""
    if foretelling is None:
        return took
    checks, accepted_draft_tokens, said = [], 0, 1
    while said <= min(len(ids), _MOST_TOKENS - 1):
        told = foretelling.next(ids[:said], room=_MOST_TOKENS - 1 - said)
        stood = next(
            (n for n, token in enumerate(told) if said + n >= len(ids) or ids[said + n] != token), len(told)
        )
        if told:
            checks.append(1 + len(told))
            foretelling.held(stood)
        accepted_draft_tokens += stood
        said += 1 + stood
    return replace(took, accepted_draft_tokens=accepted_draft_tokens, checks=tuple(checks))


def _paths(prompt: TokenizedPrompt, matched: Sequence[Matched]) -> tuple[TextPath, ...]:
    """Of those that are chunks."""
    return tuple(prompt.token_ids[: each.span.end] for each in matched if each.span.kind == "chunk")


def _read(
    text: str,
    prompt: TokenizedPrompt,
    matched: Sequence[Matched],
    took: Pass,
    left: tuple[TextPath, ...] = (),
) -> Read:
    chunks = [each for each in matched if each.span.kind == "chunk"]
    found = sum(each.span.tokens for each in chunks if each.origin != "fresh")
    exact = [each for each in chunks if each.origin == "exact"]
    behind = tuple(zip(_paths(prompt, exact), (each.span.tokens for each in exact), strict=True))
    return Read(text, took, sum(each.span.tokens for each in chunks), found, behind, left)
