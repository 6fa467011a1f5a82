"""What happens to requests in vLLM around the KV that kvweave provides: sharing, eviction, preemption, bounds, bad input."""

import threading
import time
from itertools import count

import pytest
import torch

pytest.importorskip(
    "vllm", reason="vLLM is not installed here; integrations/vllm/README.md says how to run these tests"
)

from engines import CHUNKS, QUESTION, Case, close, first_logits, text

from kvweave.testing import tiny_model, tiny_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    home = tmp_path_factory.mktemp("requests")
    tiny_model("llama", hidden_size=128, head_dim=32, intermediate_size=96).save_pretrained(home / "model")
    tiny_tokenizer().save_pretrained(home / "model")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVWEAVE_HOME", str(home))
        # 23 usable blocks of 32 tokens: three prompts of 218 tokens and answers of 200 do not fit
        found = Case(home / "model", home, num_gpu_blocks_override=24, max_rows=260)
        yield found
        found.close()


@pytest.fixture(autouse=True)
def nothing_stored(case):
    case.store.clear()
    case.vllm.forget()
    case.vllm.weaver.counts.failed = 0
    yield
    assert case.vllm.weaver.counts.failed == 0
    assert not case.vllm.weaver.reader._reads
    assert not claims(case)._reading
    deadline = time.monotonic() + 60  # a read that nobody waits for ends in its own time
    while case.vllm.weaver.store.pins.in_use():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def claims(case):
    return case.vllm.llm.llm_engine.engine_core.engine_core.scheduler.connector._claims


@pytest.fixture
def gate(case, monkeypatch):
    """An event; until it is set, the store answers no look-up."""
    event, store = threading.Event(), case.vllm.weaver.store
    find = store._find
    monkeypatch.setattr(store, "_find", lambda *args, **more: (event.wait(60), find(*args, **more))[1])
    yield event
    event.set()


def answer_of(case, name):
    """Run steps until a request has its first token; return its logits."""
    return next(first_logits(found[name]) for found in iter(case.vllm.step, None) if name in found)


NAMES = (f"request {number}" for number in count())


def reused(case):
    return case.vllm.weaver.counts.tokens - case.vllm.weaver.counts.rows


def test_others_never_take_approximate_blocks_for_exact_ones(case):
    case.prepare("reuse")
    body = case.body("reuse")
    (approximate,) = case.vllm.generate(body)
    (plain,) = case.vllm.generate({"prompt": body["prompt"]})
    close(plain, case.expected("full").logits[0])
    assert (plain - approximate).abs().max() > 0.1
    (again,) = case.vllm.generate(body)  # and the other way round
    close(again, approximate)


def test_without_the_salt_a_request_is_prefilled_without_kvweave(case):
    case.prepare("reuse")
    body, requests = case.body("reuse"), case.vllm.weaver.counts.requests
    del body["extra_body"]["cache_salt"]
    (logits,) = case.vllm.generate(body)
    close(logits, case.expected("full").logits[0])
    assert case.vllm.weaver.counts.requests == requests


def test_tenants_share_no_blocks(case):
    case.prepare("reuse")
    salts = {case.body("reuse", tenant=name)["extra_body"]["cache_salt"] for name in ("a", "b", "")}
    assert len(salts) == 3


def test_a_repeated_request_finds_its_blocks_and_writes_none_of_them(case):
    case.prepare("epic")
    (first,) = case.vllm.generate(case.body("epic", ratio=0.3))
    counts = case.vllm.weaver.counts
    tokens = counts.tokens
    writes = []
    passes = case.vllm.weaver.engine.passes
    with pytest.MonkeyPatch.context() as patch:
        run = passes.run
        patch.setattr(
            passes,
            "run",
            lambda requests, *more: writes.extend(each.rows for each in requests) or run(requests, *more),
        )
        (again,) = case.vllm.generate(case.body("epic", ratio=0.3))
    close(again, first)
    end = case.body("epic")["extra_body"]["kv_transfer_params"]["kvweave"]["spans"][-1][1]
    hit = end - (counts.tokens - tokens)
    assert hit >= 32
    assert all(int(rows.min()) >= hit for rows in writes)


def test_evicted_and_unknown_chunks_are_computed(case):
    case.prepare("reuse", CHUNKS[:2])
    (logits,) = case.vllm.generate(case.body("reuse"))
    close(logits, case.expected("reuse").logits[0])


def test_a_damaged_entry_is_dropped_and_computed(case):
    case.prepare("reuse")
    for file in case.store.folder.rglob("*.safetensors"):
        data = bytearray(file.read_bytes())
        data[-40:] = bytes(40)
        file.write_bytes(data)
    (logits,) = case.vllm.generate(case.body("reuse"))
    close(logits, case.expected("full").logits[0])


def test_a_lost_store_ends_in_recomputation(case):
    case.prepare("reuse")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(case.vllm.weaver.store, "_find", lambda *args, **kwargs: 1 / 0)
        (logits,) = case.vllm.generate(case.body("reuse"))
    close(logits, case.expected("full").logits[0])
    assert case.vllm.weaver.counts.failed == 1
    case.vllm.weaver.counts.failed = 0


def test_preempted_requests_are_woven_again(case):
    case.prepare("epic")
    orders = (CHUNKS, CHUNKS[::-1], (*CHUNKS[1:], CHUNKS[0]))
    requests = case.vllm.weaver.counts.requests
    found = case.vllm.generate(*(case.body("epic", order, ratio=0.3) for order in orders), max_tokens=200)
    assert case.vllm.weaver.counts.requests - requests > len(
        orders
    )  # at least one was preempted and came again
    for logits, order in zip(found, orders, strict=True):
        close(logits, case.expected("epic", order, ratio=0.3).logits[0])


@pytest.mark.parametrize("recipe", ["reuse", "weave"])
def test_others_decode_while_the_store_is_slow(case, gate, recipe):
    """A look-up that takes as long as 20 steps of another request delays none of them."""
    gate.set()
    case.prepare(recipe)
    gate.clear()
    decoding, loading = next(NAMES), next(NAMES)
    case.vllm.start(decoding, {"prompt": case.body("full")["prompt"]}, max_tokens=60)
    answer_of(case, decoding)
    case.vllm.start(loading, case.body(recipe))
    assert [set(case.vllm.step()) for _ in range(20)] == [{decoding}] * 20
    gate.set()
    close(answer_of(case, loading), case.expected(recipe).logits[0])
    case.vllm.finish()


def test_a_request_that_is_aborted_while_it_is_read_leaves_nothing(case, gate):
    names = [next(NAMES) for _ in range(2)]
    for name in names:
        case.vllm.start(name, case.body("reuse"))
    case.vllm.step()
    assert len(case.vllm.weaver.reader._reads) == 2
    case.vllm.llm.llm_engine.abort_request(names[:1])
    gate.set()
    close(answer_of(case, names[1]), case.expected("full").logits[0])


def test_kv_that_is_evicted_after_it_was_read_is_used(case):
    case.prepare("reuse")
    expected, name = case.expected("reuse").logits[0], next(NAMES)
    case.vllm.start(name, case.body("reuse"))
    while 0 not in {left for left, _ in claims(case)._reading.values()}:  # it is read, and not used yet
        assert not case.vllm.step()
    case.store.clear()
    close(answer_of(case, name), expected)


def test_a_store_that_does_not_answer_ends_in_vllms_own_prefill(case, gate, monkeypatch):
    monkeypatch.setattr("kvweave_vllm.claims.READ_S", 0.1)
    name, requests = next(NAMES), case.vllm.weaver.counts.requests
    case.vllm.start(name, case.body("reuse"))
    close(answer_of(case, name), case.expected("full").logits[0])
    assert case.vllm.weaver.counts.requests == requests


def test_rows_of_a_step_are_bounded(case):
    """Two prompts without stored KV need 190 rows each, and a step may have 260."""
    steps = []
    weaver = case.vllm.weaver
    with pytest.MonkeyPatch.context() as patch:
        weave = type(weaver).weave
        patch.setattr(
            type(weaver), "weave", lambda self, loads: steps.append(len(loads)) or weave(self, loads)
        )
        found = case.vllm.generate(case.body("prefix"), case.body("prefix", CHUNKS[::-1]))
    assert steps == [1, 1]
    for logits, chunks in zip(found, (CHUNKS, CHUNKS[::-1]), strict=True):
        close(logits, case.expected("full", chunks).logits[0])


def test_rows_of_several_requests_run_in_one_pass(case, monkeypatch):
    monkeypatch.setattr(claims(case), "_max_rows", 2000)
    monkeypatch.setattr("kvweave_vllm.connector.IDLE_S", 60)  # both are read before one starts
    case.prepare("epic")
    case.vllm.generate(
        case.body("epic")
    )  # stores the instruction's KV, which is captured in a pass of its own
    case.vllm.forget()
    passes, together = case.vllm.weaver.engine.passes, []
    run = passes.run
    monkeypatch.setattr(
        passes, "run", lambda requests, *more: together.append(len(requests)) or run(requests, *more)
    )
    orders = (CHUNKS, CHUNKS[::-1])
    found = case.vllm.generate(*(case.body("epic", order, ratio=0.3) for order in orders))
    assert together == [2]
    for logits, order in zip(found, orders, strict=True):
        close(logits, case.expected("epic", order, ratio=0.3).logits[0])


def test_a_prompt_with_more_rows_than_a_step_has_gets_its_first_chunks(case):
    chunks = tuple(text(number, 20) for number in range(10, 16))
    counts = case.vllm.weaver.counts
    rows, tokens = counts.rows, counts.tokens
    (logits,) = case.vllm.generate(case.body("prefix", chunks))
    close(logits, case.expected("full", chunks).logits[0])
    assert 0 < counts.rows - rows <= 260
    assert counts.tokens - tokens < case.expected("full", chunks).plan.prompt_tokens - 60


@pytest.mark.parametrize(
    "change",
    [
        {"spans": [[0, 5], [3, 9]]},
        {"spans": [[0, 9999]]},
        {"recipe": "no-such"},
        {"ratio": 7},
        {"spans": "x"},
        {"nonsense": 1},
    ],
)
def test_what_no_middleware_refused_is_prefilled_without_kvweave(case, change):
    body = case.body("epic")
    body["extra_body"]["kv_transfer_params"]["kvweave"] |= change
    (logits,) = case.vllm.generate(body)
    close(logits, case.expected("full").logits[0])


def test_sampling_goes_on_from_woven_kv(case):
    """Tokens after the first: greedy, against the transformers engine's own greedy steps."""
    case.prepare("reuse")
    expected = case.expected("reuse")
    token = int(expected.logits.argmax())
    following = case.adapter.step(expected.kv_cache, token)[0]
    body = case.body("reuse")
    body["prompt"] = [*body["prompt"], token]
    (logits,) = case.vllm.generate(body)
    close(logits, following)
    assert isinstance(QUESTION, str)
    assert torch.isfinite(logits).all()


@pytest.mark.parametrize("recipe", ["epic", "prophetkv"])
def test_a_question_that_a_step_cuts_is_answered(case, recipe, monkeypatch):
    """Two questions have more tokens than the 512 that vLLM schedules in a step, so the second one is cut."""
    monkeypatch.setattr(claims(case), "_max_rows", 2000)
    monkeypatch.setattr("kvweave_vllm.connector.IDLE_S", 60)  # both are read before one starts
    case.prepare(recipe)
    question = " ".join(text(number) for number in range(20, 27))
    prompts = (CHUNKS[:1], CHUNKS[1:2])
    bodies = [case.body(recipe, chunks, question, ratio=0.1) for chunks in prompts]
    requests = case.vllm.weaver.counts.requests
    found = case.vllm.generate(*bodies)
    assert case.vllm.weaver.counts.requests == requests + 2
    assert sum(len(body["prompt"]) - 50 for body in bodies) > 512
    for logits, chunks in zip(found, prompts, strict=True):
        assert torch.isfinite(logits).all()
        if recipe == "epic":  # selects without the question
            expected = case.expected(recipe, chunks, question, ratio=0.1).logits[0]
            close(logits, expected, tolerance=1e-3)  # over a longer prompt than the other tests have
