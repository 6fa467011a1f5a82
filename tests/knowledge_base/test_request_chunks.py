"""Documents that requests come with: their KV is reused anywhere, and prepared for later requests."""

import time
from threading import Thread

import pytest

from kvweave.config import read_config
from kvweave.errors import Cancelled, InvalidRequest
from kvweave.kvstore.chunk_store import ChunkStore
from kvweave.recipes.methods import recipe_named
from kvweave.server.serving import request_chunks
from kvweave.server.serving.completions import CallerDocument, CompletionRequest
from kvweave.server.serving.request_chunks import RequestChunks, RequestDocuments
from kvweave.server.serving.serving import Serving
from kvweave.server.serving.tenants import Tenants
from kvweave.state.active_requests import ProcessActivity
from kvweave.types import Message
from support import tiny_kb

DOCUMENTS = tuple(CallerDocument(f"d{number}", tiny_kb.text(number)) for number in range(3))
TEXTS = [document.text for document in DOCUMENTS]
QUESTION = "Where is the river?"


@pytest.fixture
def serve(tmp_path, tiny):
    """Opens servers of the tiny model in one home; closes them at the end."""
    opened = []

    def make(tenants=None, *, idle=False, **settings):
        config = read_config(tmp_path / "home", **{**tiny_kb.SETTINGS, **settings})
        opened.append(Serving(config, tenants, idle=idle))
        opened[-1].load()
        return opened[-1]

    yield make
    for serving in opened:
        serving.close()


def complete(tenant, documents=DOCUMENTS, **options):
    request = CompletionRequest((Message("user", QUESTION),), documents=tuple(documents), options=options)
    return list(tenant.complete(request))[-1].answer


def chunk_spans(answer):
    return [span for span in answer.plan.spans if span.kind == "chunk"]


def prepared(tenant, serving):
    return tenant.store.prepared_chunks(serving.resident.model.fingerprint)


def wait_until(holds, seconds=60):
    until = time.monotonic() + seconds
    while not holds() and time.monotonic() < until:
        time.sleep(0.02)
    assert holds()


def test_what_one_prompt_computed_is_reused_in_any_order(serve):
    tenant = serve().tenant(None)
    assert {span.origin for span in chunk_spans(complete(tenant))} == {"fresh"}
    answer = complete(tenant, DOCUMENTS[::-1])
    assert {span.origin for span in chunk_spans(answer)} == {"reused"}
    assert "after other chunks (observed)" in chunk_spans(answer)[0].reason
    full = complete(tenant, DOCUMENTS[::-1], recipe="full")
    assert complete(tenant, DOCUMENTS[::-1], ratio=1.0).text == full.text


def test_chunks_of_two_requests_are_prepared_without_idle_work(serve):
    serving = serve()
    tenant = serving.tenant(None)
    complete(tenant, DOCUMENTS[:2])
    complete(tenant, DOCUMENTS[1:])
    wait_until(lambda: prepared(tenant, serving) >= 1)
    answer = complete(tenant, [DOCUMENTS[2], DOCUMENTS[1]])
    assert ["for any position" in span.reason for span in chunk_spans(answer)][1:] == [True]


def test_chunks_of_one_request_are_prepared_while_the_server_is_idle(serve):
    serving = serve(idle=True, idle_quiet_s=0.0)
    complete(tenant := serving.tenant(None))
    wait_until(lambda: prepared(tenant, serving) == len(DOCUMENTS))


def test_without_idle_work_chunks_of_one_request_are_not_prepared(serve, monkeypatch):
    monkeypatch.setattr(request_chunks, "PAUSE_S", 0.01)
    serving = serve()
    complete(tenant := serving.tenant(None))
    time.sleep(0.5)
    assert prepared(tenant, serving) == 0


def test_recipes_that_prepare_nothing_leave_nothing_to_prepare(serve, monkeypatch):
    monkeypatch.setattr(request_chunks, "PAUSE_S", 0.01)
    serving = serve(idle=True, idle_quiet_s=0.0)
    tenant = serving.tenant(None)
    for _ in range(3):
        complete(tenant, recipe="prefix")
    time.sleep(0.3)
    assert prepared(tenant, serving) == 0


def test_prepared_ahead_the_first_request_reuses_all(serve):
    tenant, calls = serve().tenant(None), []
    done = tenant.prepare([*TEXTS, TEXTS[0]], lambda tokens, total: calls.append((tokens, total)))
    assert (done.chunks, done.computed) == (len(TEXTS), len(TEXTS))
    assert calls == sorted(calls)
    assert calls[-1] == (done.tokens, done.tokens)
    answer = complete(tenant, DOCUMENTS[::-1])
    assert {span.origin for span in chunk_spans(answer)} <= {"reused", "exact"}
    assert tenant.prepare(TEXTS, lambda tokens, total: None).computed == 0


def test_chunks_are_prepared_for_the_instruction_of_the_requests(serve):
    tenant = serve().tenant(None)
    tenant.prepare(TEXTS, lambda tokens, total: None, system="Answer in French.")
    assert {span.origin for span in chunk_spans(complete(tenant))} == {"fresh"}


def test_tenants_do_not_share_prepared_chunks(serve):
    serving = serve(Tenants({"key-of-alice": "alice", "key-of-bob": "bob"}))
    alice, bob = serving.tenant("key-of-alice"), serving.tenant("key-of-bob")
    alice.prepare(TEXTS, lambda tokens, total: None)
    assert {span.origin for span in chunk_spans(complete(bob))} == {"fresh"}


def test_preparing_ahead_refuses_what_cannot_help(serve):
    tenant = serve(limit_bytes=3000).tenant(None)
    with pytest.raises(InvalidRequest, match="recipe full prepares nothing"):
        tenant.prepare(TEXTS, lambda tokens, total: None, recipe="full")
    with pytest.raises(InvalidRequest, match="the store may take 3,000"):
        tenant.prepare(TEXTS, lambda tokens, total: None)


def test_a_cancelled_preparation_keeps_what_it_did(serve):
    tenant = serve().tenant(None)

    def stop(done, total):
        if done > 0:
            raise Cancelled("the client has left")

    with pytest.raises(Cancelled):
        tenant.prepare(TEXTS, stop)
    assert 0 < tenant.prepare(TEXTS, lambda tokens, total: None).computed < len(TEXTS)


def test_a_server_that_closes_ends_a_preparation(serve):
    serving = serve()
    tenant, closing = serving.tenant(None), []

    def close(done, total):
        if done > 0 and not closing:
            closing.append(Thread(target=serving.close, args=(0.0,)))
            closing[0].start()
            wait_until(lambda: serving.requests.cancelled)

    with pytest.raises(Cancelled, match="closing"):
        tenant.prepare(TEXTS, close)
    closing[0].join(30)
    assert not closing[0].is_alive()


def test_waiting_chunks_are_bounded_in_characters(tmp_path, tiny, serve, monkeypatch):
    """Under load nothing is prepared, and what waits stays in memory."""
    monkeypatch.setattr(request_chunks, "MOST_CHARACTERS", 2 * max(map(len, TEXTS)))
    resident, activity = serve().resident, ProcessActivity()
    with ChunkStore(tmp_path / "chunks") as store:
        chunks = RequestChunks(resident.model, resident.encoder, store, activity, quiet_s=0.0)
        with activity.request():
            for text in TEXTS:
                chunks.seen(RequestDocuments((text,), "", False, recipe_named("reuse"), (False,), 100))
        wait_until(lambda: store.prepared_chunks(resident.model.fingerprint) == 2)
        time.sleep(0.2)
        assert store.prepared_chunks(resident.model.fingerprint) == 2
        chunks.close()


def test_used_kv_is_not_evicted_for_chunks_that_wait(tmp_path, tiny, serve):
    resident, activity = serve().resident, ProcessActivity()
    recipe = recipe_named("reuse")
    with ChunkStore(tmp_path / "chunks") as store:
        chunks = RequestChunks(resident.model, resident.encoder, store, activity, quiet_s=0.0)
        used = RequestDocuments((TEXTS[0],), "", False, recipe)
        chunks.prepare(used)
        ids = tuple(resident.model.template.chunk_ids(TEXTS[0]))
        (provenance,) = store.versions(resident.model.fingerprint, [ids])[0]
        assert store.get(resident.model.fingerprint, ids, provenance) is not None
        store.set_limit(store.used_bytes + 100)
        chunks.seen(RequestDocuments((TEXTS[1],), "", False, recipe, (True,), 1000))
        time.sleep(0.5)
        assert store.get(resident.model.fingerprint, ids, provenance) is not None
        assert store.prepared_chunks(resident.model.fingerprint) == 1
        chunks.close()
