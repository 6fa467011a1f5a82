"""A text that is kept and resumed goes on as if nothing had happened; files that are not whole are refused."""

import errno
import os
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from kvweave.decode.handoff import enter
from kvweave.decode.offloaded_cache import OffloadedCache
from kvweave.decode.persistence import keep, new_files, resume
from kvweave.decode.settings import ClusterSettings, DiskSettings, OffloadSettings
from kvweave.errors import InvalidRequest, StoreError, StoreFull
from kvweave.testing import tiny_adapter

N = 120
IDS = torch.randint(3, 260, (N,), generator=torch.Generator().manual_seed(3)).tolist()
KV = OffloadSettings(
    kv_budget=0.4,
    resident_bytes=90_000,
    window=8,
    clusters=ClusterSettings(mean_entries=8, max_entries=16, buffer_entries=4, spread=0.8),
    flash=DiskSettings(page_bytes=512),
)


def begun(adapter, folder, kv=KV) -> OffloadedCache:
    kv_cache = adapter.new_cache(N)
    adapter.compute(kv_cache, IDS, adapter.rows(torch.arange(N)))
    return enter(adapter, kv_cache, IDS, kv, question_tokens=16, files=new_files(folder))


def say(adapter, held, tokens) -> list[torch.Tensor]:
    return [adapter.step(held, token) for token in tokens]


FIRST, SECOND = list(range(10, 40)), list(range(40, 75))


@pytest.fixture(scope="module")
def adapter():
    return tiny_adapter("qwen2")


def test_a_resumed_text_goes_on_exactly_as_one_that_was_never_interrupted(adapter, tmp_path):
    with begun(adapter, tmp_path / "whole") as held:
        say(adapter, held, FIRST)
        expected = say(adapter, held, SECOND)
        splits = held.counts.splits
    with begun(adapter, tmp_path / "kept") as held:
        say(adapter, held, FIRST)
        before = held.counts.splits
        keep(held, tmp_path / "kept", [*IDS, *FIRST], adapter.fingerprint.digest)
    held, tokens = resume(adapter, tmp_path / "kept", KV.resident_bytes)
    with held:
        assert tokens == [*IDS, *FIRST]
        got = say(adapter, held, SECOND)
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
        assert before + held.counts.splits == splits > before


@pytest.mark.parametrize("bound", [None, 200_000, 60_000])
def test_a_resumed_text_keeps_to_the_bound_of_who_resumes_it(adapter, tmp_path, bound):
    """With everything in the budget the text is the same under any bound."""
    whole = replace(KV, kv_budget=1.0)
    with begun(adapter, tmp_path / "whole", whole) as held:
        say(adapter, held, FIRST)
        expected = say(adapter, held, SECOND)
    with begun(adapter, tmp_path / "kept", whole) as held:
        say(adapter, held, FIRST)
        keep(held, tmp_path / "kept", [*IDS, *FIRST], adapter.fingerprint.digest)
    held, _ = resume(adapter, tmp_path / "kept", bound)
    with held:
        torch.testing.assert_close(say(adapter, held, SECOND), expected, atol=1e-4, rtol=1e-4)
        assert held.counts.peak_resident_bytes <= (bound or 10**9)
        frames = held.parts.store.residents.frames.count
        if bound == 60_000:
            assert frames < 60_000 // 512
        else:
            assert frames > KV.resident_bytes // 512


def test_a_bound_that_is_too_small_is_refused_and_the_text_stays(adapter, tmp_path):
    with begun(adapter, tmp_path) as held:
        keep(held, tmp_path, IDS, adapter.fingerprint.digest)
    with pytest.raises(InvalidRequest, match="resident_bytes is 20000"):
        resume(adapter, tmp_path, 20_000)
    held, tokens = resume(adapter, tmp_path, KV.resident_bytes)
    held.close()
    assert tokens == IDS


def test_a_text_that_was_kept_may_be_decoded_on_but_not_resumed_then(adapter, tmp_path):
    with begun(adapter, tmp_path) as held:
        keep(held, tmp_path, IDS, adapter.fingerprint.digest)
        got = say(adapter, held, FIRST)
    with begun(adapter, tmp_path / "never-kept") as held:
        assert all(torch.equal(*pair) for pair in zip(got, say(adapter, held, FIRST), strict=True))
    with pytest.raises(StoreError, match="start again from the tokens"):
        resume(adapter, tmp_path, KV.resident_bytes)


def test_another_text_than_expected_is_refused_and_stays(adapter, tmp_path):
    with begun(adapter, tmp_path) as held:
        keep(held, tmp_path, IDS, adapter.fingerprint.digest)
    with pytest.raises(StoreError, match=f"another text of {N} tokens"):
        resume(adapter, tmp_path, KV.resident_bytes, IDS[::-1])
    held, _ = resume(adapter, tmp_path, KV.resident_bytes, IDS)
    held.close()


def test_a_process_that_is_killed_leaves_nothing_that_is_taken_for_whole(adapter, tmp_path):
    with begun(adapter, tmp_path) as held:
        keep(held, tmp_path, IDS, adapter.fingerprint.digest)
    program = (
        "import sys, pathlib; from kvweave.testing import tiny_adapter; from kvweave.decode.persistence import resume\n"
        "adapter = tiny_adapter('qwen2'); held, _ = resume(adapter, pathlib.Path(sys.argv[1]), 90_000)\n"
        "for token in range(10, 10_000): adapter.step(held, 3 + token % 200); print(token, flush=True)\n"
    )
    running = subprocess.Popen([sys.executable, "-c", program, tmp_path], stdout=subprocess.PIPE, text=True)
    for _ in range(5):
        assert running.stdout.readline()
    running.send_signal(signal.SIGKILL)
    running.wait()
    running.stdout.close()
    with pytest.raises(StoreError, match="a process was ended while it decoded"):
        resume(adapter, tmp_path, KV.resident_bytes)


@pytest.mark.parametrize("name", ["clusters.pages", "centroids.pages"])
def test_a_file_that_was_cut_short_is_refused(adapter, tmp_path, name):
    with begun(adapter, tmp_path) as held:
        keep(held, tmp_path, IDS, adapter.fingerprint.digest)
    os.truncate(tmp_path / name, (tmp_path / name).stat().st_size - 512)
    with pytest.raises(StoreError, match="cut short"):
        resume(adapter, tmp_path, KV.resident_bytes)


def test_a_flipped_bit_in_a_cluster_is_found_when_it_is_read(adapter, tmp_path):
    kv = OffloadSettings(1.0, window=8, clusters=KV.clusters, flash=KV.flash)
    with begun(adapter, tmp_path, kv) as held:
        keep(held, tmp_path, IDS, adapter.fingerprint.digest)
    flip(tmp_path / "clusters.pages", 40)
    with pytest.raises(StoreError, match="not what was written"):
        go_on(adapter, tmp_path)


def test_a_flipped_bit_in_the_centroids_is_found_before_clusters_are_chosen_by_them(adapter, tmp_path):
    with begun(adapter, tmp_path) as held:
        keep(held, tmp_path, IDS, adapter.fingerprint.digest)
    flip(tmp_path / "centroids.pages", 40)
    with pytest.raises(StoreError, match="centroids of layer 0 were read and are not what was written"):
        go_on(adapter, tmp_path)


def go_on(adapter, folder) -> None:
    held, _ = resume(adapter, folder, KV.resident_bytes)
    with held:
        say(adapter, held, FIRST)


def test_a_damaged_index_is_refused(adapter, tmp_path):
    with begun(adapter, tmp_path) as held:
        keep(held, tmp_path, IDS, adapter.fingerprint.digest)
    flip(tmp_path / "index", 5000)
    with pytest.raises(StoreError, match="damaged"):
        resume(adapter, tmp_path, KV.resident_bytes)


def test_another_model_is_refused(adapter, tmp_path):
    with begun(adapter, tmp_path) as held:
        keep(held, tmp_path, IDS, adapter.fingerprint.digest)
    with pytest.raises(StoreError, match="another model"):
        resume(tiny_adapter("qwen2", seed=1), tmp_path, KV.resident_bytes)


def test_a_disk_without_room_for_the_index_leaves_none(adapter, tmp_path, monkeypatch):
    def refuse(path, parts):
        raise OSError(errno.ENOSPC, "No space left on device")

    with begun(adapter, tmp_path) as held:
        monkeypatch.setattr("kvweave.decode.persistence.write_atomically", refuse)
        with pytest.raises(StoreFull, match="the index of the KV could not be written"):
            keep(held, tmp_path, IDS, adapter.fingerprint.digest)
    with pytest.raises(StoreError, match="start again from the tokens"):
        resume(adapter, tmp_path, KV.resident_bytes)


def test_tokens_that_are_not_the_texts_are_refused(adapter, tmp_path):
    with (
        begun(adapter, tmp_path) as held,
        pytest.raises(InvalidRequest, match=f"{N - 1} tokens were given for KV of {N}"),
    ):
        keep(held, tmp_path, IDS[:-1], adapter.fingerprint.digest)


def flip(path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 4
    path.write_bytes(content)
