"""`kvweave bench reuse`: hits, storage and repeated work by cache policy, as FusionRAG simulates them (§5.3.3).

Pure counting: every chunk has size 1, and no KV is computed. The store's own catalogue, limits and keys decide what is
stored and evicted. Finding and storing follow the recipes (`match.py`, `recipe.py`): a chunk's path comes first, then
a copy that is valid at any position, and only KV computed after exact KV is stored.
"""

import tempfile
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path

from kvweave.database import Database
from kvweave.kvstore.capacity import Capacity
from kvweave.kvstore.catalog import Catalog, NewEntry
from kvweave.kvstore.keys import EntryKey, digest_tokens
from kvweave.state.knowledge_base_state import Progress, no_progress
from kvweave.types import KVProvenance
from kvweave_lab.bench.workload import Query, Traffic, draw_queries

QUESTION_EVERY_S = 60.0
"""Time between two questions, by which frequency decays: a thousand questions take most of a day."""

UNLIMITED = 2**62

_MODEL = "0" * 32
_SYSTEM = digest_tokens([])


@dataclass(frozen=True, slots=True)
class CachePolicy:
    """How a cache stores and reuses chunk KV.

    Attributes:
        name: in tables.
        ordered: a question's chunks are reordered: the longest stored path first, then the others by how often they were
            retrieved so far.
        anywhere: a copy of each chunk is prepared when its document is added, and reused at any position.
        extends: the first chunk after the exact path is computed and stored even if it has a copy.
    """

    name: str
    ordered: bool = False
    anywhere: bool = False
    extends: bool = False


POLICIES = (
    CachePolicy("prefix"),
    CachePolicy("ordered prefix", ordered=True),
    CachePolicy("anywhere", anywhere=True),
    CachePolicy("both", ordered=True, anywhere=True, extends=True),
)
"""A token-prefix cache, the same with reordered chunks, kvweave's recipes, and both together: a path that grows by one
chunk per question, which no recipe does, and copies for the rest."""


@dataclass(frozen=True, slots=True)
class ReuseCounts:
    """What one cache did with all questions, as numbers of chunks.

    Attributes:
        cache: the policy's name.
        retrieved: by all questions together.
        found: retrieved chunks whose KV was stored before the question; a chunk's first question does not count.
        exact: retrieved chunks with the KV of full attention, found or computed.
        stale: retrieved chunks whose KV was computed after other text.
        prepared: computed when their document was added.
        computed: computed while answering.
        again: computed or prepared chunks that had been computed before, at any position.
        stored: entries at the end; a chunk counts once for each of its entries.
    """

    cache: str
    retrieved: int
    found: int
    exact: int
    stale: int
    prepared: int
    computed: int
    again: int
    stored: int

    @property
    def hit_rate(self) -> float:
        """Found over retrieved chunks."""
        return self.found / self.retrieved

    @property
    def exact_share(self) -> float:
        """Exact over retrieved chunks."""
        return self.exact / self.retrieved

    def answering_share(self, ratio: float) -> float:
        """Return the share of the context computed while answering, if `ratio` of the stale tokens is recomputed."""
        return (self.computed + ratio * self.stale) / self.retrieved


@dataclass(frozen=True, slots=True)
class ReusePoint:
    """One traffic under all policies, the prefix cache first. `cap` is in chunks; None is no limit."""

    traffic: Traffic
    cap: int | None
    caches: tuple[ReuseCounts, ...]

    def storage(self, one: ReuseCounts) -> float:
        """Return the stored chunks of a cache as a share of the prefix cache's."""
        return one.stored / self.caches[0].stored

    def avoided(self, one: ReuseCounts) -> float | None:
        """Return the share of the prefix cache's repeated computation that a cache avoids; None if it has none."""
        again = self.caches[0].again
        return 1 - one.again / again if again else None


def sweep(
    base: Traffic,
    *,
    chunks_per_query: Sequence[int] = (),
    exponents: Sequence[float] = (),
    shuffled: Sequence[float] = (),
    repeated: Sequence[float] = (),
) -> list[Traffic]:
    """Return the base, then the base with each of the other values, one at a time."""
    points = [base]
    points += [replace(base, chunks_per_query=value) for value in chunks_per_query]
    points += [replace(base, exponent=value) for value in exponents]
    points += [replace(base, shuffled=value) for value in shuffled]
    points += [replace(base, repeated=value) for value in repeated]
    return list(dict.fromkeys(points))


def bench_reuse(points: Sequence[Traffic], progress: Progress = no_progress) -> list[ReusePoint]:
    """Simulate every point under every policy; then the first point again, capped at one copy of every chunk."""
    done: list[ReusePoint] = []
    total = len(POLICIES) * (len(points) + 1)

    def simulated(traffic: Traffic, cap: int | None) -> ReusePoint:
        queries, caches = draw_queries(traffic), []
        for policy in POLICIES:
            caches.append(simulate_cache(policy, queries, traffic.known_chunks, cap))
            progress("caches", len(done) * len(POLICIES) + len(caches), total)
        return ReusePoint(traffic, cap, tuple(caches))

    for traffic in points:
        done.append(simulated(traffic, None))
    one_copy = next(one.stored for one in done[0].caches if one.cache == "anywhere")
    return [*done, simulated(points[0], one_copy)]


def simulate_cache(
    policy: CachePolicy, queries: Sequence[Query], known_chunks: int, cap: int | None = None
) -> ReuseCounts:
    """Count what a cache that starts empty does with these questions.

    Args:
        policy: how it stores KV.
        queries: in order; chunks from number `known_chunks` on are added with the first question for them.
        known_chunks: number of chunks known beforehand; their numbers start at 0.
        cap: how many chunks the cache may hold; None for all.
    """
    with tempfile.TemporaryDirectory(prefix="kvweave-bench-") as folder:
        simulated = _SimulatedCache(policy, Path(folder), known_chunks, cap)
        with simulated.database.transaction():  # one commit, since nothing has to survive a crash
            if policy.anywhere:
                for chunk in range(known_chunks):
                    simulated.prepare(chunk)
            for query in queries:
                simulated.ask(query)
        simulated.database.close()
    return simulated.result()


class _SimulatedCache:
    """One cache: its entries, held by a catalogue, and its counts so far."""

    def __init__(self, policy: CachePolicy, folder: Path, known_chunks: int, cap: int | None) -> None:
        self.database = Database(folder / "catalog.sqlite")
        self._policy, self._known_chunks = policy, known_chunks
        self._catalog = Catalog(self.database, clock=lambda: self._now_s)
        self._capacity = Capacity(self.database, self._catalog, folder, lambda: self._in_use)
        self._now_s = 0.0
        self._in_use: frozenset[str] = frozenset()  # the entries that the current question uses
        self._capacity.set_limit(UNLIMITED if cap is None else cap)
        self._paths: set[Query] = set()  # the catalogue's entries, to find the longest path
        self._computed_chunks: set[int] = set()
        self._retrieved: Counter[int] = Counter()
        self._counts: Counter[str] = Counter()

    def prepare(self, chunk: int) -> None:
        """Store a chunk's own copy, as `add` does."""
        self._count_computed(chunk, "prepared")
        self._put((chunk,))

    def ask(self, query: Query) -> None:
        """Process one question: look up, compute, store."""
        self._now_s += QUESTION_EVERY_S
        first = {chunk for chunk in query if chunk >= self._known_chunks and not self._retrieved[chunk]}
        if self._policy.anywhere:
            for chunk in sorted(first):
                self.prepare(chunk)
        query = reorder_for_prefix(query, self._paths, self._retrieved) if self._policy.ordered else query
        paths = [query[: place + 1] for place in range(len(query))]
        found = self._look_up(paths)
        self._count_found(query, found, first)
        to_store = self._compute(paths, found)
        for path in to_store:
            self._put(path)
        self._in_use = frozenset()
        self._retrieved.update(query)

    def result(self) -> ReuseCounts:
        """Return the counts so far."""
        names = ("retrieved", "found", "exact", "stale", "prepared", "computed", "again")
        return ReuseCounts(
            self._policy.name, **{name: self._counts[name] for name in names}, stored=len(self._paths)
        )

    def _look_up(self, paths: Sequence[Query]) -> list[Query | None]:
        """Return the entry of each chunk: its path's, otherwise its own copy; one query to the catalogue, as in a look-up."""
        candidates = [[path, path[-1:]] if self._policy.anywhere else [path] for path in paths]
        listed = self._catalog.paths(_key(path).digest for each in candidates for path in each)
        found = [next((path for path in each if _key(path).digest in listed), None) for each in candidates]
        if self._policy.extends:
            end = next((place for place, path in enumerate(paths) if found[place] != path), len(paths))
            found[end : end + 1] = [None] * len(found[end : end + 1])
        self._in_use = frozenset(_key(path).digest for path in found if path is not None)
        self._catalog.count_uses(Counter(self._in_use))
        return found

    def _count_found(self, query: Query, found: Sequence[Query | None], first: set[int]) -> None:
        self._counts["retrieved"] += len(query)
        self._counts["found"] += sum(
            path is not None and chunk not in first for chunk, path in zip(query, found, strict=True)
        )

    def _compute(self, paths: Sequence[Query], found: Sequence[Query | None]) -> list[Query]:
        """Count computed and exact chunks; return the paths whose KV is to be stored."""
        to_store, after_stale = [], False
        for path, entry in zip(paths, found, strict=True):
            if entry is None:
                self._count_computed(path[-1], "computed")
                self._counts["exact"] += not after_stale
                to_store += [] if after_stale else [path]
            elif entry == path:
                self._counts["exact"] += 1
            else:
                self._counts["stale"] += 1
                after_stale = True
        return to_store

    def _count_computed(self, chunk: int, how: str) -> None:
        self._counts[how] += 1
        self._counts["again"] += chunk in self._computed_chunks
        self._computed_chunks.add(chunk)

    def _put(self, path: Query) -> None:
        """Insert an entry of size 1 after evicting for it; skip it if the question uses the whole capacity."""
        if len(self._in_use) >= self._capacity.limit_bytes:
            return
        for name in self._capacity.make_room(1):
            self._paths.discard(tuple(map(int, name.split("/"))))
        name = "/".join(map(str, path))
        if self._catalog.insert(NewEntry(_key(path), "", 1, 1, name, [])):
            self._paths.add(path)


def reorder_for_prefix(query: Query, paths: Container[Query], retrieved: Mapping[int, int]) -> Query:
    """Return a question's chunks reordered: the longest stored path first, then the others by popularity.

    `paths` are the stored paths, `retrieved` how often each chunk was retrieved so far.
    """
    by_popularity = sorted(query, key=lambda chunk: (-retrieved.get(chunk, 0), chunk))
    path = _longest((), by_popularity, paths)
    return (*path, *(chunk for chunk in by_popularity if chunk not in path))


def _longest(path: Query, chunks: Sequence[int], paths: Container[Query]) -> Query:
    """Return the longest stored path that starts with `path` and continues with some of these chunks."""
    longest = path
    for chunk in chunks:
        if chunk not in path and (*path, chunk) in paths:
            longest = max(longest, _longest((*path, chunk), chunks, paths), key=len)
    return longest


@lru_cache(maxsize=2**16)
def _key(path: Query) -> EntryKey:
    """Return the key of a path's last chunk, computed after the others; a path of one chunk is its own copy."""
    *before, last = map(_digest, path)
    return EntryKey("bench", _MODEL, last, KVProvenance("observed", (_SYSTEM, *before)))


@cache
def _digest(chunk: int) -> str:
    return digest_tokens([chunk])
