"""Refuses requests whose field `kvweave` cannot be honoured, before vLLM sees them: `--middleware` of `vllm serve`."""

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from kvweave.kvstore.chunk_store import ChunkStore
from kvweave_vllm.fields import FIELD, SALT, InvalidField, read_task
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
            self._check(b"".join(each.get("body", b"") for each in messages), scope)
        except InvalidField as error:
            await _refuse(error, send)
            return

        async def replay() -> MutableMapping[str, Any]:
            return messages.pop(0) if messages else await receive()

        await self._app(scope, replay, send)

    def _check(self, body: bytes, scope: Scope) -> None:
        if b'"kvweave"' not in body:
            return
        try:
            sent = json.loads(body)
            params = sent.get("kv_transfer_params")
        except (ValueError, AttributeError):
            return  # vLLM says what is wrong with it
        if not isinstance(params, dict) or "kvweave" not in params:
            return
        ids = sent.get("prompt")
        if not isinstance(ids, list) or not all(type(each) is int for each in ids):
            raise InvalidField("prompt", f"{FIELD} counts tokens; give the prompt as one list of token ids")
        task = read_task(params, ids)
        if task is None:
            return
        if not task.exact and not str(sent.get("cache_salt") or "").startswith(SALT):
            raise InvalidField(
                "cache_salt", f"it does not begin with {SALT}; give the one that kvweave_vllm.request makes"
            )
        config = getattr(scope["app"].state, "vllm_config", None)
        if config is not None and task.previous is None and task.recipe.match.position_independent:
            if self._stored is None:
                self._stored = Served(config), open_store(config)
            served, store = self._stored
            chunks = [ids[start:end] for start, end in task.spans]
            ours = store.versions(served.fingerprint, chunks)
            if not any(ours) and (others := store.other_models(served.fingerprint, chunks)):
                raise InvalidField(
                    f"{FIELD}.spans",
                    f"the KV of these chunks was made by {' and '.join(others)}, and the model is {served.name}; weights, dtype, "
                    "configuration and tokenizer must be the same",
                )


async def _refuse(error: InvalidField, send: Send) -> None:
    said = {"message": str(error), "type": "BadRequestError", "param": error.field, "code": 400}
    body = json.dumps({"error": said}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 400, "headers": headers})
    await send({"type": "http.response.body", "body": body})
