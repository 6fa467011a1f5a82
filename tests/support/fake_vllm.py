"""A stand-in for vLLM with the plug-in: serves /v1/completions, generates nothing, and records what it is asked."""

import threading
import time
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

from kvweave.models.fingerprint import configuration_part, tokenizer_part
from kvweave.models.loading import load_without_weights
from kvweave.remote.fields import DESCRIBE, Description, read_task
from kvweave.types import ModelFingerprint
from kvweave.version import __version__
from support.scripted_server import ScriptedServer, error, event, reply

MODELS, COMPLETIONS = "GET /v1/models", "POST /v1/completions"


def _local(model):
    with TemporaryDirectory() as home:
        return load_without_weights(model, Path(home))


def described(model="reference", **changes):
    """What a vLLM with this model says of itself; `changes` go to its fingerprint."""
    local = _local(model)
    parts = {
        "name": local.name,
        "weights": "w" * 32,
        "configuration": configuration_part(local.model),
        "tokenizer": tokenizer_part(local.tokenizer),
        "dtype": "float32",
        "digest": "d" * 32,
    }
    return Description(__version__, ModelFingerprint(**{**parts, **changes}), 1024)


class FakeVllm:
    """Replies with `text`, token by token, and then ends as vLLM does.

    Attributes:
        asked: the bodies of requests for answers.
        prepared: the bodies of requests that prepare a chunk.
        dies_after: how many tokens come before the connection breaks; None for all of the reply.
        refusal: (message, status, param) of the next replies; None to answer.
        cached_tokens: as it reports them; None if it does not.
        endless: whether the reply never ends by itself.
        gave_up: set when a reply ended before its last event.
    """

    def __init__(self, description, plugin=True, text=" walnut."):
        local = _local("reference")
        self.tokenizer, self.description, self.plugin, self.text = local.tokenizer, description, plugin, text
        self.asked, self.prepared = [], []
        self.dies_after, self.refusal, self.cached_tokens = None, None, None
        self.endless, self.gave_up = False, threading.Event()
        self._http = ScriptedServer(
            {MODELS: [reply({"data": [{"id": "served"}]})], COMPLETIONS: [self._complete]}
        )
        self.url = self._http.url

    @property
    def headers(self):
        """Those of the last request."""
        return self._http.requests[-1][1]

    def close(self):
        self._http.close()

    def _complete(self, body):
        params = body.get("kv_transfer_params") or {}
        if params.get("kvweave") == DESCRIBE:
            more = {"kvweave": asdict(self.description)} if self.plugin else {}
            return reply({"choices": [], **more})
        if self.refusal is not None:
            message, status, param = self.refusal
            status, headers, _ = error(message, status)
            said = {"message": message, "type": "BadRequestError", "param": param, "code": status}
            return reply({"error": said}, status, **headers)
        task = read_task(params, body["prompt"])
        if task.previous is not None:
            self.prepared.append(body)
            return reply({"choices": [{"index": 0, "text": "x", "finish_reason": "length"}]})
        self.asked.append(body)
        return 200, {"Content-Type": "text/event-stream"}, self._events(body)

    def _events(self, body):
        ids = [*self.tokenizer(self.text, add_special_tokens=False)["input_ids"], body["stop_token_ids"][0]]
        try:
            while self.endless:
                yield _data(
                    {"choices": [{"index": 0, "text": "", "token_ids": ids[:1], "finish_reason": None}]}
                )
                time.sleep(0.01)
            yield from self._whole(body, ids)
        except GeneratorExit:
            self.gave_up.set()
            raise

    def _whole(self, body, ids):
        length = len(ids) > body["max_tokens"]
        ids = ids[: body["max_tokens"]]
        for number, token in enumerate(ids):
            if number == self.dies_after:
                yield None
                return
            last = number == len(ids) - 1
            choice = {"index": 0, "text": "", "token_ids": [token], "logprobs": self._logprobs(body, token)}
            yield _data(
                {"choices": [{**choice, "finish_reason": ("length" if length else "stop") if last else None}]}
            )
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": len(ids)}
        if self.cached_tokens is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": self.cached_tokens}
        yield _data({"choices": [], "usage": usage})
        yield b"data: [DONE]\n\n"

    def _logprobs(self, body, token):
        if "logprobs" not in body:
            return None
        own = f"token_id:{token}"
        return {
            "tokens": [own],
            "token_logprobs": [-0.25],
            "top_logprobs": [{own: -0.25, "token_id:5": -2.0}],
        }


def _data(said):
    return event("", said).partition(b"\n")[2]


@contextmanager
def fake_vllm(description=None, **options):
    """Run a FakeVllm."""
    server = FakeVllm(description or described(), **options)
    try:
        yield server
    finally:
        server.close()
