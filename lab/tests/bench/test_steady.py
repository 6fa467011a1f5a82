"""The steady measurement on a tiny model: its rows, resuming after an interruption, and memory limits."""

from dataclasses import replace

import pytest

from kvweave.errors import InvalidRequest, UnknownRecipe
from kvweave.testing import tiny_adapter
from kvweave_lab.bench import steady
from kvweave_lab.bench.measurement import memory_limit_bytes
from kvweave_lab.bench.plots import steady_plot
from kvweave_lab.bench.steady import SteadyRow, SteadySettings, bench_steady, quarters, speedups
from kvweave_lab.bench.workload import Traffic, draw_queries

CHUNK_BYTES = 17_500  # a little more than a chunk of 32 tokens in a tiny model
FEW = SteadySettings(
    Traffic(queries=8, chunks_per_query=3, known_chunks=12, shared_chunks=6),
    ratio=0.25,
    chunk_tokens=32,
    host_bytes=4 * CHUNK_BYTES,
    full_every=3,
)


@pytest.fixture(scope="module")
def adapter():
    return tiny_adapter()


@pytest.fixture(scope="module")
def done(adapter, tmp_path_factory):
    return bench_steady(adapter, "tiny", tmp_path_factory.mktemp("store"), FEW)


def test_every_question_has_a_row_and_some_have_a_full_prefill(done):
    assert [row.question for row in done.rows] == list(range(8))
    assert [row.question for row in done.rows if row.full_s is not None] == [0, 3, 6, 7]
    for row in done.rows:
        parts_s = row.load_s + row.place_s + row.select_s + row.recompute_s
        assert 0 < parts_s <= row.ttft_s


def test_new_chunks_are_prepared_with_the_first_question_for_them(done):
    seen = set(range(12))
    for row, query in zip(done.rows, draw_queries(FEW.traffic), strict=True):
        assert row.new_chunks == len(set(query) - seen)
        assert (row.prepare_s > 0) == (row.new_chunks > 0)
        seen |= set(query)
    sizes = [row.stored_bytes for row in done.rows]
    assert sizes == sorted(sizes)
    assert sizes[-1] > sizes[0]


def test_only_the_question_and_selected_tokens_are_computed(done):
    """Every chunk is stored before its question: only the question and a quarter of all chunks but the first are computed."""
    for row in done.rows:
        assert row.from_host + row.from_disk == 4  # the system prompt and three chunks
        assert row.computed_tokens < row.prompt_tokens / 2


def test_memory_stays_within_its_limit_and_the_store_is_larger(done):
    assert all(row.host_bytes <= FEW.host_bytes for row in done.rows)
    assert done.rows[-1].stored_bytes > 3 * FEW.host_bytes
    assert any(row.from_disk for row in done.rows[4:])


def test_speedups_take_the_nearest_full_prefill(done):
    row = done.rows[0]
    times = [(1.0, 10.0), (2.0, None), (2.0, None), (4.0, 20.0)]
    rows = [replace(row, question=n, ttft_s=ours, full_s=full) for n, (ours, full) in enumerate(times)]
    assert speedups(rows) == (10.0, 5.0, 10.0, 5.0)
    assert quarters([1, 2, 3, 4, 5, 6, 7, 8]) == (1.5, 3.5, 5.5, 7.5)
    assert done.kept == done.quarters[3] / done.quarters[1]


def test_the_plot_is_a_png(done):
    assert steady_plot(done).startswith(b"\x89PNG")


def test_an_interrupted_measurement_resumes(adapter, tmp_path, monkeypatch):
    store, output = tmp_path / "store", tmp_path / "out"
    original = steady.Asker.ask

    def interrupted(self, number, query, *, last) -> SteadyRow:
        if number == 5:
            raise KeyboardInterrupt
        return original(self, number, query, last=last)

    monkeypatch.setattr(steady.Asker, "ask", interrupted)
    with pytest.raises(KeyboardInterrupt):
        bench_steady(adapter, "tiny", store, FEW, output)
    monkeypatch.setattr(steady.Asker, "ask", original)
    with open(output / "steady.jsonl", "ab") as log:
        log.write(b'{"question": 5, "prom')  # an incomplete line, as a crash leaves it
    before = (output / "steady.jsonl").read_text().splitlines()[:-1]
    done = bench_steady(adapter, "tiny", store, FEW, output)
    assert done.started_at == (0, 5)
    assert [row.question for row in done.rows] == list(range(8))
    assert (output / "steady.jsonl").read_text().splitlines()[: len(before)] == before
    monkeypatch.setattr(steady.Asker, "ask", interrupted)
    assert bench_steady(adapter, "tiny", store, FEW, output) == done  # asks no question
    with pytest.raises(InvalidRequest, match="differ in ratio"):
        bench_steady(adapter, "tiny", store, replace(FEW, ratio=0.5), output)


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"recipe": "reuse"}, InvalidRequest, "selects no tokens"),
        ({"recipe": "nothing"}, UnknownRecipe, "full, reuse"),
    ],
)
def test_impossible_measurements_are_refused_before_the_first(adapter, tmp_path, changes, kind, message):
    with pytest.raises(kind, match=message):
        bench_steady(adapter, "tiny", tmp_path / "store", replace(FEW, **changes), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_too_few_questions_for_quarters_are_refused():
    with pytest.raises(InvalidRequest, match="no quarters"):
        SteadySettings(Traffic(queries=3))


def test_the_memory_limit_is_the_smallest_of_all_enclosing_groups(tmp_path):
    own = tmp_path / "own"

    def limit(lines: str) -> int | None:
        own.write_text(lines)
        return memory_limit_bytes(tmp_path, own)

    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "memory" / "c").mkdir(parents=True)
    (tmp_path / "a" / "memory.max").write_text("5000\n")
    (tmp_path / "a" / "b" / "memory.max").write_text("max\n")
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    (tmp_path / "memory" / "c" / "memory.limit_in_bytes").write_text("3000\n")
    assert limit("0::/a/b\n") == 5000
    assert limit("4:cpu,memory:/c\n3:cpuset:/\n0::/\n") == 3000
    assert limit("4:memory:/\n") is None
    assert memory_limit_bytes(tmp_path, tmp_path / "nowhere") is None
