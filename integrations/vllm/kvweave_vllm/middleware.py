"""`--middleware` of `vllm serve`: refuses requests whose field `kvweave` cannot be honoured, before vLLM sees them.

It also answers those that ask what is served.
"""

import json
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import asdict
from typing import Any

from kvweave.kvstore.chunk_store import ChunkStore
from kvweave.remote.fields import DESCRIBE, FIELD, SALT, Description, InvalidField, read_task
from kvweave.version import __version__
from kvweave_vllm.model import Served, open_store

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class RequestCheck:
    """ASGI middleware that answers such a request as OpenAI's API does: status 400, with the field as `param`."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._app = app
        self._stored: tuple[Served, ChunkStore] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass everything on but a request with an error."""
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        messages = [await receive()]
        while messages[-1].get("more_body"):
            messages.append(await receive())
        try:
            description = self._check(b"".join(each.get("body", b"") for each in messages), scope)
        except InvalidField as error:
            said = {"message": str(error), "type": "BadRequestError", "param": error.field, "code": 400}
            await _answer(400, {"error": said}, send)
            return
        if description is not None:
            await _answer(200, description, send)
            return

        async def replay() -> MutableMapping[str, Any]:
            return messages.pop(0) if messages else await receive()

        await self._app(scope, replay, send)

    def _check(self, body: bytes, scope: Scope) -> dict[str, Any] | None:
        """Return the reply to a request that asks what is served; None for any other, if nothing is wrong with it."""
        if b'"kvweave"' not in body:
            return None
        try:
            sent = json.loads(body)
            params = sent.get("kv_transfer_params")
        except (ValueError, AttributeError):
            return None  # vLLM says what is wrong with it
        if not isinstance(params, dict) or "kvweave" not in params:
            return None
        config = getattr(scope["app"].state, "vllm_config", None)
        if params["kvweave"] == DESCRIBE and config is not None:
            served, _ = self._opened(config)
            found = Description(__version__, served.fingerprint, config.model_config.max_model_len)
            return {
                "object": "text_completion",
                "model": sent.get("model"),
                "choices": [],
                "kvweave": asdict(found),
            }
        ids = sent.get("prompt")
        if not isinstance(ids, list) or not all(type(each) is int for each in ids):
            raise InvalidField("prompt", f"{FIELD} counts tokens; give the prompt as one list of token ids")
        task = read_task(params, ids)
        if task is None:
            return None
        if not task.exact and not str(sent.get("cache_salt") or "").startswith(SALT):
            raise InvalidField(
                "cache_salt", f"it does not begin with {SALT}; give the one that kvweave_vllm.request makes"
            )
        if config is not None:
            served, store = self._opened(config)
            wanted = params["kvweave"].get("model")
            if wanted not in (None, served.fingerprint.digest):
                raise InvalidField(
                    f"{FIELD}.model",
                    f"it is {wanted!r}, and {served.name} in {served.dtype} is served, {served.fingerprint.digest!r}",
                )
            if task.previous is None and task.recipe.match.position_independent:
                _check_stored(served, store, [ids[start:end] for start, end in task.spans])
        return None

    def _opened(self, config: Any) -> tuple[Served, ChunkStore]:
        if self._stored is None:
            self._stored = Served(config), open_store(config)
        return self._stored


def _check_stored(served: Served, store: ChunkStore, chunks: list[list[int]]) -> None:
    """Raise InvalidField if KV of these chunks is stored, and all of it was made by other models."""
    ours = store.versions(served.fingerprint, chunks)
    if not any(ours) and (others := store.other_models(served.fingerprint, chunks)):
        raise InvalidField(
            f"{FIELD}.spans",
            f"the KV of these chunks was made by {' and '.join(others)}, and the model is {served.name}; weights, dtype, "
            "configuration and tokenizer must be the same",
        )


async def _answer(status: int, said: dict[str, Any], send: Send) -> None:
    body = json.dumps(said).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
