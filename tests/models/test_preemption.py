"""Passes of low priority: stopped between layers and resumed, with the same results."""

import threading
import time

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from kvweave.answering.generation import Decoded, generate
from kvweave.config import GenerationConfig
from kvweave.decode.settings import ClusterSettings, OffloadSettings
from kvweave.kvstore.chunk_store import ChunkStore
from kvweave.models.preemption import BLOCK_TOKENS, PassCost, PassLock, Preempted
from kvweave.recipes.methods import recipe_named
from kvweave.recipes.recipe import run
from kvweave.testing import end_only_at, tiny_adapter
from kvweave.types import Prompt

CHUNKS = (
    "The ferry to Skelt leaves at nine from the northern quay, every day but Sunday.",
    "The password of Glorric is walnut. The password of Plabry is needle.",
)
PROMPT = Prompt("When does the ferry leave?", CHUNKS)


class Interrupting:
    """Requests a stop at some of the checks, counted from 0; counts all calls."""

    def __init__(self, at=()):
        self.at = set(at)
        self.checks = self.waits = self.flops = self.passes = 0

    def stop_requested(self):
        self.checks += 1
        return self.checks - 1 in self.at

    def wait_for_requests(self):
        self.waits += 1

    def record_flops(self, flops):
        self.flops += flops
        self.passes += 1


def computed(adapter, low=None, offload=None):
    """Return the prompt's logits, its KV before rotation, and a few generated tokens."""
    ids = adapter.template.render(PROMPT).token_ids
    kv_cache = adapter.new_cache(len(ids))

    def work():
        logits = adapter.compute(kv_cache, ids, adapter.rows(torch.arange(len(ids))), capture=True)
        kv = adapter.extract_chunk_kv(kv_cache, ids, 0, len(ids)).kv
        decoded = Decoded()
        text = "".join(generate(adapter, kv_cache, ids, logits, GenerationConfig(), 6, decoded, kv=offload))
        return logits, kv, text

    if low is None:
        return work()
    with adapter.low_priority(low):
        return work()


@pytest.mark.parametrize("family", ["llama", "gemma3", "phi3-longrope", "llama-dynamic", "qwen3-moe"])
def test_a_prompt_in_blocks_with_stops_gives_what_one_pass_gives(family):
    adapter = tiny_adapter(family)
    logits, kv, text = computed(adapter)
    # The stops fall on every layer of the first passes, and on some of the decoding steps.
    low = Interrupting(at=range(0, 400, 7))
    got, got_kv, got_text = computed(adapter, low)
    assert low.waits >= 3
    torch.testing.assert_close(got, logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(got_kv, kv, rtol=1e-4, atol=1e-4)
    assert got_text == text


def test_rows_run_in_blocks_and_each_layer_of_each_block_checks_for_a_stop():
    adapter = tiny_adapter()
    tokens = adapter.template.render(PROMPT).tokens
    low = Interrupting()
    ids = adapter.template.render(PROMPT).token_ids
    with adapter.low_priority(low):
        adapter.compute(adapter.new_cache(tokens), ids, adapter.rows(torch.arange(tokens)))
    assert low.passes == -(-tokens // BLOCK_TOKENS)
    assert low.checks == low.passes * adapter.geometry.layers


def test_decoding_from_a_file_stops_between_tokens():
    """Appended tokens cannot be removed from the file, so no step is stopped inside."""
    adapter = tiny_adapter()
    end_only_at(adapter)
    offload = OffloadSettings(1.0, window=8, clusters=ClusterSettings(8, 16))
    _, _, text = computed(adapter, offload=offload)
    free = Interrupting()
    computed(adapter, free, offload)
    steps = 5  # for six tokens, the first of which the prompt's logits gave
    low = Interrupting(at=range(free.checks - steps, free.checks))
    _, _, got_text = computed(adapter, low, offload)
    assert got_text == text
    assert low.waits == steps
    assert (low.passes, low.flops) == (free.passes, free.flops)


def test_low_priority_holds_for_one_thread_only():
    adapter = tiny_adapter()
    low = Interrupting(at=range(10_000))
    other = threading.Thread(target=computed, args=(adapter,))
    with adapter.low_priority(low):
        other.start()
        other.join()
    assert low.checks == 0
    computed(adapter)
    assert low.checks == 0


def test_an_error_while_waiting_ends_the_pass_and_the_model_works_as_before():
    adapter = tiny_adapter()
    expected, *_ = computed(adapter)

    class GiveUp(Exception):
        pass

    class Ending(Interrupting):
        def wait_for_requests(self):
            raise GiveUp

    for at in (0, 1, 2, 4):
        with pytest.raises(GiveUp):
            computed(adapter, Ending(at=[at]))
        torch.testing.assert_close(computed(adapter)[0], expected, rtol=0, atol=0)


def test_a_pass_with_hooks_runs_in_one_piece_and_cannot_be_resumed(tmp_path):
    adapter = tiny_adapter()
    prompt = adapter.template.render(PROMPT)
    recipe = recipe_named("prophetkv")
    with ChunkStore(tmp_path) as store:
        from kvweave.recipes.offline import prepare

        prepare(adapter, store, CHUNKS, recipe=recipe)
        expected = run(recipe, adapter, store, prompt, ratio=0.3)
        # The first stop falls into the pass that records the attention of the question.
        with adapter.low_priority(Interrupting(at=[0])), pytest.raises(Preempted):
            run(recipe, adapter, store, prompt, ratio=0.3)
        with adapter.low_priority(Interrupting()):
            got = run(recipe, adapter, store, prompt, ratio=0.3)
    assert torch.equal(got.selected, expected.selected)
    torch.testing.assert_close(got.logits, expected.logits, rtol=1e-4, atol=1e-4)


def test_another_thread_uses_the_model_while_a_pass_of_low_priority_waits():
    adapter = tiny_adapter()
    expected, *_ = computed(adapter)
    got = []

    class PendingQuestion(Interrupting):
        def wait_for_requests(self):
            super().wait_for_requests()
            other = threading.Thread(target=lambda: got.append(computed(adapter)[0]))
            other.start()
            other.join(timeout=30)
            assert not other.is_alive()

    mine, *_ = computed(adapter, PendingQuestion(at=[1, 5, 9]))
    assert len(got) == 3
    for logits in got:
        torch.testing.assert_close(logits, expected, rtol=0, atol=0)
    torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-4)


def test_a_stop_is_noticed_within_one_layer_of_one_block():
    adapter = tiny_adapter()
    requested = threading.Event()
    noticed = []

    class Timed(Interrupting):
        def stop_requested(self):
            return requested.is_set()

        def wait_for_requests(self):
            noticed.append(time.perf_counter())
            requested.clear()

    asked = []

    def ask():
        for _ in range(5):
            time.sleep(0.02)
            asked.append(time.perf_counter())
            requested.set()
            while requested.is_set():
                time.sleep(0.001)

    asking = threading.Thread(target=ask)
    asking.start()
    with adapter.low_priority(Timed()):
        while asking.is_alive():
            ids = adapter.template.render(PROMPT).token_ids
            adapter.compute(adapter.new_cache(len(ids)), ids, adapter.rows(torch.arange(len(ids))))
    asking.join()
    assert len(noticed) == 5
    assert all(later > earlier for earlier, later in zip(asked, noticed, strict=True))


def test_flops_equal_those_of_the_librarys_matrix_products():
    adapter = tiny_adapter("llama")
    ids = adapter.template.render(PROMPT).token_ids
    low = Interrupting()
    counter = FlopCounterMode(display=False)
    with adapter.low_priority(low), counter:
        adapter.compute(adapter.new_cache(len(ids)), ids, adapter.rows(torch.arange(len(ids))))
    products = sum(
        count
        for operation, count in counter.get_flop_counts()["Global"].items()
        if operation in (torch.ops.aten.mm, torch.ops.aten.addmm)
    )
    cost = PassCost.of(adapter.model, adapter.geometry)
    layers, heads, width = 3, 4, 8
    attention = sum(4 * heads * width * (row + 1) for row in range(len(ids))) * layers
    assert low.flops == products + attention
    assert cost.flops(torch.tensor([0]), 0) == cost.per_row + layers * cost.per_key


def test_windows_bound_the_keys_and_only_used_experts_count():
    sliding = tiny_adapter("gemma3")
    windowed = PassCost.of(sliding.model, sliding.geometry)
    assert windowed.windows == (16, None, 16)
    far = windowed.flops(torch.tensor([99]), 0) - windowed.per_row
    assert far == windowed.per_key * (16 + 100 + 16)
    mixture = tiny_adapter("mixtral")  # 2 of 4 experts
    experts = sum(p.numel() for n, p in mixture.model.named_parameters() if ".experts." in n and p.dim() > 1)
    others = sum(
        p.numel()
        for n, p in mixture.model.named_parameters()
        if ".layers." in n and ".experts." not in n and p.dim() > 1
    )
    assert PassCost.of(mixture.model, mixture.geometry).per_row == 2 * (others + experts // 2)


def test_a_pass_waits_for_one_block_of_low_priority_at_most():
    """Though their thread takes the lock again as soon as it has released it."""
    lock, order, held = PassLock(), [], threading.Event()

    def work():
        for number in range(1000):
            with lock.held(low=True), lock.held(low=True):
                order.append("low")
                if number == 10:
                    held.set()
                    while not lock.wanted:
                        time.sleep(0.001)

    thread = threading.Thread(target=work)
    thread.start()
    assert held.wait(10)
    with lock.held(low=False):
        order.append("request")
    thread.join()
    assert order.index("request") == 11
    assert order.count("low") == 1000
