"""A stand-in for the engine whose requests do what a test wants: wait, answer slowly, fail."""

import threading
from contextlib import contextmanager
from types import SimpleNamespace

from kvweave.errors import Cancelled, KnowledgeBaseNotFound
from kvweave.results import Answer, Piece, Plan, Prefill, Timing
from kvweave.server.serving.completions import Finished


class FakeServing:
    """Its requests wait for `go` before the prompt, and before each of their pieces; `log` says how each ended."""

    pieces = 3
    piece_text = "word "
    error = None
    load_s = 0.0
    load_error = None

    def __init__(self, config, tenants=None, **options):
        self.config, self._tenants = config, tenants
        self.ready = False
        self.prompt_may_go, self.pieces_may_go = threading.Event(), threading.Event()
        self.prompt_may_go.set()
        self.pieces_may_go.set()
        self.log, self.running, self.closed = [], 0, False
        name = SimpleNamespace(name="fake")
        self.resident = SimpleNamespace(
            model=SimpleNamespace(fingerprint=name), encoder=name, batcher=None, shared_bytes=0
        )

    def load(self):
        threading.Event().wait(self.load_s)
        if self.load_error is not None:
            raise self.load_error
        self.ready = True

    def tenant(self, key):
        name = None if self._tenants is None else self._tenants.name_of(key)
        return FakeTenant(self, name)

    def stores(self):
        return []

    def close(self, grace_s=10.0):
        self.closed = True


class FakeTenant:
    def __init__(self, serving, name):
        self.serving, self.name = serving, name
        self.config = serving.config
        self.bases = self

    def summaries(self):
        return []

    def names(self):
        return []

    def get(self, name):
        raise KnowledgeBaseNotFound(f"there is no knowledge base {name!r}; create it first")

    @contextmanager
    def using(self, name):
        yield self.get(name)

    def complete(self, request, cancelled):
        serving = self.serving
        serving.running += 1
        try:
            yield from self._events(request, cancelled)
        except GeneratorExit:
            serving.log.append("closed")
            raise
        except BaseException as error:
            serving.log.append(type(error).__name__)
            raise
        else:
            serving.log.append("finished")
        finally:
            serving.running -= 1

    def _events(self, request, cancelled):
        serving = self.serving
        yield Prefill(0, 0)
        self._wait(serving.prompt_may_go, cancelled)
        if serving.error is not None:
            raise serving.error
        yield Prefill(7, 7, 2)
        for _ in range(serving.pieces):
            self._wait(serving.pieces_may_go, cancelled)
            yield Piece(serving.piece_text)
        text = serving.piece_text * serving.pieces
        answer = Answer(text.strip(), (), Plan("prefix", 0.0, ()), Timing(ttft_s=0.1, decode_s=0.1))
        yield Finished(answer, text, 7, 2, serving.pieces, tuple)

    @staticmethod
    def _wait(event, cancelled):
        while not event.wait(0.01):
            if cancelled.is_set():
                raise Cancelled("given up")
        if cancelled.is_set():
            raise Cancelled("given up")
