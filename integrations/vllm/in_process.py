"""For the measuring scripts: a vLLM in this process with kvweave in it, and how a script reports what it measured."""

import argparse
import json
import os
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvweave_lab.bench.measurement import current_environment


class InProcess:
    """A vLLM that takes prompts of `most_tokens` with their answers, each in one pass; chunk KV is in the folder `store`."""

    def __init__(self, model: str, dtype: str, store: str, most_tokens: int, **settings: Any) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # read when vLLM is imported, as the next two
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        from vllm import LLM

        from kvweave_vllm.cli import connector_config

        self.llm = LLM(
            model,
            dtype=dtype,
            enforce_eager=True,
            max_model_len=most_tokens,
            max_num_batched_tokens=most_tokens,
            worker_extension_cls="kvweave_vllm.connector.Extension",
            kv_transfer_config=connector_config(store=store),
            **settings,
        )

    def generate(self, body: dict[str, Any], tokens: int = 1, **sampling: Any) -> Any:
        """Return vLLM's output for the body of a request; greedy."""
        from vllm import SamplingParams

        extra = body.get("extra_body", {})
        prompt = {"prompt_token_ids": body["prompt"]}
        if "cache_salt" in extra:
            prompt["cache_salt"] = extra["cache_salt"]
        asked = {name: extra[name] for name in ("kv_transfer_params",) if name in extra}
        params = SamplingParams(max_tokens=tokens, temperature=0, extra_args=asked, **sampling)
        (reply,) = self.llm.generate([prompt], [params], use_tqdm=False)
        return reply.outputs[0]

    def forget(self) -> None:
        """Empty vLLM's prefix cache."""
        assert self.llm.reset_prefix_cache()

    def close(self) -> None:
        """End vLLM."""
        from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

        self.llm.llm_engine.engine_core.shutdown()
        ensure_kv_transfer_shutdown()


def report(script: str, args: argparse.Namespace, found: dict[str, Any]) -> None:
    """Print what a script measured, its arguments and the machine as JSON, and write it to `args.out` if that is given."""
    facts = asdict(current_environment(shlex.join([f"integrations/vllm/{script}", *sys.argv[1:]])))
    settings = {name: value for name, value in vars(args).items() if name != "out"}
    result = {**facts, "cpus": os.cpu_count(), **settings, "model": Path(args.model).name, **found}
    text = json.dumps(result, indent=1)
    print(text)
    if args.out is not None:
        args.out.write_text(text + "\n")
