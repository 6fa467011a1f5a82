"""A server for tests of clients: it answers, refuses or breaks as the question says."""

import asyncio
import contextlib
import json
import threading
import time

import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

TOKENS = ("one", " two", " three")
TOKEN_S = 0.02
STALL_S = 0.3


def _event(content):
    return f"data: {json.dumps(content)}\n\n"


def _choice(text=None, finish=None):
    delta = {} if text is None else {"content": text}
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}


async def _pieces(fault):
    yield ": ping\n\n"
    yield _event(
        {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}
    )
    for number, token in enumerate(TOKENS):
        await asyncio.sleep(STALL_S if fault == "stall" and number == 1 else TOKEN_S)
        yield _event(_choice(token))
        if fault == "error" and number == 1:
            yield _event({"error": {"message": "the disk is full", "type": "server_error"}})
            return
        if fault == "break" and number == 1:
            raise ConnectionResetError
    if fault != "unfinished":
        yield _event(_choice(finish="stop"))
    usage = {"prompt_tokens": 40, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 30}}
    yield _event({"choices": [], "usage": usage})
    if fault != "unended":
        yield "data: [DONE]\n\n"


async def _chat(request):
    fault = (await request.json())["messages"][-1]["content"]
    if fault == "busy":
        return JSONResponse({"error": {"message": "try later"}}, 429, {"Retry-After": "3"})
    if fault == "full":
        return JSONResponse({"error": {"message": "loading"}}, 503)
    if fault == "crash":
        return Response("Internal Server Error", 500)
    return StreamingResponse(_pieces(fault), media_type="text/event-stream")


async def _models(request):
    return JSONResponse({"data": [{"id": "fake"}]})


async def _health(request):
    return JSONResponse({"status": "ok"})


ROUTES = [
    Route("/v1/chat/completions", _chat, methods=["POST"]),
    Route("/v1/models", _models),
    Route("/health", _health),
]


@contextlib.contextmanager
def fake_server():
    """Run the server in a thread; yields its URL."""
    server = uvicorn.Server(uvicorn.Config(Starlette(routes=ROUTES), port=0, log_level="critical"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)
