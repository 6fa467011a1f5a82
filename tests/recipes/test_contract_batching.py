"""Every recipe: requests of many threads, whose passes are packed and whose chunks are shared, give what each gives alone."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

import kvweave
from kvweave.answering.generation import Decoded, generate
from kvweave.config import GenerationConfig
from kvweave.kvstore.memory_store import MemoryStore
from kvweave.models.shared_spans import SharedSpanCache
from kvweave.recipes.methods import METHODS
from kvweave.testing import tiny_adapter
from support.contract import close, prefilled, prepare

GREEDY = GenerationConfig(temperature=0.0)


@pytest.fixture
def many():
    """A model that packs the passes of concurrent threads."""
    adapter = tiny_adapter()
    batcher = adapter.serve_many()
    yield adapter
    batcher.close()


@pytest.fixture
def prompts(prompt):
    """Prompts over the same chunks, in other orders, and over some of them."""
    first, _, third, fourth = prompt.chunks
    return [
        prompt,
        kvweave.Prompt("Who came?", prompt.chunks, system=prompt.system),
        kvweave.Prompt("Where was the road again?", (third, first, fourth), system=prompt.system),
        kvweave.Prompt("Did it rain?", prompt.chunks[:3], system=prompt.system),
    ]


def answer(adapter, store, prompt, name):
    result = prefilled(adapter, store, prompt, name)
    decoded = Decoded()
    logits = result.logits.clone()
    ids = result.request.prompt.token_ids
    for _ in generate(adapter, result.kv_cache, ids, result.logits, GREEDY, 6, decoded):
        pass
    new = sorted((entry.provenance.kind, entry.content.tokens) for entry in result.new_entries)
    return logits, list(decoded.ids), result.plan, new, result.kv_cache


@pytest.mark.parametrize("name", METHODS)
def test_many_threads_together_give_what_each_gives_alone(name, adapter, many, prompt, prompts):
    store = MemoryStore()
    prepare(adapter, store, prompt, name)
    alone = [answer(adapter, store, each, name) for each in prompts]
    start = threading.Barrier(2 * len(prompts))

    def run(each):
        start.wait()
        return answer(many, store, each, name)

    with ThreadPoolExecutor(2 * len(prompts)) as threads:
        together = list(threads.map(run, prompts * 2))
    for number, (logits, ids, plan, new, _) in enumerate(together):
        expected = alone[number % len(prompts)]
        close(logits, expected[0])
        assert (ids, plan, new) == expected[1:4]
    assert many.batcher.stats.most_requests > 1


def test_requests_over_the_same_chunks_hold_one_copy_of_them(many, prompt):
    store = MemoryStore()
    prepare(many, store, prompt, "prophetkv")
    caches = [answer(many, store, prompt, "prophetkv")[4] for _ in range(4)]
    kinds = {type(kv_cache) for kv_cache in caches}
    copies = len({id(span) for kv_cache in caches for span in kv_cache.layers[0].spans})
    spans, held_bytes = len(caches[0].layers[0].spans), many.spans.bytes
    del caches
    assert (kinds, copies) == ({SharedSpanCache}, spans)
    assert held_bytes > 0
    ends = time.monotonic() + 10
    while many.spans.bytes and time.monotonic() < ends:  # the thread that ran the last pass lets go of it
        time.sleep(0.01)
    assert many.spans.bytes == 0
