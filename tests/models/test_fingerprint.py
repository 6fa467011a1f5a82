"""What stored KV depends on changes the digest; nothing else does."""

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
