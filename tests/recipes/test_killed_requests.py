"""Preparing chunks and answering from them, in processes that are killed at random moments.

`KVWEAVE_KILL_ROUNDS=200` kills that often under each limit.
"""

import itertools
import os

import pytest
import torch

import kvweave
from kvweave.recipes.methods import recipe_named
from kvweave.testing import tiny_adapter
from support.killed_processes import victims

KILLS = int(os.environ.get("KVWEAVE_KILL_ROUNDS", "12"))
SYSTEM = "Answer."
AMPLE, SCARCE = 10**9, 400_000  # bytes; the second limit evicts most entries again


def texts(number):
    """Neighbouring numbers share chunks, so that entries are found and not only stored."""
    return [f"{n} {'the river in the north ' * (1 + n % 3)}" for n in range(number // 2, number // 2 + 3)]


def question(number):
    return kvweave.Prompt(f"Where is {number}?", tuple(texts(number)), system=SYSTEM)


def prepare_and_ask(adapter, acknowledge, folder, limit_bytes, first):
    with kvweave.ChunkStore(folder, limit_bytes=limit_bytes) as store:
        for number in itertools.count(first):
            kvweave.prepare(adapter, store, texts(number)[:2], recipe="reuse", system=SYSTEM)
            kvweave.prefill(adapter, store, question(number), recipe="prefix")  # stores the computed KV
            acknowledge(str(number))


@pytest.mark.timeout(30 * KILLS)
@pytest.mark.parametrize("limit_bytes", [AMPLE, SCARCE])
def test_entries_found_afterwards_give_full_attention(tmp_path, limit_bytes):
    """Every entry is whole, the limit holds, and the last acknowledged prompt gives full attention's logits."""
    adapter, full, answered = tiny_adapter(), recipe_named("full"), 0
    with victims(tmp_path, tiny_adapter, prepare_and_ask, seed=limit_bytes) as requests:
        for kill in range(KILLS):
            folder = tmp_path / f"kv-{kill // 10}"
            acknowledged = requests.killed_within(4, str(folder), limit_bytes, kill * 1000)
            answered += len(acknowledged)
            with kvweave.ChunkStore(folder) as store:
                report = store.verify()
                assert report.sound
                assert report.checked == store.stats().entries
                assert store.stats().bytes <= limit_bytes
                prompt = question(int(acknowledged[-1]) if acknowledged else kill * 1000)
                found = kvweave.prefill(adapter, store, prompt, recipe="prefix")
                if acknowledged and limit_bytes == AMPLE:  # none of its entries is lost
                    assert [span.origin for span in found.plan.spans] == ["exact"] * 4 + ["fresh"]
                expected = kvweave.prefill(adapter, store, prompt, recipe=full)
                torch.testing.assert_close(found.logits, expected.logits, rtol=1e-4, atol=1e-4)
    assert answered > KILLS
