"""The digest changes with everything that stored KV depends on, and with nothing else."""

import pytest
import torch

from kvweave.models.fingerprint import fingerprint
from kvweave.testing import tiny_model, tiny_tokenizer


def test_equal_models_agree_and_names_do_not_matter():
    one = fingerprint(tiny_model(), tiny_tokenizer(), "a")
    other = fingerprint(tiny_model(), tiny_tokenizer(), "b")
    assert one.digest == other.digest


def test_one_changed_weight_changes_the_digest():
    model = tiny_model()
    before = fingerprint(model, tiny_tokenizer(), "a").digest
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] += 1e-3
    assert fingerprint(model, tiny_tokenizer(), "a").digest != before


def test_dtype_rope_tokenizer_and_family_change_the_digest():
    tokenizer = tiny_tokenizer()
    digests = {
        fingerprint(tiny_model(name), tokenizer, "a").digest
        for name in ("llama", "llama-3", "llama-yarn", "qwen2")
    }
    digests.add(fingerprint(tiny_model(dtype=torch.bfloat16), tokenizer, "a").digest)
    tokenizer.add_tokens(["zebra"])
    digests.add(fingerprint(tiny_model(), tokenizer, "a").digest)
    assert len(digests) == 6


@pytest.mark.parametrize(
    ("family", "changed"),
    [
        ("gemma3", {"layer_types": ["full_attention", "full_attention", "sliding_attention"]}),
        ("llama", {"rms_norm_eps": 1e-3}),
        ("llama", {"hidden_act": "gelu"}),
        ("granite", {"attention_multiplier": 0.5}),
        ("gemma2", {"query_pre_attn_scalar": 7}),
        ("olmoe", {"num_experts_per_tok": 1}),
        ("smollm3", {"no_rope_layers": [0, 1, 1]}),
        ("qwen2-sliding", {"sliding_window": 9}),
    ],
)
def test_a_setting_that_changes_the_computation_changes_the_digest(family, changed):
    model = tiny_model(family)
    before = fingerprint(model, tiny_tokenizer(), "a").digest
    for name, value in changed.items():
        assert hasattr(model.config, name)
        setattr(model.config, name, value)
    assert fingerprint(model, tiny_tokenizer(), "a").digest != before


def test_a_setting_without_effect_on_keys_and_values_does_not_change_it():
    model = tiny_model()
    before = fingerprint(model, tiny_tokenizer(), "a").digest
    model.config.transformers_version = "9.9"
    model.config.use_cache = False
    model.set_attn_implementation("eager")
    assert fingerprint(model, tiny_tokenizer(), "a").digest == before
