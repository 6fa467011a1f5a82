"""The simulation of vLLM replicas behind a router."""

from dataclasses import replace

import pytest

SEED = 3


@pytest.fixture
def routing(script):
    return script("vllm_routing")


@pytest.fixture
def setting(routing):
    return routing.Setting(60, 4, 1.0, 0.2, 0.5, 40)


@pytest.fixture
def costs(routing):
    return routing.Costs.of(routing.MEASURED_S, "none")


def request(routing, *chunks, key="k"):
    return routing.Request(chunks, (100,) * len(chunks), key)


def test_requests_take_what_was_measured(routing, costs):
    tokens = routing.CONTEXT_TOKENS
    assert costs.service_s(tokens, tokens) == pytest.approx(routing.MEASURED_S["vllm"])
    assert costs.service_s(tokens, 0) == pytest.approx(routing.MEASURED_S["rows 0.1"])
    stored = routing.Costs.of(routing.MEASURED_S, "redis")
    assert costs.service_s(tokens, 0) < stored.service_s(tokens, tokens) < costs.service_s(tokens, tokens)


def test_a_replica_keeps_what_it_used_last(routing, costs):
    replica = routing.Replica(costs, 300)
    replica.serve(request(routing, 1, 2, 3), 0.0)
    replica.serve(request(routing, 1), 0.0)
    replica.serve(request(routing, 4), 0.0)
    found = {chunk: replica.missed(request(routing, chunk)) for chunk in (1, 2, 3, 4)}
    assert found == {1: 0, 2: 100, 3: 0, 4: 0}


def test_requests_wait_for_those_before_them(routing, costs):
    replica = routing.Replica(costs, 10**6)
    first = replica.serve(request(routing, 1), 10.0)
    assert replica.in_flight(10.0) == 1
    assert replica.serve(request(routing, 2), 10.0) == pytest.approx(2 * first)
    assert replica.in_flight(10.0 + 1.5 * first) == 1
    assert replica.in_flight(10.0 + 3 * first) == 0


def test_another_replica_takes_its_share_of_keys_and_moves_no_other(routing):
    fewer, more = (routing.Ring(count) for count in (4, 5))
    keys = [f"key {number}" for number in range(2000)]
    moved = [key for key in keys if next(iter(fewer.walk(key))) != next(iter(more.walk(key)))]
    assert all(next(iter(more.walk(key))) == 4 for key in moved)
    assert len(moved) / len(keys) == pytest.approx(0.2, abs=0.06)


def test_bounded_loads_pass_full_replicas(routing, costs):
    replicas = [routing.Replica(costs, 1000) for _ in range(4)]
    choose = routing.bounded(4)
    for number in range(40):
        asked = request(routing, number)
        loads = [replica.in_flight(0.0) for replica in replicas]
        chosen = choose(asked, replicas, 0.0)
        assert loads[chosen] < routing.BOUND * (sum(loads) + 1) / 4
        replicas[chosen].serve(asked, 0.0)


def test_the_longest_known_prefix_wins(routing, costs):
    replicas = [routing.Replica(costs, 1000) for _ in range(3)]
    choose = routing.prefix(3)
    for asked in (request(routing, 1, 2, 3), request(routing, 4, 5)):
        replicas[choose(asked, replicas, 0.0)].serve(asked, 0.0)
    assert choose(request(routing, 4, 9), replicas, 0.0) == 1
    assert choose(request(routing, 1, 2, 9), replicas, 0.0) == 0
    assert choose(request(routing, 2, 1), replicas, 0.0) == 2


def test_equal_seeds_give_equal_results_and_one_replica_has_no_choice(routing, costs, setting):
    stream = routing.draw(setting, SEED, 120)
    assert stream[:40] == routing.draw(setting, SEED, 40)
    one = routing.compare(1, costs, setting, [stream])
    assert len({str(figures) for figures in one["policies"].values()}) == 1
    assert one["over_best"]["value"] == 1
    three = routing.compare(3, costs, setting, [stream])
    assert three == routing.compare(3, costs, setting, [stream])
    assert 1 < three["policies"]["session"]["busiest"]["value"] < 3
    assert 0 < three["policies"]["session"]["hit"]["value"] < 1


def test_with_room_for_all_the_key_finds_more_than_turns(routing, costs, setting):
    stream = routing.draw(replace(setting, exponent=0.0, per_request=1, memory_share=1.0), SEED, 480)
    roomy = replace(setting, memory_share=1.5, load=0.2, requests_per_replica=120)
    row = routing.compare(4, costs, roomy, [stream])
    hit = {name: figures["hit"]["value"] for name, figures in row["policies"].items()}
    assert hit["session"] > hit["turns"] + 0.1  # each chunk is on one replica
