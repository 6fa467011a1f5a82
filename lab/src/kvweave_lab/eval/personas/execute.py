"""Requests executed, not priced: every operation of a session really runs, in order, on a model in the priced shape.

All systems' sessions with one user are open in one process and take turns, question by question. Of a request, these run
and are timed: embedding the question, looking it up among the session's cached answers, searching the user's index, finding
and loading its stored KV from files that are in no page cache, placing it, the rows that selected and the rows that are
computed, and the decoding of the reply. Which rows these are is what the session's own request with the answering model did:
the shape has random weights and answers nothing.
"""

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import torch

from kvweave.embedding import TextEncoder
from kvweave.index.vector_index import VectorIndex
from kvweave.kvstore.chunk_store import ChunkStore
from kvweave.models.adapter import Adapter
from kvweave.models.fused_cache import FusedCache, PlacedSpan
from kvweave.models.hooks import AttentionProbe, StopAtLayer
from kvweave.text import clean_text
from kvweave.types import ChunkKV, KVProvenance
from kvweave_lab.eval.personas.background import BackgroundRunner
from kvweave_lab.eval.personas.corpus import UserCorpus
from kvweave_lab.eval.personas.model import ModelPass
from kvweave_lab.eval.personas.pricing import Decoding, Prices, Shape, decoded_by
from kvweave_lab.eval.personas.session import ServedQuestion, UserSession
from kvweave_lab.eval.personas.systems import SYSTEMS, Answers, System, Trial
from kvweave_lab.eval.personas.users import Question

_PROVENANCE: Final = KVProvenance("executed", ())
_STORE_BYTES: Final = 20 * 10**9


@dataclass(frozen=True, slots=True)
class ExecutedRequest:
    """One request's seconds, part by part; parts that did not run are 0.

    Attributes:
        system: its name.
        number: of the question, from 1.
        served: what the session's own request did, without texts.
        match_s: embedding the question, and looking it up.
        search_s: finding chunks.
        load_s: finding stored KV, and loading every byte of it.
        prefill_s: placing it, selecting, and computing rows, up to the first logits.
        decode_s: by decoding, from the first logits to the end of the reply.
    """

    system: str
    number: int
    served: ModelPass | None
    match_s: float
    search_s: float = 0.0
    load_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: Mapping[Decoding, float] | None = None

    def latency_s(self, decoding: Decoding) -> float:
        """Return the seconds from the question to the whole answer."""
        decode_s = self.decode_s[decoding] if self.decode_s else 0.0
        return self.match_s + self.search_s + self.load_s + self.prefill_s + decode_s


@dataclass(frozen=True, slots=True)
class ExecutedUser:
    """The executed requests of all systems with one user."""

    answers: Answers
    user: str
    requests: tuple[ExecutedRequest, ...]

    @property
    def key(self) -> tuple[str, str]:
        """Identifies the record in a results log."""
        return self.answers, self.user


def parse_executed(content: dict[str, Any]) -> ExecutedUser:
    """Return a record from its JSON values."""
    requests = tuple(_parse_request(each) for each in content["requests"])
    return ExecutedUser(**content | {"requests": requests})


def _parse_request(content: dict[str, Any]) -> ExecutedRequest:
    served = content["served"]
    return ExecutedRequest(**content | {"served": None if served is None else ModelPass.parse(served)})


class Executor:
    """Executes requests at a shape. A context manager, which deletes its files.

    Args:
        adapter: a model in the shape.
        parent: folder for stored KV, on a disk: files in memory never leave the page cache, and temporary folders are often
            there.
        decodings: that each reply is decoded by.
        encoder: embeds every question each time.
    """

    def __init__(
        self, adapter: Adapter, parent: Path, decodings: Sequence[Decoding], encoder: TextEncoder
    ) -> None:
        self.adapter, self._decodings, self._encoder = adapter, decodings, encoder
        self._folder = Path(tempfile.mkdtemp(prefix="executed-", dir=parent))
        self._store = ChunkStore(self._folder, limit_bytes=_STORE_BYTES)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._store.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def request(self, session: UserSession, asked: Question, number: int) -> ExecutedRequest:
        """Serve a question in its session, and execute what that took."""
        question, corpus = clean_text(asked.text), session.corpus

        def match() -> None:
            vector = self._encoder.encode([question])[0]
            if session.system.matching != "none":
                session.cached(question, vector)

        match_s = _elapsed_s(match)  # before the session knows the question
        served = session.ask(asked).model_pass
        if served is None:
            return ExecutedRequest(session.system.name, number, None, match_s)
        vector, visible = corpus.encoder.encode([question])[0], corpus.documents.visible_versions()
        search_s = _elapsed_s(
            lambda: VectorIndex.search(corpus.index, question, vector, corpus.top_k, visible)
        )
        self._put(served)
        began = time.perf_counter()
        stored = self._load(served)
        load_s = time.perf_counter() - began if session.system.kv != "none" else 0.0
        began = time.perf_counter()
        kv_cache = self._prefill(served, stored)
        prefill_s = time.perf_counter() - began
        decode_s = {
            decoding: _elapsed_s(lambda: self._decode(served, kv_cache, decoding))  # noqa: B023 - called at once
            for decoding in self._decodings
        }
        return ExecutedRequest(
            session.system.name, number, served, match_s, search_s, load_s, prefill_s, decode_s
        )

    def _keys(self, served: ModelPass) -> list[tuple[tuple[int, ...], list[KVProvenance]]]:
        return [
            (_ids(tokens, first=place), [_PROVENANCE]) for place, tokens in enumerate(served.stored_spans)
        ]

    def _put(self, served: ModelPass) -> None:
        """Store the spans' KV where it is not, and let every file leave the page cache."""
        g = self.adapter.geometry
        for ids, (provenance,) in self._keys(served):
            if self._store.get(self.adapter.fingerprint, ids, provenance) is None:
                kv = torch.randn(g.layers, 2, g.kv_heads, len(ids), g.head_width).to(g.dtype)
                self._store.put(self.adapter.fingerprint, ChunkKV(ids, kv), provenance, ())
        self._store.forget_recent()

    def _load(self, served: ModelPass) -> list[ChunkKV]:
        """Find the spans' KV, and read and verify all of it."""
        found = self._store.find(self.adapter.fingerprint, self._keys(served))
        loaded = []
        for each in found:
            assert each is not None
            each[0].kv.sum()
            loaded.append(each[0])
        return loaded

    def _prefill(self, served: ModelPass, stored: Sequence[ChunkKV]) -> FusedCache:
        """Place stored KV at the prompt's start, select over it, and compute the other rows and the recomputed ones.

        Recomputed rows are spread evenly over the stale ones, which come after the exact ones.
        """
        adapter, spans, start = self.adapter, [], 0
        for kv in stored:
            spans.append(PlacedSpan(kv, start, start))
            start += kv.tokens
        ids = _ids(served.prompt)
        kv_cache = adapter.new_cache(served.prompt, spans)
        if served.selection_rows:
            rows = torch.arange(served.prompt - served.selection_rows, served.prompt)
            plan = adapter.rows(rows)
            plan.hooks += [
                AttentionProbe(rows, columns=(0, start)),
                StopAtLayer(adapter.geometry.layers - 1),
            ]
            adapter.run_partial(kv_cache, ids, plan)
        chosen = torch.linspace(served.exact, max(served.exact, start - 1), served.recomputed).long()
        adapter.compute(kv_cache, ids, adapter.rows(torch.cat([chosen, torch.arange(start, served.prompt)])))
        adapter.synchronize()
        return kv_cache

    def _decode(self, served: ModelPass, kv_cache: FusedCache, decoding: Decoding) -> None:
        """Decode the reply, and leave the cache as it was. Drafts come first, with equally many accepted tokens."""
        adapter = self.adapter
        served = decoded_by(served, decoding)
        context, accepted = served.prompt, served.accepted_draft_tokens
        for place, rows in enumerate(served.draft_passes):
            adapter.verify_draft(kv_cache, _ids(rows))
            done = accepted * (place + 1) // len(served.draft_passes)
            context = served.prompt + place + 1 + done
            kv_cache.truncate_appended(context)
        for _ in range(max(0, served.decoded - served.draft_pass_tokens)):
            adapter.step(kv_cache, 7)
        adapter.synchronize()
        kv_cache.truncate_appended(served.prompt)


def execute_user(
    corpus: UserCorpus,
    trials: Sequence[Trial],
    budgets: Mapping[str, Sequence[float | None]],
    shape: Shape,
    executor: Executor,
    every: int = 1,
) -> ExecutedUser:
    """Run the sessions of all systems with one user side by side, and execute every n-th question's requests.

    Args:
        corpus: the user's.
        trials: the systems', with one length of replies.
        budgets: of idle periods, by trial key.
        shape: that operations of idle time are counted at.
        executor: executes.
        every: 1 executes all questions, 2 every second one, and so on.
    """
    answers, requests = trials[0].answers, []
    with ExitStack() as stack:
        sessions = []
        for trial in trials:
            session = stack.enter_context(UserSession(trial.system, trial.setting, corpus, answers))
            sessions.append((session, BackgroundRunner(session, shape), budgets[trial.key]))
        for _, background, allowed in sessions:
            background.run(allowed[0], first=True)
        for number, asked in enumerate(corpus.user.questions, 1):
            turn = number % len(sessions)  # so that no system is always first
            for session, _, _ in (*sessions[turn:], *sessions[:turn]):
                if number % every:
                    session.ask(asked)
                else:
                    requests.append(executor.request(session, asked, number))
            for _, background, allowed in sessions:
                background.run(allowed[number], first=False)
    return ExecutedUser(answers, corpus.user.name, tuple(requests))


@dataclass(frozen=True, slots=True)
class ExecutedRow:
    """A system's executed requests beside their prices in table B; seconds are means over requests.

    Attributes:
        answers, decoding, system: of the requests.
        users, requests: their numbers.
        executed_s, priced_s: mean latency.
        ratio: executed over priced.
        load_s, priced_load_s: the part that is finding and loading stored KV: cold when executed, warm when priced.
        prefill_s, priced_prefill_s, decode_s, priced_decode_s: the model's parts.
    """

    answers: Answers
    decoding: Decoding
    system: str
    users: int
    requests: int
    executed_s: float
    priced_s: float
    ratio: float
    load_s: float
    priced_load_s: float
    prefill_s: float
    priced_prefill_s: float
    decode_s: float
    priced_decode_s: float


def executed_rows(
    users: Sequence[ExecutedUser],
    decodings: Sequence[Decoding],
    prices: Prices,
    systems: Sequence[System] = SYSTEMS,
) -> list[ExecutedRow]:
    """Return a row for every system, under each way of decoding."""
    return [
        _executed_row(answers, decoding, system, users, prices)
        for answers in dict.fromkeys(user.answers for user in users)
        for decoding in decodings
        for system in systems
    ]


def _executed_row(
    answers: Answers, decoding: Decoding, system: System, users: Sequence[ExecutedUser], prices: Prices
) -> ExecutedRow:
    own = [user for user in users if user.answers == answers]
    requests = [one for user in own for one in user.requests if one.system == system.name]

    def mean(seconds: Callable[[ExecutedRequest], float]) -> float:
        return statistics.fmean(seconds(one) for one in requests)

    def of_pass(seconds: Callable[[ModelPass], float]) -> float:
        return mean(lambda one: 0.0 if one.served is None else seconds(decoded_by(one.served, decoding)))

    executed_s = mean(lambda one: one.latency_s(decoding))
    priced_s = mean(
        lambda one: (
            prices.request(ServedQuestion("", "", 0.0, 0.0, one.served), system, "B", decoding).latency_s
        )
    )
    return ExecutedRow(
        answers,
        decoding,
        system.name,
        users=len(own),
        requests=len(requests),
        executed_s=executed_s,
        priced_s=priced_s,
        ratio=executed_s / priced_s,
        load_s=mean(lambda one: one.load_s),
        priced_load_s=of_pass(
            lambda one: prices.costs.find_kv_s + prices.load_s(one, "KV") if system.kv != "none" else 0.0
        ),
        prefill_s=mean(lambda one: one.prefill_s),
        priced_prefill_s=of_pass(lambda one: prices.prefill_s(one, system, "B")),
        decode_s=mean(lambda one: one.decode_s[decoding] if one.decode_s else 0.0),
        priced_decode_s=of_pass(prices.decode_s),
    )


def _elapsed_s(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def _ids(count: int, first: int = 0) -> tuple[int, ...]:
    """Return token ids; other ones for another first."""
    return tuple(7 + (first + number) % 100 for number in range(count))
