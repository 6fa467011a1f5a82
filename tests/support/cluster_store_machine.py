"""Any order of changes to clusters on disk, with memory for few of them, leaves the entries that a dictionary would hold."""

import tempfile
from pathlib import Path

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvweave.decode.strategy import Strategy, build_shared_state
from support.synthetic import HEADS, geometry, settings

LAYERS, MOST_ENTRIES, PAGE_BYTES = 2, 16, 256
LAYER, HEAD = st.integers(0, LAYERS - 1), st.integers(0, HEADS - 1)
ENTRIES = st.integers(1, MOST_ENTRIES)
FRAMES = st.integers(10, 14)
"""The least that a split of the largest cluster takes, and little more."""
PICK = st.integers(0, 10**6)
"""Chooses one of the clusters that there are."""


def no_retriever(layer, shared, hooks):
    raise NotImplementedError


class ClusterStoreMachine(RuleBasedStateMachine):
    """The clusters of two layers beside a dictionary of their entries."""

    strategy = Strategy(no_retriever)

    def __init__(self):
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name) / "clusters.pages"
        self.clusters: dict[tuple[int, int, int], torch.Tensor] = {}
        self.generator = torch.Generator().manual_seed(0)

    @initialize(frames=FRAMES)
    def begin(self, frames):
        self.frames = frames
        self.open()

    def open(self):
        self.shared = build_shared_state(
            geometry(LAYERS),
            settings(resident_bytes=self.frames * PAGE_BYTES),
            self.strategy,
            self.path,
            lambda: None,
        )
        self.store = self.shared.store
        self.store.check_room(0)

    def teardown(self):
        if hasattr(self, "store"):
            self.close()
        self.folder.cleanup()

    def close(self):
        self.store.close()

    def some(self, number):
        length = self.store.entry_format.entry_bytes
        return torch.randint(0, 256, (number, length), dtype=torch.uint8, generator=self.generator)

    def picked(self, pick):
        return sorted(self.clusters)[pick % len(self.clusters)]

    @rule(layer=LAYER, head=HEAD, number=ENTRIES)
    def create(self, layer, head, number):
        self.store.start_layer(layer)
        entries = self.some(number)
        cluster = self.store.create(layer, head, entries)
        assert (layer, head, cluster) not in self.clusters
        self.clusters[layer, head, cluster] = entries

    @precondition(lambda self: self.clusters)
    @rule(pick=PICK, number=st.integers(1, 5))
    def append(self, pick, number):
        layer, head, cluster = key = self.picked(pick)
        self.store.start_layer(layer)
        for entry in self.some(min(number, max(0, MOST_ENTRIES - len(self.clusters[key])))):
            self.store.append(layer, head, cluster, entry)
            self.clusters[key] = torch.cat([self.clusters[key], entry[None]])

    @precondition(lambda self: self.clusters)
    @rule(picks=st.lists(PICK, min_size=1, max_size=4))
    def prefetch(self, picks):
        self.store.prefetch(sorted({self.picked(pick) for pick in picks}))

    @precondition(lambda self: self.clusters)
    @rule(picks=st.lists(PICK, min_size=1, max_size=4))
    def read(self, picks):
        """Load clusters of one layer and compare all of their entries, each alone and located for attention."""
        layer = self.picked(picks[0])[0]
        self.store.start_layer(layer)
        keys, pages = [], 0
        for key in sorted({key for key in map(self.picked, picks) if key[0] == layer}):
            pages += self.store.pages.page_count(key)
            if pages <= self.store.capacity_pages():
                keys.append(key)
        self.store.load(keys)
        for key in keys:
            assert torch.equal(self.store.entries(*key), self.clusters[key])
        heads = [
            np.array([number for _, of, number in keys if of == head], np.int64) for head in range(HEADS)
        ]
        numbers, counts = self.store.locate(layer, heads)
        for head in range(HEADS):
            own = [self.clusters[key] for key in keys if key[1] == head]
            assert counts[head] == sum(map(len, own))
            if own:
                stored_keys, values = self.store.entry_format.decode(torch.cat(own))
                assert torch.equal(
                    self.store.keys(numbers[head, : counts[head]]).view(torch.int32),
                    stored_keys.view(torch.int32),
                )
                assert torch.equal(
                    self.store.values(numbers[head, : counts[head]]).view(torch.int32),
                    values.view(torch.int32),
                )
        self.store.release(keys)

    @rule()
    def next_row(self):
        self.store.page_cache.next_row()

    @rule(frames=FRAMES)
    def persist_and_reopen(self, frames):
        """What is on disk after a flush is everything, also under another limit."""
        self.store.flush()
        resident, layout = self.store.resident_state(), self.store.pages.layout.state()
        tables, row = [table.state() for table in self.store.tables], self.store.page_cache.row
        self.close()
        self.frames = frames
        self.open()
        self.store.pages.layout.restore(layout)
        for table, state in zip(self.store.tables, tables, strict=True):
            table.restore(state)
        self.store.page_cache.row = row
        self.store.restore_resident(resident)

    @invariant()
    def no_two_clusters_share_a_page(self):
        if self.clusters:
            keys = sorted(self.clusters)
            counts = np.array([self.store.pages.page_count(key) for key in keys])
            numbers = self.store.pages.page_numbers(keys, counts)
            assert len(set(numbers.tolist())) == len(numbers) == counts.sum()

    @invariant()
    def every_frame_is_free_or_of_one_cluster(self):
        if self.clusters:
            tails = self.store.tails.keys()
            used = [self.store.tails.frame_of(key) for key in tails]
            for key in self.clusters:
                if key in self.store.page_cache:
                    used += self.store.page_cache.frames_of(key)
            assert len(set(used)) == len(used)
            assert len(used) + self.store.page_cache.frames.free_count == self.frames
