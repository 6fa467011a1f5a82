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
from kvweave.decode.persistence import persist, reset_file, resume
from kvweave.decode.settings import ClusterSettings, DiskSettings, OffloadSettings
from kvweave.errors import InvalidRequest, StoreError, StoreFull
from kvweave.testing import tiny_adapter
from support.processes import Program

N = 120
IDS = torch.randint(3, 260, (N,), generator=torch.Generator().manual_seed(3)).tolist()
KV = OffloadSettings(
    kv_budget=0.4,
    resident_bytes=90_000,
    window=8,
    clusters=ClusterSettings(mean_entries=8, max_entries=16),
    disk=DiskSettings(page_bytes=512),
)


def begun(adapter, folder, kv=KV) -> OffloadedCache:
    kv_cache = adapter.new_cache(N)
    adapter.compute(kv_cache, IDS, adapter.rows(torch.arange(N)))
    return offload(adapter, kv_cache, IDS, kv, question_tokens=16, path=reset_file(folder))


def decode(adapter, cache, tokens) -> list[torch.Tensor]:
    return [adapter.step(cache, token) for token in tokens]


FIRST, SECOND = list(range(10, 40)), list(range(40, 75))


@pytest.fixture(scope="module")
def adapter():
    return tiny_adapter("qwen2")


@pytest.mark.parametrize("storage", ["exact", "int4"])
def test_a_resumed_text_continues_exactly_as_one_that_was_never_interrupted(adapter, tmp_path, storage):
    kv = replace(KV, storage=storage)
    with begun(adapter, tmp_path / "whole", kv) as cache:
        decode(adapter, cache, FIRST)
        expected = decode(adapter, cache, SECOND)
    with begun(adapter, tmp_path / "persisted", kv) as cache:
        decode(adapter, cache, FIRST)
        persist(cache, tmp_path / "persisted", [*IDS, *FIRST], adapter.fingerprint.digest)
    cache, tokens = resume(adapter, tmp_path / "persisted", KV.resident_bytes)
    with cache:
        assert tokens == [*IDS, *FIRST]
        got = decode(adapter, cache, SECOND)
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


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


def test_a_file_that_was_cut_short_is_rejected(adapter, tmp_path):
    with begun(adapter, tmp_path) as cache:
        persist(cache, tmp_path, IDS, adapter.fingerprint.digest)
    os.truncate(tmp_path / "clusters.pages", (tmp_path / "clusters.pages").stat().st_size - 512)
    with pytest.raises(StoreError, match="cut short"):
        resume(adapter, tmp_path, KV.resident_bytes)


def test_a_flipped_bit_in_a_cluster_is_detected_on_reading(adapter, tmp_path):
    kv = replace(KV, kv_budget=1.0, resident_bytes=None)
    with begun(adapter, tmp_path, kv) as cache:
        persist(cache, tmp_path, IDS, adapter.fingerprint.digest)
    flip(tmp_path / "clusters.pages", 40)
    with pytest.raises(StoreError, match="not what was written"):
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


def rewritten(folder, change) -> None:
    """Change the facts and the tensors of an index."""
    content = (folder / "index").read_bytes()[8:]
    length = int.from_bytes(content[:8], "little")
    facts = json.loads(json.loads(content[8 : 8 + length])["__metadata__"]["facts"])
    tensors = load(content)
    change(facts, tensors)
    content = save(tensors, {"facts": json.dumps(facts)})
    (folder / "index").write_bytes(xxhash.xxh3_64_digest(content) + content)


def format_6(facts, tensors) -> None:
    """As the version wrote it whose tables had variances, and whose settings those of other strategies."""
    facts["format"] = 6
    facts["settings"]["clusters"] |= {"spread": 1.5, "candidates": None, "buffer_entries": 16}
    facts["bytes"].append(0)
    facts["centroids"] = [[0, 0, 0, 0] for _ in facts["layers"]]
    for name in [name for name in tensors if name.endswith("table.full")]:
        layer = name.split(".")[0]
        tensors[f"{layer}.table.flagged"] = tensors.pop(name)
        tensors[f"{layer}.table.variances"] = torch.zeros(tensors[f"{layer}.table.sizes"].shape)


def test_a_text_of_the_version_before_resumes(adapter, tmp_path):
    with begun(adapter, tmp_path / "whole") as cache:
        decode(adapter, cache, FIRST)
        expected = decode(adapter, cache, SECOND)
    with begun(adapter, tmp_path / "kept") as cache:
        decode(adapter, cache, FIRST)
        persist(cache, tmp_path / "kept", [*IDS, *FIRST], adapter.fingerprint.digest)
    rewritten(tmp_path / "kept", format_6)
    (tmp_path / "kept" / "centroids.pages").touch()
    cache, tokens = resume(adapter, tmp_path / "kept", KV.resident_bytes)
    with cache:
        assert (tokens, cache.settings) == ([*IDS, *FIRST], KV)
        got = decode(adapter, cache, SECOND)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert not (tmp_path / "kept" / "centroids.pages").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda facts, tensors: facts.update(format=5), "was written in format 5; this version reads 6 to 7"),
        (lambda facts, tensors: facts["settings"].update(strategy="dynakv"), "made by strategy 'dynakv'"),
        (
            lambda facts, tensors: facts["settings"]["flash"].update(layout="packed"),
            "in a layout that there is no more; start again",
        ),
    ],
)
def test_a_text_that_this_version_cannot_go_on_with_is_rejected(adapter, tmp_path, change, message):
    with begun(adapter, tmp_path) as cache:
        persist(cache, tmp_path, IDS, adapter.fingerprint.digest)
    rewritten(tmp_path, change)
    with pytest.raises(StoreError, match=message):
        resume(adapter, tmp_path, KV.resident_bytes)


def test_a_text_of_another_strategy_is_not_kept(adapter, tmp_path):
    with (
        begun(adapter, tmp_path, replace(KV, strategy="static")) as cache,
        pytest.raises(InvalidRequest, match="a text of strategy 'static' cannot be kept"),
    ):
        persist(cache, tmp_path, IDS, adapter.fingerprint.digest)


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
