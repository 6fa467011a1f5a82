"""The models that ship with kvweave, loaded once per process: tests only read them. And what they have prepared, once as well."""

import shutil
import weakref
from pathlib import Path

import numpy as np
import pytest


class TextsEncodedOnce:
    """The shipped embedding model; the sample documents' chunks are encoded once per process."""

    def __init__(self, model):
        self._model = model
        self._vectors = {}

    def __getattr__(self, name):
        return getattr(self._model, name)

    def encode(self, texts, **options):
        new = [text for text in dict.fromkeys(texts) if text not in self._vectors]
        if new:
            self._vectors.update(zip(new, self._model.encode(new, **options), strict=True))
        return np.stack([self._vectors[text] for text in texts])


@pytest.fixture(scope="session", autouse=True)
def models_loaded_once():
    """Whatever opens a shipped model gets the one that the process has loaded."""
    # Imported here, after TRITON_INTERPRET is set: kernels read it when they are defined.
    from kvweave import embedding
    from kvweave.config import default_home
    from kvweave.models import loading
    from kvweave.models.loading import read_layers

    adapters, encoders = {}, {}
    load_adapter, load_encoder = loading.load_any_model, embedding.MeanPooling

    def adapter(name=None, *, dtype="auto", weights="auto", device="auto", home=None):
        given = {"dtype": dtype, "weights": weights, "device": device, "home": home}
        name = name or loading.REFERENCE_NAME
        if name not in (loading.REFERENCE_NAME, loading.AUXILIARY_NAME):
            return load_adapter(name, **given)
        key = name, dtype, weights, device
        if key not in adapters:
            adapters[key] = load_adapter(name, **given)
        found = adapters[key]
        found.critical_layers = read_layers(home or default_home(), found.fingerprint, found.geometry.layers)
        return found

    class Encoder:
        describes = load_encoder.describes

        def __new__(cls, folder, weights):
            if embedding.WHEEL not in str(folder):
                return load_encoder(folder, weights)
            if not encoders:
                encoders[folder] = TextsEncodedOnce(load_encoder(folder, weights))
            return encoders[folder]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "load_any_model", adapter)
        patch.setattr(embedding, "MeanPooling", Encoder)
        yield


@pytest.fixture(scope="session")
def indexed_once(tmp_path_factory):
    """A folder with three sample `documents` and a `home` in which they are indexed, with chunks of 48 tokens: to be copied, not changed."""
    import kvweave
    from kvweave.samples import DOCUMENTS

    folder = tmp_path_factory.mktemp("indexed")
    documents = folder / "documents"
    documents.mkdir()
    for name in ("passwords.md", "badges.txt", "supper.md"):
        shutil.copy(DOCUMENTS / name, documents)
    with kvweave.open("default", home=folder / "home", chunk_tokens=48) as base:
        base.add(documents)
    return folder


@pytest.fixture
def indexed_home(environment, indexed_once):
    """The home of a test's commands, in which the three documents are indexed already: what `kvweave add` would have made."""
    return Path(shutil.copytree(indexed_once / "home", environment["KVWEAVE_HOME"], dirs_exist_ok=True))


_chunk_kv = weakref.WeakKeyDictionary()


@pytest.fixture
def chunks_computed_once(monkeypatch):
    """A model computes a chunk's KV once per process, for tests of what is done with it: `tests/recipes` checks the KV."""
    from kvweave.recipes.prepare import Isolated

    compute = Isolated.compute

    def once(prepare, ctx, chunk):
        known, key = _chunk_kv.setdefault(ctx.adapter.model, {}), (ctx.prefix, chunk)
        if key not in known:
            known[key] = compute(prepare, ctx, chunk)
        elif ctx.prefix:
            ctx.prefix_kv()  # computing the chunk's would have stored it
        return known[key]

    monkeypatch.setattr(Isolated, "compute", once)
