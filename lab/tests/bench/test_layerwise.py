"""The script that compares loading by layer with loading whole entries: its results, not its speed."""

import threading

import pytest
import torch

from kvweave.testing import tiny_adapter


@pytest.fixture
def layerwise(script):
    return script("layerwise")


@pytest.fixture(scope="module")
def adapter():
    return tiny_adapter()


def test_the_pass_waits_for_each_layer_and_computes_the_same(layerwise, adapter):
    context = layerwise.Context(adapter, tokens=64, chunk_tokens=16, ratio=0.25)
    at_once = context.chunks()
    layerwise.deliver(at_once, layerwise.Link(float("inf"), 0.0), by_layer=False)
    expected = context.compute(at_once)
    chunks, found = context.chunks(), []
    computing = threading.Thread(target=lambda: found.append(context.compute(chunks)))
    computing.start()
    for layer in range(adapter.geometry.layers):
        assert not found  # the pass cannot end before its last layer arrives
        for chunk in chunks:
            chunk.arrive(layer)
    computing.join()
    assert torch.equal(found[0], expected)


@pytest.mark.parametrize(
    ("by_layer", "expected"),
    [
        (True, [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2)]),
        (False, [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]),
    ],
)
def test_layers_arrive_in_the_order_of_use_and_entries_one_by_one(layerwise, adapter, by_layer, expected):
    arrivals = []

    class Recording(layerwise.StreamingEntry):
        def arrive(self, layer):
            arrivals.append((chunks.index(self), layer))

    loaded = layerwise.Context(adapter, tokens=32, chunk_tokens=16, ratio=0.0).chunks()
    chunks = [Recording(chunk.layers) for chunk in loaded]
    layerwise.deliver(chunks, layerwise.Link(float("inf"), 0.0), by_layer)
    assert arrivals == expected


def test_every_point_is_measured_both_ways(layerwise, adapter):
    context = layerwise.Context(adapter, tokens=32, chunk_tokens=16, ratio=0.5)
    found = layerwise.measure(context, [0.0, 0.001], rounds=1)
    assert found["balance"] == context.bytes / found["pass_s"][0]
    assert [(point["round_trip_s"], point["of_balance"]) for point in found["points"]] == [
        (trip, times) for trip in (0.0, 0.001) for times in layerwise.BALANCE_MULTIPLES
    ]
    for point in found["points"]:
        link = layerwise.Link(point["bandwidth"], point["round_trip_s"])
        assert point["whole_s"][1] >= link.transfer_s(
            context.bytes
        )  # no unit arrives before the link delivers it
        assert point["layers_s"][1] >= link.transfer_s(context.bytes)
        assert point["gain"][0] == pytest.approx(1 - point["layers_s"][0] / point["whole_s"][0])
