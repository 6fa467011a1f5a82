"""Which layers are critical, against what each of them finds, written out."""

import math

import pytest
import torch

import kvweave
from kvweave.errors import InvalidRequest
from kvweave.recipes.methods import recipe_named
from kvweave.testing import tiny_adapter
from kvweave_lab.eval.samples import Sample
from kvweave_lab.eval.selection.layer_attention import profile_layers
from kvweave_lab.eval.selection.observe import observe_full, observe_stale

CHUNKS = ("1 the inn on the road was there when the rain began", "2 the river in the north ran near the inn")
HOW = (("a",), "string_match_all", 4)
SAMPLES = [Sample(name, "single", CHUNKS, f"Where is {name}?", *HOW) for name in "AB"]
TOO_LONG = Sample("C", "single", ("x" * 600,), "Where?", *HOW)


def test_a_layer_is_worth_what_its_question_rows_find_of_what_decoding_attends_to(tmp_path):
    adapter = tiny_adapter()
    found = profile_layers(adapter, [*SAMPLES, TOO_LONG], ratio=0.3, count=2)
    shares = torch.zeros(3)
    for sample in SAMPLES:
        prompt = adapter.template.render(kvweave.Prompt(sample.question, sample.chunks))
        full = observe_full(adapter, prompt, sample.max_new_tokens)
        with kvweave.ChunkStore(tmp_path / sample.name) as store:
            kvweave.prepare(adapter, store, sample.chunks)
            stale = observe_stale(recipe_named("reuse"), adapter, store, prompt)
        count = math.ceil(0.3 * full.context.tokens)
        wanted = {*full.decoding.mean(dim=0).argsort(descending=True, stable=True)[:count].tolist()}
        for layer in range(3):
            chosen = stale.attended.question[layer].argsort(descending=True, stable=True)[:count].tolist()
            shares[layer] += len(wanted & {*chosen}) / count / len(SAMPLES)
    assert found.found == pytest.approx(shares.tolist())
    assert found.critical_layers == tuple(sorted(shares.argsort(descending=True, stable=True)[:2].tolist()))
    assert (found.samples, found.ratio) == (2, 0.3)


def test_nothing_to_measure_is_refused():
    adapter = tiny_adapter()
    with pytest.raises(InvalidRequest, match="0 samples"):
        profile_layers(adapter, [])
    with pytest.raises(InvalidRequest, match="ratio 0"):
        profile_layers(adapter, SAMPLES, ratio=0)
