"""Models with weights in fewer bits: what they compute, how they are named, and that every way of running them works."""

import copy
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM

import kvweave
from kvweave.errors import InvalidRequest, MissingExtra
from kvweave.models.adapter import Adapter
from kvweave.models.preemption import PassCost
from kvweave.models.quantised import QuantisedEmbedding, QuantisedLinear, quantise_weights, weight_bits
from kvweave.recipes.methods import METHODS
from kvweave.testing import FAMILIES, tiny_adapter, tiny_model, tiny_tokenizer
from kvweave.types import Prompt
from support.processes import run_program

CPU = torch.device("cpu")
IDS = torch.tensor([[5, 17, 200, 33, 8, 90, 41, 7]])


def quantised(family: str = "llama", bits: str = "int8", seed: int = 0) -> torch.nn.Module:
    model = tiny_model(family, seed=seed)
    quantise_weights(model, bits, CPU)
    return model


def expanded(module: torch.nn.Module) -> torch.Tensor:
    """Return the weight that a module's products say it has."""
    if isinstance(module, QuantisedEmbedding):
        return module(torch.arange(module.num_embeddings))
    bias = 0 if module.bias is None else module.bias
    return (module(torch.eye(module.in_features)) - bias).T.contiguous()


@pytest.mark.parametrize("bits", ["int8", "int4"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_computes_what_plain_transformers_does_with_the_same_values(family, bits):
    """The quantised weights, written back into the unmodified model, give the same logits."""
    model, plain = quantised(family, bits), tiny_model(family)
    with torch.no_grad():
        tables = dict(plain.named_modules())
        for name, module in model.named_modules():
            if isinstance(module, QuantisedLinear):
                if module.out_features == plain.config.get_text_config().vocab_size:
                    tables[name].weight = torch.nn.Parameter(expanded(module))  # no longer tied
                else:
                    tables[name].weight.copy_(expanded(module))
        for name, module in model.named_modules():
            if isinstance(module, QuantisedEmbedding):
                factor = getattr(tables[name], "embed_scale", torch.tensor(1.0))
                tables[name].weight = torch.nn.Parameter(expanded(module) / factor)
        found, expected = model(IDS).logits, plain(IDS).logits
    assert (found - expected).norm() < (0.02 if bits == "int8" else 0.05) * expected.norm()


@pytest.mark.parametrize("recipe", list(METHODS))
def test_every_recipe_runs_on_8_bits(recipe, tmp_path):
    adapter = Adapter(quantised(), tiny_tokenizer())
    prompt = Prompt("who?", ("the cat sat on the mat " * 3, "a dog ran " * 4, "no one came " * 3))
    with kvweave.ChunkStore(tmp_path) as store:
        kvweave.prepare(adapter, store, list(prompt.chunks), recipe=recipe)
        result = kvweave.prefill(adapter, store, prompt, recipe=recipe)
        assert torch.isfinite(result.logits).all()
        assert kvweave.generate(result, max_new_tokens=3).tokens


def test_recomputing_everything_is_full_attention_up_to_rounding(tmp_path):
    adapter = Adapter(quantised(), tiny_tokenizer())
    prompt = Prompt("who?", ("the cat sat on the mat " * 3, "a dog ran " * 4))
    with kvweave.ChunkStore(tmp_path) as store:
        full = kvweave.prefill(adapter, store, prompt, recipe="full").logits
        kvweave.prepare(adapter, store, list(prompt.chunks), recipe="prophetkv")
        again = kvweave.prefill(adapter, store, prompt, recipe="prophetkv", ratio=1.0).logits
    assert (full - again).norm() < 0.01 * full.norm()


def test_shapes_and_counts_are_those_of_the_full_model():
    full, small = tiny_adapter(), Adapter(quantised(), tiny_tokenizer())
    assert PassCost.of(small.model, small.geometry) == PassCost.of(full.model, full.geometry)
    assert small.geometry == full.geometry
    assert small.model.get_output_embeddings().weight.shape == full.model.get_output_embeddings().weight.shape


def test_fingerprints_tell_bits_weights_and_nothing_else_apart():
    of = {
        (bits, seed): Adapter(
            tiny_model(seed=seed) if bits == "full" else quantised(bits=bits, seed=seed), tiny_tokenizer()
        ).fingerprint
        for bits in ("full", "int8", "int4")
        for seed in (0, 1)
    }
    assert len({one.digest for one in of.values()}) == 6
    assert {bits: of[bits, 0].weight_bits for bits in ("full", "int8", "int4")} == {
        "full": "full",
        "int8": "int8",
        "int4": "int4",
    }
    assert of["full", 0].configuration == of["int8", 0].configuration


def test_fingerprints_are_the_same_in_another_process_and_without_integer_kernels(monkeypatch):
    script = (
        "import torch\n"
        "from kvweave.models.adapter import Adapter\n"
        "from kvweave.models.quantised import quantise_weights\n"
        "from kvweave.testing import tiny_model, tiny_tokenizer\n"
        "for bits in ('int8', 'int4'):\n"
        "    model = tiny_model()\n"
        "    quantise_weights(model, bits, torch.device('cpu'))\n"
        "    print(Adapter(model, tiny_tokenizer()).fingerprint.digest)"
    )
    other = run_program(["-c", script])
    assert other.returncode == 0, other.stderr
    monkeypatch.setattr("kvweave.ops.quantised_linear.has_integer_kernel", lambda: False)
    own = [Adapter(quantised(bits=bits), tiny_tokenizer()).fingerprint.digest for bits in ("int8", "int4")]
    assert other.stdout.split() == own


def test_the_full_weights_are_gone():
    model = quantised("gemma3")
    assert weight_bits(model) == "int8"
    assert all(parameter.dim() == 1 for parameter in model.parameters())  # norms alone
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())


def test_a_bfloat16_checkpoint_computes_in_float32_with_8_bits(tmp_path):
    tiny_model().to(torch.bfloat16).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    adapter = kvweave.load_model(str(tmp_path), weights="int8", device="cpu")
    assert adapter.geometry.dtype == torch.float32
    assert adapter.fingerprint.dtype == "float32"
    assert adapter.fingerprint.weight_bits == "int8"


def test_4_bits_hold_less_and_are_further_off():
    config = tiny_model().config
    config.update({"hidden_size": 64, "intermediate_size": 128, "head_dim": 16})
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        full, found = plain(IDS).logits, {}
        for bits in ("int8", "int4"):
            model = copy.deepcopy(plain)
            quantise_weights(model, bits, CPU)
            packed = [each.packed for each in model.modules() if isinstance(each, QuantisedLinear)]
            off = float((model(IDS).logits - full).norm() / full.norm())
            found[bits] = off, [each.bytes for each in packed], {type(each).__name__ for each in packed}
    assert found["int8"][0] < 0.15  # 16 bits of the rows, 7 of such wide random weights
    assert found["int8"][0] < found["int4"][0] < 0.5
    assert "_Int4" in found["int4"][2]
    assert sum(found["int4"][1]) < sum(found["int8"][1])


def test_small_layers_keep_their_weights():
    model = torch.nn.Sequential(torch.nn.Linear(64, 1), torch.nn.Linear(64, 64))
    model.get_output_embeddings = model.get_input_embeddings = lambda: None
    model.config = type("Config", (), {})()
    quantise_weights(model, "int8", CPU)
    assert [type(each) for each in model] == [torch.nn.Linear, QuantisedLinear]


def test_a_gpu_needs_torchao(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao", None)
    model = tiny_model()
    monkeypatch.setattr(type(model), "to", lambda self, *args: self)
    with pytest.raises(MissingExtra, match=r"pip install 'kvweave\[gpu-weights\]'"):
        quantise_weights(model, "int8", torch.device("cuda"))
    with pytest.raises(InvalidRequest, match="need a CPU or a CUDA GPU"):
        quantise_weights(model, "int8", torch.device("meta"))
