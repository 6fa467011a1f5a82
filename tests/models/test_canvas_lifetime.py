"""A canvas goes with its last reference: its tensors may be most of the memory there is."""

import gc
import weakref

import torch
from prompts import IDS, STORED, N, quiet_adapter, stale_canvas


def test_a_canvas_and_its_tensors_do_not_wait_for_the_collector_of_cycles():
    adapter = quiet_adapter("llama")
    gc.collect()
    gc.disable()
    try:
        canvas = stale_canvas(adapter)
        adapter.compute(canvas, IDS, adapter.rows(torch.arange(STORED, N)), capture=True)
        adapter.step(canvas, IDS[0])
        alive = [weakref.ref(canvas), *(weakref.ref(layer.keys) for layer in canvas.layers)]
        del canvas
        assert [ref() for ref in alive] == [None] * len(alive)
    finally:
        gc.enable()
