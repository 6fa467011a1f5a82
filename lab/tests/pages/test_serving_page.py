"""The parts of lab/docs/serving.md, from results as the commands write them."""

import pytest

PERCENTILES = {"p50": 0.5, "p95": 1.5, "p99": 2.0}
SOURCE = {
    "command": "kvweave bench",
    "date": "2027-01-01",
    "commit": "abc",
    "machine": "x86_64",
    "threads": 2,
}


def phase(system, **more):
    counts = {"answered": 97, "refused": 3, "failed": 0, "prompt_tokens": 1000, "cached_tokens": 400}
    rates = {
        "rate": 0.5,
        "requests_per_s": 0.45,
        "tokens_per_s": 9.0,
        "prefix_share": 0.25,
        "peak_bytes": 2e9,
    }
    return {"system": system, **counts, **rates, "ttft": PERCENTILES, "tpot": PERCENTILES, **more}


@pytest.fixture
def page(script):
    return script("serving_page")


@pytest.fixture
def serve():
    traffic = {"documents": 200, "per_request": 8, "document_tokens": 512, "exponent": 1.0, "shuffled": 1.0}
    settings = {"traffic": {**traffic, "new_tokens": 32}, "requests": 100}
    rows = [phase("default"), phase("llama-server", tpot=None)]
    row = {"ttft_s": 1.5, "system": "default", "requests_per_s": 0.4, "at_least": True, "of_baseline": 2.5}
    late = {**row, "system": "full", "requests_per_s": None, "at_least": False, "of_baseline": None}
    memory = [
        {
            "system": name,
            "requests": 16,
            "together": 16,
            "one_bytes": 1e7,
            "all_bytes": size,
            "prompt_tokens": 4100,
        }
        for name, size in (("default", 4e7), ("no-share", 1.6e8))
    ]
    spread = {"median": 0.1, "low": 0.05, "high": 0.2}
    token = {"rounds": 20, "prompt_tokens": 4100, "http_s": spread, "in_process_s": spread, "added_s": spread}
    throughput = {"model": "m", "settings": settings, "phases": rows, "equal": [row, late]}
    return {"throughput": throughput, "memory": memory, "first_token": token, **SOURCE}


def test_what_was_not_measured_says_so(page):
    assert set(page.parts(dict.fromkeys(page.FILES)).values()) == {"Not measured yet."}


def test_servers_are_listed_with_what_they_refused(page, serve):
    parts = page.parts(
        {**dict.fromkeys(page.FILES), page.SERVE: serve, page.FIRST_TOKEN: serve, page.MEMORY: serve}
    )
    assert (
        "| 0.5 | `default` | 97 | 3 | 0 | 0.450 | 9.0 | 0.50, 1.50, 2.00 s | 500.00, 1500.00, 2000.00 ms | 40%"
        in (parts["throughput"])
    )
    assert "25.0% of the documents" in parts["throughput"]
    assert "| 1.50 s | `default` | ≥ 0.400 | 2.50× |" in parts["equal"]
    assert "| 1.50 s | `full` | – | – |" in parts["equal"]
    assert "| `default` | 16 | 16 | 10.0 MB | 40.0 MB | 0.25 |" in parts["shared-memory"]
    assert "| HTTP adds | 100.0 ms | 50.0 ms | 200.0 ms |" in parts["first-token"]


def test_throughput_is_also_told_in_that_of_llama_server(page, serve):
    equal = serve["throughput"]["equal"]
    llama = {"system": "llama-server", "requests_per_s": 0.1, "at_least": False, "of_baseline": 0.5}
    equal.append({"ttft_s": 1.5, **llama})
    equal.append({**equal[0], "ttft_s": 3.0})  # at which llama-server was not measured
    lines = page.equal(serve).splitlines()
    assert lines[0].endswith("| of `prefix` | of `llama-server` |")
    assert lines[2] == "| 1.50 s | `default` | ≥ 0.400 | 2.50× | 4.00× |"
    assert lines[5] == "| 3.00 s | `default` | ≥ 0.400 | 2.50× | – |"


def test_a_simulated_disk_is_told(page, serve):
    assert "simulated" not in page.throughput(serve)
    serve["throughput"]["settings"]["common"] = {"disk_bytes_per_s": 100_000_000}
    assert "from a simulated disk of 100 MB/s." in page.throughput(serve)


def test_the_longest_gap_is_shown_where_it_was_recorded(page, serve):
    assert page.GAP_COLUMN not in page.throughput(serve)
    serve["throughput"]["phases"][0]["gap"] = {"p50": 0.1, "p95": 0.55, "longest": 0.7}
    serve["throughput"]["phases"][1]["gap"] = None
    header, _, first, second = page.throughput(serve).splitlines()[2:6]
    assert f"| TPOT p50, p95, p99 | {page.GAP_COLUMN} | cached |" in header
    assert "| 0.10, 0.55, 0.70 s | 40% |" in first
    assert "| – | – | 40% |" in second


def test_problems_of_a_soak_are_listed(page):
    trend = {"first_bytes": 1e9, "last_bytes": 1.1e9, "peak_bytes": 1.2e9, "slope_bytes_per_minute": 1e7}
    trend |= {"growth": 0.1, "points": [[9.0, 1e9], [18.0, 1.1e9]]}
    result = {
        "settings": {"users": 16, "seconds": 600.0, "kills": 1},
        "outcomes": {"chat": {"answered": 1200, "refused": 5}, "leave": {"left": 40}},
        "restarts": [{"damage": {"checked": 70}}],
        "damage": {"checked": 90},
        "waits": {"chat": {"median_s": 0.5, "p95_s": 2.0, "longest_s": 7.0}},
        "memory": {"resident": trend, "anonymous": None},
        "problems": ["memory grew by 10.0% after the warm-up"],
        **SOURCE,
    }
    text = page.soak(result)
    assert "| chat | 1,200 | 5 | 0 | 0 | 0 | 0 | 0.5, 2.0, 7.0 s |" in text
    assert "| all | 1,200 | 5 | 0 | 40 | 0 | 0 |  |" in text
    assert "Entries verified after each end: 70, 90." in text
    assert "| resident | 1,000 MB | 1,100 MB | +10.0% | +10.00 MB | 1,200 MB | 1,000, 1,100 |" in text
    assert "- memory grew by 10.0%" in text
    assert "No problem was found." in page.soak({**result, "problems": []})


def test_tenants_come_with_their_control(page):
    row = {
        "way": "documents",
        "before": "attacker",
        "probes": [500, 501],
        "auc": 0.97,
        "interval": [0.95, 0.99],
    }
    rows = [{**row, "median_s": [0.1, 0.2]}, {**row, "before": "other", "auc": 0.51, "median_s": [0.2, 0.2]}]
    text = page.tenants({"rows": rows, "model": "m", "tokens": 256, **SOURCE})
    other, control = text.splitlines()[2:4]
    assert other.startswith("| documents | another tenant | 500 | 0.510 (0.950–0.990) |")
    assert control.startswith("| documents | the attacker itself (control) | 500 | 0.970")
