"""Any order of changes to clusters on disk, with memory for few of them, leaves the entries that a dictionary would hold."""

from hypothesis import settings as how

from support.cluster_store_machine import ClusterStoreMachine

TestClusterStore = ClusterStoreMachine.TestCase
TestClusterStore.settings = how(max_examples=25, stateful_step_count=50, deadline=None)
