"""What the tests share: a vLLM in this process with kvweave in it, and kvweave's own engine over the same model and store."""

import os

import torch

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
}

WORDS = "the river in the north and the inn on the road were there when the rain began again".split()


def text(number: int, words: int = 14) -> str:
    picks = torch.randint(len(WORDS), (words,), generator=torch.Generator().manual_seed(number)).tolist()
    return f"{number} " + " ".join(WORDS[i] for i in picks)


class Vllm:
    """A vLLM with kvweave; `generate` returns the logits (vocab,) of the first token after each prompt."""

    def __init__(self, folder, home, **settings):
        from vllm import LLM

        from kvweave_vllm.cli import connector_config

        own = {name: settings.pop(name) for name in ("max_rows", "store") if name in settings}
        self.store_folder = own.setdefault("store", str(home / "store"))
        self.llm = LLM(
            str(folder),
            dtype="float32",
            enforce_eager=True,
            worker_extension_cls="kvweave_vllm.connector.Extension",
            kv_transfer_config=connector_config(**own),
            max_logprobs=-1,
            logprobs_mode="raw_logits",
            **{
                "block_size": 32,
                "max_model_len": 512,
                "max_num_batched_tokens": 512,
                "max_num_seqs": 8,
                **settings,
            },
        )

    @property
    def weaver(self):
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group().weaver

    def generate(self, *bodies, max_tokens=1):
        """Run requests as one batch; a body is what `kvweave_vllm.request` returns."""
        from vllm import SamplingParams

        prompts, params = [], []
        for body in bodies:
            extra = body.get("extra_body", {})
            salt = {"cache_salt": extra["cache_salt"]} if "cache_salt" in extra else {}
            prompts.append({"prompt_token_ids": body["prompt"], **salt})
            own = {name: extra[name] for name in ("kv_transfer_params",) if name in extra}
            params.append(
                SamplingParams(
                    max_tokens=max_tokens, temperature=0, logprobs=-1, extra_args=own, detokenize=False
                )
            )
        replies = self.llm.generate(prompts, params, use_tqdm=False)
        return [_logits(reply.outputs[0]) for reply in replies]

    def forget(self):
        """Empty vLLM's own prefix cache."""
        assert self.llm.reset_prefix_cache()


def _logits(output):
    found = output.logprobs[0]
    logits = torch.empty(len(found))
    for token, value in found.items():
        logits[token] = value.logprob
    return logits
