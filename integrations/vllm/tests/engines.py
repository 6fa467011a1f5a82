"""What the tests share: a vLLM in this process with kvweave in it, and kvweave's own engine over the same model and store."""

import os

import numpy as np
import torch

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
}  # read when vLLM is imported

import kvweave
import kvweave_vllm
from kvweave.recipes.methods import in_any_storage, recipe_named
from kvweave.recipes.recipe import run

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
        prompts, params = zip(*(_asked(body, max_tokens) for body in bodies), strict=True)
        replies = self.llm.generate(prompts, params, use_tqdm=False)
        return [first_logits(reply.outputs[0]) for reply in replies]

    def start(self, name, body, max_tokens=1):
        """Add a request; `step` runs it."""
        self.llm.llm_engine.add_request(name, *_asked(body, max_tokens))

    def step(self):
        """Run one step of vLLM; return the output of each request that got a token, by its name."""
        return {reply.request_id: reply.outputs[0] for reply in self.llm.llm_engine.step()}

    def finish(self):
        """Run steps until all requests have ended."""
        while self.llm.llm_engine.has_unfinished_requests():
            self.step()

    def forget(self):
        """Empty vLLM's own prefix cache."""
        assert self.llm.reset_prefix_cache()

    def close(self):
        from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

        self.llm.llm_engine.engine_core.shutdown()
        ensure_kv_transfer_shutdown()


def _asked(body, max_tokens):
    from vllm import SamplingParams

    extra = body.get("extra_body", {})
    salt = {"cache_salt": extra["cache_salt"]} if "cache_salt" in extra else {}
    own = {name: extra[name] for name in ("kv_transfer_params",) if name in extra}
    params = SamplingParams(
        max_tokens=max_tokens, temperature=0, logprobs=-1, ignore_eos=True, extra_args=own, detokenize=False
    )
    return {"prompt_token_ids": body["prompt"], **salt}, params


def first_logits(output):
    found = output.logprobs[0]
    logits = torch.empty(len(found))
    for token, value in found.items():
        logits[token] = value.logprob
    return logits


TOLERANCE = 2e-4
QUESTION, SYSTEM = "Where is the inn?", "Answer."
CHUNKS = tuple(text(number) for number in range(4))


class Case:
    """One model in both engines."""

    def __init__(self, folder, home, **settings):
        self.vllm = Vllm(folder, home, **settings)
        self.adapter = kvweave.load_model(str(folder), dtype="float32", device="cpu")
        self.store = kvweave.ChunkStore(self.vllm.store_folder)
        self.tokenizer = self.adapter.tokenizer

    def prepare(self, recipe, chunks=CHUNKS):
        bodies = kvweave_vllm.preparations(
            self.tokenizer,
            chunks,
            system=SYSTEM,
            recipe=recipe,
            context_tokens=self.vllm.llm.llm_engine.model_config.max_model_len,
            embed=by_length,
        )
        for body in bodies:
            self.vllm.generate(body)

    def body(self, recipe, chunks=CHUNKS, question=QUESTION, **budget):
        return kvweave_vllm.request(self.tokenizer, chunks, question, system=SYSTEM, recipe=recipe, **budget)

    def expected(self, recipe, chunks=CHUNKS, question=QUESTION, **budget):
        """Run a recipe in the transformers engine; store nothing."""
        prompt = self.adapter.template.render(kvweave.Prompt(question, tuple(chunks), SYSTEM))
        return run(in_any_storage(recipe_named(recipe)), self.adapter, self.store, prompt, **budget)

    def close(self):
        self.store.close()
        self.vllm.close()


def withhold(worker, rank, token_ids):
    """Let the store of one rank find no entry of a chunk; runs in the workers."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    store = get_kv_transfer_group()._store
    find = store._find

    def others(look_ups, *args, **more):
        known = [each for each in look_ups if tuple(each.token_ids) != token_ids]
        found = iter(find(known, *args, **more))
        return [next(found) if each in known else None for each in look_ups]

    if worker.rank == rank:
        store._find = others


def by_length(texts):
    """Similar texts have similar lengths, so that no embedding model is needed."""
    return np.array([[len(each), 1.0] for each in texts], dtype=np.float32)


def budget_of(recipe):
    return {"ratio": 0.2} if recipe_named(recipe).select.selective else {}


def close(found, expected, tolerance=TOLERANCE):
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=1e-5)


DIFFERENCES = {}
"""Largest difference between both engines' logits, and the largest logit, by model and recipe; `pytest -s` prints it."""


def record(model, recipe, found, expected):
    DIFFERENCES[model, recipe] = (found - expected).abs().max().item(), expected.abs().max().item()


def print_differences():
    for model in dict.fromkeys(model for model, _ in DIFFERENCES):
        own = {recipe: each for (name, recipe), each in DIFFERENCES.items() if name == model}
        worst = max(own, key=lambda recipe: own[recipe][0])
        largest = max(size for _, size in own.values())
        print(f"\n{model}: {own[worst][0]:.1e} of logits up to {largest:.0f} ({worst}; of {', '.join(own)})")
