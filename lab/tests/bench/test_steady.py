"""The steady measurement on a tiny model: what its rows say, how it goes on after an interruption, which limits count."""

from dataclasses import replace

import pytest

from kvweave.errors import InvalidRequest, UnknownRecipe
from kvweave.testing import tiny_adapter
from kvweave_lab.bench import steady
from kvweave_lab.bench.memory_limit import memory_limit_bytes
from kvweave_lab.bench.queries import Traffic, draw_queries
from kvweave_lab.bench.steady import bench_steady
from kvweave_lab.bench.steady_plot import steady_plot
from kvweave_lab.bench.steady_results import SteadyRow, SteadySettings, quarters, speedups

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


def test_every_question_has_a_row_and_full_prefill_stands_beside_some(done):
    assert [row.question for row in done.rows] == list(range(8))
    assert [row.question for row in done.rows if row.full_s is not None] == [0, 3, 6, 7]
    for row in done.rows:
        parts_s = row.load_s + row.place_s + row.select_s + row.recompute_s
        assert 0 < parts_s <= row.ttft_s


def test_chunks_come_with_the_first_question_for_them(done):
    seen = set(range(12))
    for row, query in zip(done.rows, draw_queries(FEW.traffic), strict=True):
        assert row.new_chunks == len(set(query) - seen)
        assert (row.prepare_s > 0) == (row.new_chunks > 0)
        seen |= set(query)
    sizes = [row.stored_bytes for row in done.rows]
    assert sizes == sorted(sizes)
    assert sizes[-1] > sizes[0]


def test_nothing_but_the_question_is_computed_in_full(done):
    """Every chunk is stored before its question: a quarter of all but the first is computed, and the question."""
    for row in done.rows:
        assert row.from_host + row.from_disk == 4  # the system prompt and three chunks
        assert row.computed_tokens < row.prompt_tokens / 2


def test_memory_holds_what_it_may_and_the_store_is_larger(done):
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


def test_the_plot_is_a_picture(done):
    assert steady_plot(done).startswith(b"\x89PNG")


def test_an_interrupted_measurement_goes_on_where_it_stopped(adapter, tmp_path, monkeypatch):
    store, output = tmp_path / "store", tmp_path / "out"
    whole = steady._Asking.ask

    def interrupted(self, number, query, *, last) -> SteadyRow:
        if number == 5:
            raise KeyboardInterrupt
        return whole(self, number, query, last=last)

    monkeypatch.setattr(steady._Asking, "ask", interrupted)
    with pytest.raises(KeyboardInterrupt):
        bench_steady(adapter, "tiny", store, FEW, output)
    monkeypatch.setattr(steady._Asking, "ask", whole)
    with open(output / "steady.jsonl", "ab") as journal:
        journal.write(b'{"question": 5, "prom')  # torn by a crash
    before = (output / "steady.jsonl").read_text().splitlines()[:-1]
    done = bench_steady(adapter, "tiny", store, FEW, output)
    assert done.started_at == (0, 5)
    assert [row.question for row in done.rows] == list(range(8))
    assert (output / "steady.jsonl").read_text().splitlines()[: len(before)] == before
    monkeypatch.setattr(steady._Asking, "ask", interrupted)
    assert bench_steady(adapter, "tiny", store, FEW, output) == done  # asks nothing any more
    with pytest.raises(InvalidRequest, match="differs in ratio"):
        bench_steady(adapter, "tiny", store, replace(FEW, ratio=0.5), output)


@pytest.mark.parametrize(
    ("changes", "kind", "said"),
    [
        ({"recipe": "reuse"}, InvalidRequest, "selects no tokens"),
        ({"recipe": "nothing"}, UnknownRecipe, "full, naive"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_is(adapter, tmp_path, changes, kind, said):
    with pytest.raises(kind, match=said):
        bench_steady(adapter, "tiny", tmp_path / "store", replace(FEW, **changes), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_settings_that_give_no_quarters_are_refused():
    with pytest.raises(InvalidRequest, match="no quarters"):
        SteadySettings(Traffic(queries=3))


def test_the_smallest_limit_of_the_groups_around_a_process_counts(tmp_path):
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
