"""What cannot work is refused when vLLM starts, in one line that names it."""

from types import SimpleNamespace

import pytest

pytest.importorskip(
    "vllm", reason="vLLM is not installed here; integrations/vllm/README.md says how to run these tests"
)

from kvweave_vllm import support


def text_config(rope):
    text = SimpleNamespace(rope_parameters=rope, max_position_embeddings=512)
    return SimpleNamespace(get_text_config=lambda decoder: text)


def config(**changes):
    model = SimpleNamespace(
        is_multimodal_model=False, use_mla=False, is_hybrid=False, has_inner_state=False, quantization=None,
        is_encoder_decoder=False, runner_type="generate", using_transformers_backend=lambda: False, hf_config=text_config({}),
    )  # fmt: skip
    parallel = SimpleNamespace(
        pipeline_parallel_size=1, data_parallel_size=1,
        decode_context_parallel_size=1, prefill_context_parallel_size=1,
    )  # fmt: skip
    whole = SimpleNamespace(
        model_config=model,
        parallel_config=parallel,
        lora_config=None,
        speculative_config=None,
        use_v2_model_runner=False,
    )
    for name, value in changes.items():
        holder = next(each for each in (model, parallel, whole) if hasattr(each, name))
        setattr(holder, name, value)
    return whole


def test_a_plain_configuration_is_accepted():
    support.check_config(config())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"pipeline_parallel_size": 2}, "pipeline parallelism"),
        ({"lora_config": object()}, "LoRA"),
        ({"is_multimodal_model": True}, "multimodal"),
        ({"use_mla": True}, "MLA"),
        ({"is_hybrid": True}, "recurrent"),
        ({"hf_config": text_config({"rope_type": "dynamic", "factor": 2.0})}, "depend on the length"),
        ({"quantization": "gptq"}, "quantised weights"),
        ({"use_v2_model_runner": True}, "VLLM_USE_V2_MODEL_RUNNER=0"),
        ({"using_transformers_backend": lambda: True}, "transformers"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(change, said):
    with pytest.raises(ValueError, match=said) as raised:
        support.check_config(config(**change))
    assert "\n" not in str(raised.value)


def test_another_version_of_vllm_is_refused(monkeypatch):
    monkeypatch.setattr(support.vllm, "__version__", "0.33.0")
    with pytest.raises(ValueError, match=r"0\.33\.0.*install 0\.32\.0"):
        support.check_config(config())


def test_a_backend_that_attends_before_it_writes_is_refused():
    backend = SimpleNamespace(forward_includes_kv_cache_update=True, get_name=lambda: "SOME_ATTN")
    group = SimpleNamespace(backend=backend, kernel_block_size=None, layer_names=[])
    compilation = SimpleNamespace(static_forward_context={})
    runner = SimpleNamespace(
        attn_groups=[[group]], vllm_config=SimpleNamespace(compilation_config=compilation)
    )
    with pytest.raises(ValueError, match="SOME_ATTN"):
        support.check_layers(runner)
