"""The digest changes with everything that stored KV depends on, and with nothing else."""

import pytest
import torch

import kvweave
from kvweave.models.fingerprint import fingerprint
from kvweave.testing import tiny_adapter, tiny_model, tiny_tokenizer


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


def _merge(model):
    model.model.layers[0].self_attn.k_proj.weight.data += 0.01  # as peft merges: not counted by torch


def _train(model):
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight[1, 1] += 0.01


def _replace(model):
    weight = model.model.layers[0].self_attn.k_proj.weight
    model.model.layers[0].self_attn.k_proj.weight = torch.nn.Parameter(weight.detach() * 1.5)


def _switch(model):
    model.peft_config = {}
    model.model.layers[0].self_attn.k_proj._active_adapter = ["other"]


@pytest.mark.parametrize("change", [_merge, _train, _replace, _switch])
def test_kv_of_weights_that_were_changed_under_a_loaded_model_is_not_used(change, tmp_path, caplog):
    adapter = tiny_adapter()
    prompt = kvweave.Prompt("Who?", ("One chunk of text.", "Another chunk."))
    with kvweave.ChunkStore(tmp_path) as store:
        kvweave.prepare(adapter, store, prompt.chunks)
        unchanged = adapter.fingerprint
        assert kvweave.prefill(adapter, store, prompt, ratio=0.0).plan.reused_tokens > 0
        assert adapter.fingerprint is unchanged
        change(adapter.model)
        after = kvweave.prefill(adapter, store, prompt, ratio=0.0)
        assert after.plan.reused_tokens == after.plan.exact_tokens == 0
        assert adapter.fingerprint.digest != unchanged.digest
        assert "were changed since it was loaded; KV of the earlier ones is not used" in caplog.text
        kvweave.prepare(adapter, store, prompt.chunks)
        again = kvweave.prefill(adapter, store, prompt, ratio=0.0)
        assert again.plan.reused_tokens + again.plan.exact_tokens > 0
