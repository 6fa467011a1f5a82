"""A persisted text resumes as if never interrupted; incomplete files are rejected."""

import errno
import json
import os
import shutil
from dataclasses import replace

import pytest
import torch
import xxhash
from safetensors.torch import load, save

from kvweave.decode.handoff import offload
from kvweave.decode.offloaded_cache import OffloadedCache
from kvweave.decode.persistence import persist, reset_files, resume
from kvweave.decode.settings import ClusterSettings, DiskSettings, OffloadSettings
from kvweave.errors import InvalidRequest, StoreError, StoreFull
from kvweave.testing import tiny_adapter
from support.processes import Program

N = 120
IDS = torch.randint(3, 260, (N,), generator=torch.Generator().manual_seed(3)).tolist()
KV = OffloadSettings(
    kv_budget=0.4,
    resident_bytes=90_000,
    strategy="dynakv",
    window=8,
    clusters=ClusterSettings(mean_entries=8, max_entries=16, buffer_entries=4, spread=0.8),
    disk=DiskSettings(page_bytes=512),
)


def begun(adapter, folder, kv=KV) -> OffloadedCache:
    kv_cache = adapter.new_cache(N)
    adapter.compute(kv_cache, IDS, adapter.rows(torch.arange(N)))
    return offload(adapter, kv_cache, IDS, kv, question_tokens=16, files=reset_files(folder))


def decode(adapter, cache, tokens) -> list[torch.Tensor]:
    return [adapter.step(cache, token) for token in tokens]


FIRST, SECOND = list(range(10, 40)), list(range(40, 75))


@pytest.fixture(scope="module")
def adapter():
    return tiny_adapter("qwen2")


@pytest.mark.parametrize("strategy", ["outline", "dynakv"])
@pytest.mark.parametrize("storage", ["exact", "int4"])
def test_a_resumed_text_continues_exactly_as_one_that_was_never_interrupted(
    adapter, tmp_path, strategy, storage
):
    kv = replace(KV, storage=storage, strategy=strategy)
    with begun(adapter, tmp_path / "whole", kv) as cache:
        decode(adapter, cache, FIRST)
        expected = decode(adapter, cache, SECOND)
        splits = cache.counts.splits
    with begun(adapter, tmp_path / "persisted", kv) as cache:
        decode(adapter, cache, FIRST)
        before = cache.counts.splits
        persist(cache, tmp_path / "persisted", [*IDS, *FIRST], adapter.fingerprint.digest)
    cache, tokens = resume(adapter, tmp_path / "persisted", KV.resident_bytes)
    with cache:
        assert tokens == [*IDS, *FIRST]
        got = decode(adapter, cache, SECOND)
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
        assert before + cache.counts.splits == splits
        assert (splits > before) == (strategy == "dynakv")


@pytest.fixture(scope="module")
def whole_budget(adapter, tmp_path_factory):
    """A text whose budget covers everything: the folder it was persisted in, and how one that was never interrupted goes on."""
    whole, folder = replace(KV, kv_budget=1.0), tmp_path_factory.mktemp("whole-budget")
    with begun(adapter, folder / "whole", whole) as cache:
        decode(adapter, cache, FIRST)
        expected = decode(adapter, cache, SECOND)
    with begun(adapter, folder / "persisted", whole) as cache:
        decode(adapter, cache, FIRST)
        persist(cache, folder / "persisted", [*IDS, *FIRST], adapter.fingerprint.digest)
    return folder / "persisted", expected


@pytest.mark.parametrize("bound", [None, 200_000, 60_000])
def test_a_resumed_text_keeps_to_the_new_limit(adapter, whole_budget, tmp_path, bound):
    """If the budget covers everything, the text is the same under any limit."""
    persisted, expected = whole_budget
    shutil.copytree(persisted, tmp_path / "persisted")
    cache, _ = resume(adapter, tmp_path / "persisted", bound)
    with cache:
        torch.testing.assert_close(decode(adapter, cache, SECOND), expected, atol=1e-4, rtol=1e-4)
        assert cache.counts.peak_resident_bytes <= (bound or 10**9)
        frames = cache.shared.store.page_cache.frames.count
        if bound == 60_000:
            assert frames < 60_000 // 512
        else:
            assert frames > KV.resident_bytes // 512


def test_a_limit_that_is_too_small_is_rejected_and_the_text_stays(adapter, tmp_path):
    with begun(adapter, tmp_path) as cache:
        persist(cache, tmp_path, IDS, adapter.fingerprint.digest)
    with pytest.raises(InvalidRequest, match="resident_bytes is 20000"):
        resume(adapter, tmp_path, 20_000)
    cache, tokens = resume(adapter, tmp_path, KV.resident_bytes)
    cache.close()
    assert tokens == IDS


def test_a_persisted_text_may_be_continued_but_not_resumed_then(adapter, tmp_path):
    with begun(adapter, tmp_path) as cache:
        persist(cache, tmp_path, IDS, adapter.fingerprint.digest)
        got = decode(adapter, cache, FIRST)
    with begun(adapter, tmp_path / "never-persisted") as cache:
        assert all(torch.equal(*pair) for pair in zip(got, decode(adapter, cache, FIRST), strict=True))
    with pytest.raises(StoreError, match="start again from the tokens"):
        resume(adapter, tmp_path, KV.resident_bytes)


def test_another_text_than_expected_is_rejected_and_stays(adapter, tmp_path):
    with begun(adapter, tmp_path) as cache:
        persist(cache, tmp_path, IDS, adapter.fingerprint.digest)
    with pytest.raises(StoreError, match=f"another text of {N} tokens"):
        resume(adapter, tmp_path, KV.resident_bytes, IDS[::-1])
    cache, _ = resume(adapter, tmp_path, KV.resident_bytes, IDS)
    cache.close()


def test_a_killed_process_leaves_nothing_that_can_be_resumed(adapter, tmp_path):
    with begun(adapter, tmp_path) as cache:
        persist(cache, tmp_path, IDS, adapter.fingerprint.digest)
    program = (
        "import sys, pathlib; from kvweave.testing import tiny_adapter; from kvweave.decode.persistence import resume\n"
        "adapter = tiny_adapter('qwen2'); cache, _ = resume(adapter, pathlib.Path(sys.argv[1]), 90_000)\n"
        "for token in range(10, 10_000): adapter.step(cache, 3 + token % 200); print(token, flush=True)\n"
    )
    with Program(["-c", program, tmp_path]) as running:
        for _ in range(5):
            assert running.stdout.readline()
        running.kill()
    with pytest.raises(StoreError, match="a process was ended while it decoded"):
        resume(adapter, tmp_path, KV.resident_bytes)


@pytest.mark.parametrize("name", ["clusters.pages", "centroids.pages"])
def test_a_file_that_was_cut_short_is_rejected(adapter, tmp_path, name):
    with begun(adapter, tmp_path) as cache:
        persist(cache, tmp_path, IDS, adapter.fingerprint.digest)
    os.truncate(tmp_path / name, (tmp_path / name).stat().st_size - 512)
    with pytest.raises(StoreError, match="cut short"):
        resume(adapter, tmp_path, KV.resident_bytes)


def test_a_flipped_bit_in_a_cluster_is_detected_on_reading(adapter, tmp_path):
    kv = replace(KV, kv_budget=1.0, strategy="outline", resident_bytes=None)
    with begun(adapter, tmp_path, kv) as cache:
        persist(cache, tmp_path, IDS, adapter.fingerprint.digest)
    flip(tmp_path / "clusters.pages", 40)
    with pytest.raises(StoreError, match="not what was written"):
        resume_and_decode(adapter, tmp_path)


def test_a_flipped_bit_in_the_centroids_is_detected_before_clusters_are_selected(adapter, tmp_path):
    with begun(adapter, tmp_path) as cache:
        persist(cache, tmp_path, IDS, adapter.fingerprint.digest)
    flip(tmp_path / "centroids.pages", 40)
    with pytest.raises(StoreError, match="centroids of layer 0 were read and are not what was written"):
        resume_and_decode(adapter, tmp_path)


def resume_and_decode(adapter, folder) -> None:
    cache, _ = resume(adapter, folder, KV.resident_bytes)
    with cache:
        decode(adapter, cache, FIRST)


def test_a_damaged_index_is_rejected(adapter, tmp_path):
    with begun(adapter, tmp_path) as cache:
        persist(cache, tmp_path, IDS, adapter.fingerprint.digest)
    flip(tmp_path / "index", 5000)
    with pytest.raises(StoreError, match="damaged"):
        resume(adapter, tmp_path, KV.resident_bytes)


def earlier(folder, layout: str) -> None:
    """Rewrite an index as the version did that had settings for what is a strategy's choice now."""
    content = (folder / "index").read_bytes()[8:]
    length = int.from_bytes(content[:8], "little")
    facts = json.loads(json.loads(content[8 : 8 + length])["__metadata__"]["facts"])
    facts["format"] = 4
    facts["settings"]["clusters"] |= {"split": "delayed", "local_entries": 128}
    facts["settings"]["flash"] |= {"order": "together", "layout": layout}
    facts["settings"]["residency"] = {"replacement": "lru", "prefetch": 0, "representatives": "resident"}
    content = save(load(content), {"facts": json.dumps(facts)})
    (folder / "index").write_bytes(xxhash.xxh3_64_digest(content) + content)


def test_a_text_of_an_earlier_version_resumes(adapter, tmp_path):
    with begun(adapter, tmp_path) as cache:
        persist(cache, tmp_path, IDS, adapter.fingerprint.digest)
    earlier(tmp_path, "packed")
    with pytest.raises(StoreError, match="in a layout that there is no more; start again"):
        resume(adapter, tmp_path, KV.resident_bytes)
    earlier(tmp_path, "dual-head")
    resumed, tokens = resume(adapter, tmp_path, KV.resident_bytes)
    with resumed:
        assert (tokens, resumed.settings) == (IDS, KV)


def test_another_model_is_rejected(adapter, tmp_path):
    with begun(adapter, tmp_path) as cache:
        persist(cache, tmp_path, IDS, adapter.fingerprint.digest)
    with pytest.raises(StoreError, match="another model"):
        resume(tiny_adapter("qwen2", seed=1), tmp_path, KV.resident_bytes)


def test_a_disk_too_full_for_the_index_leaves_none(adapter, tmp_path, monkeypatch):
    def refuse(path, parts):
        raise OSError(errno.ENOSPC, "No space left on device")

    with begun(adapter, tmp_path) as cache:
        monkeypatch.setattr("kvweave.decode.persistence.write_atomically", refuse)
        with pytest.raises(StoreFull, match="the index of the KV could not be written"):
            persist(cache, tmp_path, IDS, adapter.fingerprint.digest)
    with pytest.raises(StoreError, match="start again from the tokens"):
        resume(adapter, tmp_path, KV.resident_bytes)


def test_a_wrong_number_of_tokens_is_rejected(adapter, tmp_path):
    with (
        begun(adapter, tmp_path) as cache,
        pytest.raises(InvalidRequest, match=f"{N - 1} tokens were given for KV of {N}"),
    ):
        persist(cache, tmp_path, IDS[:-1], adapter.fingerprint.digest)


def flip(path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 4
    path.write_bytes(content)
