"""Names of GGUF models, and the folders they are converted into: once per file, whole or not at all."""

import hashlib
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch

import kvweave
from kvweave.errors import InvalidRequest, ModelNotFound, StoreError, StoreFull
from kvweave.files import try_lock
from kvweave.models.gguf import conversions, convert
from kvweave.models.gguf.conversions import Conversions, file_stamps, reporting
from kvweave.models.source import choose_model, gguf_folder
from kvweave.testing import tiny_tokenizer
from support.gguf_files import write_gguf
from support.processes import child_processes


@pytest.fixture
def model(tmp_path):
    """A GGUF file alone in a folder."""
    path = tmp_path / "models" / "tiny.gguf"
    path.parent.mkdir()
    write_gguf(path)
    return path


@pytest.fixture
def home(tmp_path):
    return tmp_path / "home"


def converted(name: str | Path, home: Path) -> Path:
    found = gguf_folder(str(name), home)
    assert found is not None
    return Path(found.place)


def count_calls(monkeypatch: pytest.MonkeyPatch, owner: object, name: str) -> list[object]:
    calls: list[object] = []
    original: Callable[..., object] = getattr(owner, name)

    def counted(*given: object) -> object:
        calls.append(given)
        return original(*given)

    monkeypatch.setattr(owner, name, counted)
    return calls


# Names


def test_a_file_or_its_folder_names_the_model_from_any_working_directory(model, home, monkeypatch):
    by_file = kvweave.load_model(str(model), home=home)
    assert by_file.fingerprint.name == str(model)
    assert kvweave.load_model(str(model.parent), home=home).fingerprint == by_file.fingerprint
    monkeypatch.chdir(model.parent)
    assert kvweave.load_model("tiny.gguf", home=home).fingerprint == by_file.fingerprint
    assert kvweave.load_model(".", home=home).fingerprint == by_file.fingerprint


def test_a_file_without_the_suffix_is_known_by_its_first_bytes(model, home):
    blob = model.rename(model.parent / "sha256-12ab")  # as Ollama names them
    assert kvweave.load_model(str(blob), home=home).fingerprint.name == str(blob)


def test_a_folder_with_several_models_is_refused_with_the_list(model, home):
    shutil.copy(model, model.parent / "other-Q8_0.gguf")
    with pytest.raises(
        InvalidRequest, match=r"holds 2 models; name one of them: other-Q8_0\.gguf, tiny\.gguf"
    ):
        kvweave.load_model(str(model.parent), home=home)


def test_what_lies_beside_a_model_is_none(model, home):
    for name in ("mmproj-tiny-f16.gguf", "imatrix.gguf", "README.md"):
        (model.parent / name).write_bytes(b"GGUF")
    assert gguf_folder(str(model.parent), home).name == str(model)


def test_a_folder_of_transformers_is_left_alone_whatever_else_is_in_it(model, home):
    kvweave.testing.tiny_model().save_pretrained(model.parent)
    tiny_tokenizer().save_pretrained(model.parent)
    assert gguf_folder(str(model.parent), home) is None
    adapter = kvweave.load_model(str(model.parent), home=home)
    assert adapter.fingerprint.name == str(model.parent)
    assert not (home / "models" / "gguf").exists()


def test_a_file_that_is_not_there(model, home):
    with pytest.raises(ModelNotFound, match=r"missing\.gguf does not exist; name the GGUF file where it is"):
        kvweave.load_model(str(model.parent / "missing.gguf"), home=home)


def test_quantised_weights_and_their_originals_never_mix(tmp_path, home):
    original = write_gguf(tmp_path / "whole.gguf")
    write_gguf(tmp_path / "small.gguf", kind="Q8_0")
    original.save_pretrained(tmp_path / "folder")
    shutil.copy(converted(tmp_path / "whole.gguf", home) / "tokenizer.json", tmp_path / "folder")
    names = [tmp_path / "folder", tmp_path / "whole.gguf", tmp_path / "small.gguf"]
    found = [kvweave.load_model(str(name), home=home, dtype="float32").fingerprint for name in names]
    assert found[0].weights == found[1].weights != found[2].weights
    assert found[2].digest not in {found[0].digest, found[1].digest}


# The hub


class Hub:
    """Stands for huggingface_hub: a repository that is a folder, and whether it can be reached."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.reached, self.downloaded = folder, True, list[str]()
        folder.mkdir()
        monkeypatch.setattr(huggingface_hub, "list_repo_files", self.list_files)
        monkeypatch.setattr(huggingface_hub, "hf_hub_download", self.download)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", self.snapshot)

    def list_files(self, repo: str) -> list[str]:
        if not self.reached:
            raise huggingface_hub.errors.OfflineModeIsEnabled("offline")
        if repo != "someone/tiny-GGUF":
            raise OSError(f"404: no repository {repo}")
        return [path.relative_to(self.folder).as_posix() for path in self.folder.rglob("*.*")]

    def download(self, repo: str, name: str) -> str:
        self.downloaded.append(name)
        return str(self.folder / name)

    def snapshot(self, repo: str, *, local_files_only: bool) -> str:
        assert local_files_only
        if not self.downloaded or repo != "someone/tiny-GGUF":
            raise huggingface_hub.errors.LocalEntryNotFoundError("nothing")
        return str(self.folder)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    hub = Hub(tmp_path / "hub", monkeypatch)
    for name, kind in {"tiny-Q8_0.gguf": "Q8_0", "tiny-F16.gguf": "F16"}.items():
        write_gguf(hub.folder / name, kind=kind)
    return hub


def test_a_quantisation_on_the_hub_names_a_model(hub, home):
    adapter = kvweave.load_model("someone/tiny-GGUF:f16", home=home)
    assert adapter.fingerprint.name == "someone/tiny-GGUF:f16"
    assert hub.downloaded == ["tiny-F16.gguf"]
    assert converted("someone/tiny-GGUF", home) == converted(hub.folder / "tiny-Q8_0.gguf", home)
    with pytest.raises(
        ModelNotFound, match=r"no GGUF model of quantisation Q2_K; it has tiny-F16\.gguf, tiny-Q8"
    ):
        kvweave.load_model("someone/tiny-GGUF:Q2_K", home=home)
    with pytest.raises(ModelNotFound, match=r"repository someone/other cannot be listed.*404: no repository"):
        kvweave.load_model("someone/other:Q8_0", home=home)


def test_a_model_from_the_hub_is_used_again_without_the_hub(hub, home):
    found = converted("someone/tiny-GGUF:Q8_0", home)
    hub.reached = False
    hub.downloaded.clear()
    assert converted("someone/tiny-GGUF:Q8_0", home) == found
    assert not hub.downloaded
    hub.downloaded.append("earlier")  # downloaded by another program, and not converted
    assert converted("someone/tiny-GGUF:F16", home) != found


def test_all_parts_of_a_split_model_are_downloaded(hub, home):
    write_gguf(hub.folder / "tiny-BF16.gguf", kind="BF16", parts=2)
    converted("someone/tiny-GGUF:BF16", home)
    assert hub.downloaded == ["tiny-BF16-00001-of-00002.gguf", "tiny-BF16-00002-of-00002.gguf"]


@pytest.mark.parametrize(
    ("quant", "files", "chosen"),
    [
        (None, ["a-Q8_0.gguf", "a-Q4_K_M.gguf"], "a-Q4_K_M.gguf"),
        (None, ["a-F16.gguf", "a-Q8_0.gguf"], "a-Q8_0.gguf"),
        (None, ["b-F16.gguf", "a-BF16.gguf"], "a-BF16.gguf"),
        ("q4_k_m", ["a-Q4_K_M.gguf", "a-Q4_K_S.gguf"], "a-Q4_K_M.gguf"),
        ("F16", ["mmproj-a-F16.gguf", "a-F16.gguf"], "a-F16.gguf"),
        ("Q4_K_M", ["Q4_K_M/a-Q4_K_M-00002-of-00002.gguf", "Q4_K_M/a-Q4_K_M-00001-of-00002.gguf"],
         "Q4_K_M/a-Q4_K_M-00001-of-00002.gguf"),
        ("Q4", ["a-Q4_K_M.gguf"], None),
        (None, ["model.safetensors"], None),
    ],
)  # fmt: skip
def test_the_file_is_chosen_as_llama_cpp_does(quant, files, chosen):
    assert choose_model(files, quant) == chosen


# Once per file


def test_an_unchanged_file_is_converted_and_read_once(model, home, monkeypatch):
    reads = count_calls(monkeypatch, conversions, "_sha256")
    conversions_made = count_calls(monkeypatch, convert.Conversion, "write")
    folder = converted(model, home)
    assert folder.name.startswith(hashlib.sha256(model.read_bytes()).hexdigest())
    assert converted(model, home) == folder
    assert (len(reads), len(conversions_made)) == (1, 1)
    copy = shutil.copy(model, model.parent / "copy.gguf")
    assert converted(copy, home) == folder
    assert (len(reads), len(conversions_made)) == (2, 1)


def test_a_changed_file_is_converted_again(model, home):
    before = converted(model, home)
    write_gguf(model, "qwen2")
    assert converted(model, home) != before
    assert kvweave.load_model(str(model), home=home).model.config.model_type == "qwen2"


def test_a_file_with_the_same_size_and_time_but_another_inode_is_read_again(model, home, monkeypatch):
    converted(model, home)
    reads = count_calls(monkeypatch, conversions, "_sha256")
    times = model.stat()
    shutil.copy(model, model.parent / "copy")
    (model.parent / "copy").replace(model)
    os.utime(model, ns=(times.st_atime_ns, times.st_mtime_ns))
    converted(model, home)
    assert len(reads) == 1


def test_a_damaged_memory_of_a_file_is_written_again(model, home):
    folder = converted(model, home)
    (memory,) = (home / "models" / "gguf" / "files").iterdir()
    memory.write_text("[1, 2")
    assert converted(model, home) == folder


def test_progress_is_reported(model, home):
    stages = []
    with reporting(lambda stage, done, total: stages.append((stage, done == total))):
        converted(model, home)
        converted(model, home)
    assert {stage for stage, _ in stages} == {"reading the GGUF file (MB)", "converting the GGUF file (MB)"}
    assert stages[-1][1]


# Whole or not at all


def test_a_conversion_that_fails_leaves_nothing(model, home, monkeypatch):
    def fail(*given: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(convert, "write_weights", fail)
    with pytest.raises(StoreFull, match="no room for the converted model"):
        converted(model, home)
    assert not [path for path in (home / "models" / "gguf").iterdir() if path.is_dir()]


def test_a_disk_with_too_little_room_is_found_before(model, home, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(total=10, used=5, free=5))
    with pytest.raises(StoreFull, match=r"needs 0\.0 GB; make room, or name a --home"):
        converted(model, home)


def test_a_file_that_changes_while_it_is_converted_is_not_kept(model, home, monkeypatch):
    write = convert.write_weights

    def touch(*given: object) -> None:
        write(*given)
        model.touch()

    monkeypatch.setattr(convert, "write_weights", touch)
    with pytest.raises(StoreError, match="changed while it was read"):
        converted(model, home)
    assert not [path for path in (home / "models" / "gguf").iterdir() if path.is_dir()]


def _stop_before_the_end(model: str, home: str) -> None:
    def halt(*given: object) -> None:
        os.kill(os.getpid(), 9)

    convert.build_tokenizer = halt
    gguf_folder(model, Path(home))


def _convert(model: str, home: str, begin: float) -> None:
    time.sleep(max(0.0, begin - time.time()))
    gguf_folder(model, Path(home))


def test_a_killed_conversion_is_swept_and_never_taken_for_whole(model, home):
    victim = child_processes().Process(target=_stop_before_the_end, args=(str(model), str(home)))
    victim.start()
    victim.join(100)
    assert victim.exitcode == -9
    left = [path for path in (home / "models" / "gguf").iterdir() if path.is_dir()]
    assert len(left) == 1
    assert ".tmp-" in left[0].name
    assert not Conversions(home).all()
    converted(model, home)
    assert not list((home / "models" / "gguf").glob("*.tmp-*"))
    assert len(Conversions(home).all()) == 1


def test_two_processes_at_once_make_one_whole_folder(model, home):
    begin = time.time() + 8
    pair = [child_processes().Process(target=_convert, args=(str(model), str(home), begin)) for _ in range(2)]
    for process in pair:
        process.start()
    for process in pair:
        process.join(200)
    assert [process.exitcode for process in pair] == [0, 0]
    assert not list((home / "models" / "gguf").glob("*.tmp-*"))
    assert Conversions(home).find(str(model), file_stamps([model])) == converted(model, home)


def test_a_process_waits_for_the_one_that_converts(model, home):
    home.joinpath("models/gguf").mkdir(parents=True)
    with try_lock(home / "models" / "gguf" / "convert.lock") as held:
        assert held
        other = child_processes().Process(target=_convert, args=(str(model), str(home), 0.0))
        other.start()
        other.join(6)
        assert other.exitcode is None
        assert not Conversions(home).all()
    other.join(100)
    assert other.exitcode == 0
    assert len(Conversions(home).all()) == 1


# After the file


def test_a_model_whose_file_is_gone_is_used_as_converted_and_says_so(model, home, caplog):
    before = kvweave.load_model(str(model), home=home).fingerprint
    model.unlink()
    assert kvweave.load_model(str(model), home=home).fingerprint == before
    assert "tiny.gguf does not exist any more; using what it was converted into" in caplog.text


def test_clearing_leaves_what_could_not_be_made_again(model, home):
    other = model.parent / "other.gguf"
    write_gguf(other, "qwen2")
    kept, gone = converted(model, home), converted(other, home)
    model.unlink()
    deleted, left = Conversions(home).clear()
    assert [each.folder for each in deleted] == [gone]
    assert [each.folder for each in left] == [kept]
    assert left[0].names == (str(model),)
    assert left[0].bytes == sum(path.stat().st_size for path in kept.iterdir())
    assert converted(other, home) == gone
    assert torch.equal(
        kvweave.load_model(str(other), home=home).model.lm_head.weight,
        kvweave.testing.tiny_model("qwen2").lm_head.weight,
    )


def test_an_older_version_of_a_conversion_is_swept_and_a_newer_one_left(model, home):
    for name in ("ab-v0", "ab-v999"):
        (home / "models" / "gguf" / name).mkdir(parents=True)
    converted(model, home)
    assert {path.name.rpartition("-v")[2] for path in (home / "models" / "gguf").glob("*-v*")} == {"1", "999"}
