"""Clusters whose entries are replaced, in any order with everything else, hold what a dictionary would hold."""

from hypothesis import settings as how
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from kvweave.decode.strategy import Strategy
from kvweave_lab.strategies.adaptive import SplittableStore
from support.cluster_store_machine import MOST_ENTRIES, PICK, ClusterStoreMachine, no_retriever


class SplittableStoreMachine(ClusterStoreMachine):
    """With a change of a whole cluster."""

    strategy = Strategy(no_retriever, store=SplittableStore)

    @precondition(lambda self: self.clusters)
    @rule(pick=PICK, number=st.integers(1, 2 * MOST_ENTRIES))
    def replace(self, pick, number):
        layer, head, cluster = key = self.picked(pick)
        self.store.start_layer(layer)
        self.clusters[key] = self.some(number)
        self.store.replace(layer, head, cluster, self.clusters[key])
        assert self.store.in_memory(*key)


TestSplittableStore = SplittableStoreMachine.TestCase
TestSplittableStore.settings = how(max_examples=25, stateful_step_count=50, deadline=None)
