"""Any order of changes to the catalogue leaves what a dictionary of entries would hold."""

import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvweave.database import Database
from kvweave.kvstore.catalog import Catalog, NewEntry
from kvweave.kvstore.keys import EntryKey
from kvweave.types import KVProvenance

NAMESPACES = st.sampled_from(["one", "one", "two"])
CHUNKS = st.sampled_from(["aa", "bb"])
OWNERS = st.sampled_from(["letters", "notes"])
KEYS = st.builds(
    EntryKey,
    NAMESPACES,
    st.sampled_from(["model", "model", "other"]),
    CHUNKS,
    st.builds(
        KVProvenance,
        st.sampled_from(["isolated", "observed"]),
        st.sampled_from([(), ("before",), ("b", "c")]),
    ),
)
SIZES = st.integers(1, 10**6)


@dataclass
class Row:
    """What the catalogue must know of an entry."""

    key: EntryKey
    path: str
    bytes: int
    sources: frozenset[str]
    uses: int = 0


class Broken(Exception):
    """Ends a transaction in its middle."""


class CatalogMachine(RuleBasedStateMachine):
    """The catalogue beside plain dictionaries."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.rows: dict[str, Row] = {}
        self.owned: set[tuple[str, str, str]] = set()
        self.retrieved: Counter[str] = Counter()
        self.files = 0
        self.now_s = 1_000.0
        self.open()

    def open(self) -> None:
        self.database = Database(Path(self.folder.name) / "catalog.sqlite")
        self.catalog = Catalog(self.database, clock=lambda: self.now_s)

    def teardown(self) -> None:
        self.database.close()
        self.folder.cleanup()

    def dropped(self, keys: Iterable[str], paths: Iterable[str]) -> None:
        """Forget these keys, whose files the catalogue must have named."""
        assert sorted(self.rows.pop(key).path for key in sorted(set(keys))) == sorted(paths)

    @rule(key=KEYS, size=SIZES, more=st.sets(CHUNKS))
    def insert(self, key: EntryKey, size: int, more: set[str]) -> None:
        self.files += 1
        row = Row(key, f"{self.files}", size, frozenset(more | {key.tokens}))
        added = self.catalog.insert(NewEntry(key, "name", 10, size, row.path, sorted(row.sources)))
        assert added == (key.digest not in self.rows)
        self.rows.setdefault(key.digest, row)

    @rule(key=KEYS, size=SIZES, owner=OWNERS)
    def fail_in_a_transaction(self, key: EntryKey, size: int, owner: str) -> None:
        try:
            with self.database.transaction():
                self.catalog.drop_all()
                self.catalog.insert(NewEntry(key, "name", 10, size, "never", [key.tokens]))
                self.catalog.disown(key.namespace, owner)
                raise Broken
        except Broken:
            pass

    @rule(keys=st.lists(KEYS, max_size=4))
    def drop(self, keys: list[EntryKey]) -> None:
        listed = {key.digest for key in keys} & self.rows.keys()
        self.dropped(listed, self.catalog.drop(key.digest for key in keys))

    @rule(key=KEYS)
    def drop_file(self, key: EntryKey) -> None:
        row = self.rows.pop(key.digest, None)
        assert self.catalog.drop_file(row.path if row else "never") == (row is not None)

    @precondition(lambda self: len(self.rows) > 5)
    @rule()
    def drop_all(self) -> None:
        self.dropped(set(self.rows), self.catalog.drop_all())

    @rule(key=KEYS, most=st.integers(1, 3), spare=st.sets(KEYS.map(lambda key: key.digest)))
    def drop_surplus(self, key: EntryKey, most: int, spare: set[str]) -> None:
        def made_alike(other: EntryKey) -> bool:
            """Whether the entries differ in their context alone."""
            return (
                replace(other, provenance=key.provenance) == key
                and other.provenance.kind == key.provenance.kind
            )

        others = {digest for digest, row in self.rows.items() if made_alike(row.key)} - {key.digest}
        gone = self.catalog.drop_surplus(key, most, spare)
        by_path = {row.path: digest for digest, row in self.rows.items()}
        digests = {by_path[path] for path in gone}
        assert digests <= others - spare
        assert len(digests) == min(max(0, len(others) + 1 - most), len(others - spare))
        self.dropped(digests, gone)

    @rule(namespace=NAMESPACES, owner=OWNERS, chunks=st.sets(CHUNKS))
    def own(self, namespace: str, owner: str, chunks: set[str]) -> None:
        self.catalog.own(namespace, owner, chunks)
        self.owned |= {(namespace, owner, chunk) for chunk in chunks}

    @rule(namespace=NAMESPACES, owner=OWNERS)
    def disown(self, namespace: str, owner: str) -> None:
        mine = {each for each in self.owned if each[:2] == (namespace, owner)}
        self.owned -= mine
        lost = {each[2] for each in mine} - self.owners_chunks(namespace)
        gone = [
            digest
            for digest, row in self.rows.items()
            if row.key.namespace == namespace and row.sources & lost
        ]
        self.dropped(gone, self.catalog.disown(namespace, owner))
        for chunk in lost:
            del self.retrieved[chunk]

    @rule(
        uses=st.dictionaries(KEYS.map(lambda key: key.digest), st.integers(1, 9)),
        passed_s=st.floats(-50, 500),
    )
    def count_uses(self, uses: dict[str, int], passed_s: float) -> None:
        self.now_s += passed_s
        self.catalog.count_uses(uses)
        for digest in uses.keys() & self.rows.keys():
            self.rows[digest].uses += uses[digest]

    @rule(chunks=st.dictionaries(st.tuples(NAMESPACES, CHUNKS), st.integers(1, 9)))
    def count_retrieved(self, chunks: dict[tuple[str, str], int]) -> None:
        self.catalog.count_retrieved(chunks)
        for (namespace, chunk), times in chunks.items():
            if chunk in self.owners_chunks(namespace):
                self.retrieved[chunk] += times

    @rule(key=KEYS, size=SIZES)
    def correct_size(self, key: EntryKey, size: int) -> None:
        row = self.rows.get(key.digest)
        if row:
            self.catalog.correct_sizes({row.path: size})
            assert self.catalog.recount() == (row.bytes == size)
            row.bytes = size

    @rule()
    def reopen(self) -> None:
        self.database.close()
        self.open()

    def owners_chunks(self, namespace: str) -> set[str]:
        return {chunk for space, _, chunk in self.owned if space == namespace}

    @invariant()
    def rows_are_those_of_the_dictionary(self) -> None:
        expected = {row.path: (digest, row.bytes) for digest, row in self.rows.items()}
        assert self.catalog.expected_files() == expected
        assert self.catalog.paths(self.rows) == {digest: row.path for digest, row in self.rows.items()}
        versions: dict[str, Any] = {}
        for row in self.rows.values():
            if (row.key.namespace, row.key.model) == ("one", "model"):
                versions.setdefault(row.key.tokens, []).append(row.key.provenance.kind)
        found = self.catalog.versions("one", "model", ["aa", "bb"])
        assert {chunk: sorted(each.kind for each in all_) for chunk, all_ in found.items()} == {
            chunk: sorted(kinds) for chunk, kinds in versions.items()
        }

    @invariant()
    def counters_are_right(self) -> None:
        rows = self.rows.values()
        assert self.catalog.total_bytes() == sum(row.bytes for row in rows)
        assert self.catalog.unused_bytes() == sum(row.bytes for row in rows if not row.uses)
        kinds = Counter(row.key.provenance.kind for row in rows)
        assert {
            kind: total.entries for kind, total in self.catalog.totals().items() if total.entries
        } == kinds
        assert self.catalog.recount()

    @invariant()
    def owners_and_retrievals_are_kept(self) -> None:
        for namespace in ("one", "two"):
            owned = self.owners_chunks(namespace)
            for chunk in ("aa", "bb"):
                assert self.catalog.all_owned(namespace, [chunk]) == (chunk in owned)
        assert self.catalog.retrieved() == {chunk: times for chunk, times in self.retrieved.items() if times}

    @invariant()
    def what_is_evicted_first_takes_the_bytes_that_are_asked_for(self) -> None:
        total = sum(row.bytes for row in self.rows.values())
        chosen = self.catalog.lowest_scores(total // 2)
        assert sum(row.bytes for row in chosen) >= total // 2
        scores = self.catalog.scores(self.rows)
        rest = [scores[key] for key in scores.keys() - {row.key for row in chosen}]
        assert max((row.score for row in chosen), default=0.0) <= min(rest, default=float("inf"))


TestCatalog = CatalogMachine.TestCase
TestCatalog.settings = settings(max_examples=20, stateful_step_count=40, deadline=None)
