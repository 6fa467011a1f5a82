"""Speed-up over time: novel questions over a store that grows and is larger than what memory may hold of it.

A cache that serves a fixed set of questions may be fast while it is warm and slow for the rest of its life. Here no
question comes twice, chunks are as popular as `queries.py` draws them, and new ones come with the questions for them:
they are prepared before the question, as an index does when a document comes, and that is not part of its time. What
the host tier does not hold is read from the disk.
"""

import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from kvweave.engine.state import Progress
from kvweave.errors import InvalidRequest
from kvweave.kvstore.chunk_store import ChunkStore
from kvweave.kvstore.keys import digest_tokens
from kvweave.models.adapter import Adapter
from kvweave.recipes.chunks_api import prepare
from kvweave.recipes.methods import recipe_named
from kvweave.recipes.recipe import remember, run
from kvweave.types import Prompt, Timing
from kvweave_lab.bench.baseline import library_attention, stock_prefill
from kvweave_lab.bench.memory_limit import memory_limit_bytes
from kvweave_lab.bench.prompts import chunk_text, question_text
from kvweave_lab.bench.queries import Query, draw_queries
from kvweave_lab.bench.spread import timed
from kvweave_lab.bench.steady_journal import SteadyJournal
from kvweave_lab.bench.steady_results import SteadyBench, SteadyRow, SteadySettings, quarters, speedups

_PREPARED_AT_ONCE = 32
"""Chunks between two words about progress."""


def bench_steady(
    adapter: Adapter,
    shape: str,
    folder: Path,
    settings: SteadySettings,
    output: Path | None = None,
    progress: Progress = lambda stage, done, of: None,
) -> SteadyBench:
    """Ask every question; chunk KV is stored under `folder`, whose disk is what reading is about.

    With `output`, questions that were asked are noted there, and asked no second time; the store in `folder` then has
    to be the same one. `shape` is for the report. Raises InvalidRequest for another measurement's output and for a
    ratio that the recipe cannot spend, PromptTooLong and UnknownRecipe.
    """
    recipe = recipe_named(settings.recipe)
    if not recipe.select.selects and settings.ratio not in (0, 1):
        raise InvalidRequest(
            f"recipe {recipe.name!r} selects no tokens, so ratio {settings.ratio:g} does not apply to it; give 0 or 1"
        )
    geometry = adapter.geometry
    about = {
        "shape": shape,
        "dtype": str(geometry.dtype).removeprefix("torch."),
        "device": str(geometry.device),
    }
    queries = draw_queries(settings.traffic)
    with SteadyJournal(output, {**asdict(settings), **about}) as journal:
        if len(journal.rows) < len(queries):
            with ChunkStore(folder, limit_bytes=2**62, host_bytes=settings.host_bytes) as store:
                asking = _Asking(adapter, store, settings)
                asking.prepare_known(queries[: len(journal.rows)], progress)
                asking.warm_up(queries[0])
                journal.begin()
                for number in range(len(journal.rows), len(queries)):
                    progress("questions", number, len(queries))
                    journal.add(asking.ask(number, queries[number], last=number == len(queries) - 1))
        rows, started_at = tuple(journal.rows), tuple(journal.started_at)
    found = speedups(rows)
    medians = quarters(found)
    return SteadyBench(
        settings=settings,
        **about,
        memory_limit_bytes=memory_limit_bytes(),
        started_at=started_at,
        rows=rows,
        speedups=found,
        quarters=medians,
        kept=medians[3] / medians[1],
    )


class _Asking:
    """The store as it grows, and what is asked of it."""

    def __init__(self, adapter: Adapter, store: ChunkStore, settings: SteadySettings) -> None:
        self._adapter, self._store, self._settings = adapter, store, settings
        self._recipe = recipe_named(settings.recipe)
        self._came: set[int] = set()

    def prepare_known(self, asked: Sequence[Query], progress: Progress) -> None:
        """Prepare the chunks that are there beforehand, and those that came with questions asked already."""
        known = range(self._settings.traffic.known_chunks)
        chunks = [*known, *sorted({chunk for query in asked for chunk in query}.difference(known))]
        for first in range(0, len(chunks), _PREPARED_AT_ONCE):
            progress("chunks", first, len(chunks))
            self._prepare(chunks[first : first + _PREPARED_AT_ONCE])

    def warm_up(self, query: Query) -> None:
        """What a process does once only is no question's."""
        self._full_s(self._prompt(0, query))

    def ask(self, number: int, query: Query, *, last: bool) -> SteadyRow:
        """One question, with full prefill beside it if it is its turn."""
        new = [chunk for chunk in dict.fromkeys(query) if chunk not in self._came]
        prepare_s = timed(lambda: self._prepare(new)) if new else 0.0
        prompt = self._prompt(number, query)
        if not self._settings.page_cache:
            self._store.forget_files()
        before = self._store.stats()
        ttft_s, prompt_tokens, computed, timing = self._answer(prompt)
        after = self._store.stats()
        beside = last or number % self._settings.full_every == 0
        hits = {tier: after.by_tier[tier].hits - before.by_tier[tier].hits for tier in ("host", "disk")}
        return SteadyRow(
            question=number,
            prompt_tokens=prompt_tokens,
            computed_tokens=computed,
            new_chunks=len(new),
            prepare_s=prepare_s,
            ttft_s=ttft_s,
            full_s=self._full_s(prompt) if beside else None,
            load_s=timing.match_s,
            place_s=timing.place_s,
            select_s=timing.select_s,
            recompute_s=timing.recompute_s,
            from_host=hits["host"],
            from_disk=hits["disk"],
            stored_bytes=after.by_tier["disk"].bytes,
            host_bytes=after.by_tier["host"].bytes,
        )

    def _prepare(self, chunks: Sequence[int]) -> None:
        prepare(self._adapter, self._store, [self._text(chunk) for chunk in chunks], recipe=self._recipe)
        self._came.update(chunks)

    def _text(self, chunk: int) -> str:
        return chunk_text(self._adapter, chunk, self._settings.chunk_tokens)

    def _prompt(self, number: int, query: Query) -> Prompt:
        return Prompt(question_text(number), tuple(map(self._text, query)))

    def _answer(self, asked: Prompt) -> tuple[float, int, int, Timing]:
        """Seconds to the first token, tokens of the prompt, tokens computed, and where the time went."""
        adapter, store, recipe = self._adapter, self._store, self._recipe
        prefix = adapter.template.prefix_ids(asked.system)
        named = [  # an index has this at hand
            (digest_tokens(ids), recipe.prepare.provenances(adapter, prefix, len(ids)))
            for ids in map(adapter.template.chunk_ids, asked.chunks)
        ]
        began = time.perf_counter()
        with store.lease() as lease:
            if recipe.match.anywhere:
                store.prefetch(adapter.fingerprint, named, lease)
            prompt = adapter.template.render(asked)
            result = run(recipe, adapter, store, prompt, ratio=self._settings.ratio, lease=lease)
        ttft_s = time.perf_counter() - began
        remember(result)
        plan = result.plan
        return ttft_s, prompt.tokens, plan.recomputed_tokens + plan.fresh_tokens, result.timing

    def _full_s(self, asked: Prompt) -> float:
        """The faster of transformers' prefill and ours without reuse, tokenizing included."""
        adapter = self._adapter

        def stock() -> None:
            ids = adapter.template.render(asked).token_ids
            stock_prefill(adapter, torch.tensor([ids], device=adapter.geometry.device))
            adapter.synchronize()

        with library_attention(adapter):
            stock_s = timed(stock)
        full = recipe_named("full")
        return min(stock_s, timed(lambda: run(full, adapter, self._store, adapter.template.render(asked))))
