"""What is stored, found and computed again when chunk KV is kept in this way or that: FusionRAG's simulation (§5.3.3).

Pure counting: every chunk counts 1, and no KV is made. What is there, what goes when room is needed and how entries are
named is decided by the store's own catalogue, caps and keys, and what is found and kept by the rules of the recipes (`match.py`,
`recipe.py`): the path first, then a copy that may stand anywhere; what is computed behind exact KV alone is kept.
"""

import tempfile
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path

from kvweave.database import Database
from kvweave.kvstore.capacity import Capacity
from kvweave.kvstore.catalog import Catalog, NewEntry
from kvweave.kvstore.keys import EntryKey, digest_tokens
from kvweave.types import KVProvenance
from kvweave_lab.bench.queries import Query, Traffic, draw_queries

QUESTION_EVERY_S = 60.0
"""Time between two questions, by which heat ages: a thousand of them are most of a day."""

UNLIMITED = 2**62

_MODEL = "0" * 32
_SYSTEM = digest_tokens([])

Progress = Callable[[str, int, int], None]
"""Called with a stage's name, how much of it is done, and how much there is."""


@dataclass(frozen=True, slots=True)
class Rule:
    """How a cache keeps chunk KV.

    Attributes:
        name: in tables.
        ordered: the chunks of a question are put in the order of the longest path that is stored, the others behind them,
            those first that were asked for most often so far.
        anywhere: of each chunk a copy is made when its document comes, which then serves wherever the chunk stands.
        extends: where the exact path ends, the next chunk is computed although there is a copy of it, and kept.
    """

    name: str
    ordered: bool = False
    anywhere: bool = False
    extends: bool = False


RULES = (
    Rule("prefix"),
    Rule("ordered prefix", ordered=True),
    Rule("anywhere", anywhere=True),
    Rule("both", ordered=True, anywhere=True, extends=True),
)
"""A token-prefix cache, the cheap improvement of it, kvweave's recipes, and the two together: a path that grows by a chunk
with each question, which no recipe does, and copies for the rest."""


@dataclass(frozen=True, slots=True)
class Reuse:
    """What one cache did with all questions; counts are of chunks.

    Attributes:
        cache: the rule's name.
        retrieved: by all questions together.
        found: of these, those whose KV was there before the question, not counting a chunk's first question.
        exact: of these, those whose KV was full attention's, found or computed so.
        stale: of these, those for which KV stood that was made behind other text.
        prepared: computed when their document came.
        computed: computed while answering.
        again: of all that were computed, those that had been computed before, wherever they stood.
        stored: how many there is KV of in the end, one chunk as often as it is there.
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
        """Share of what was retrieved."""
        return self.found / self.retrieved

    @property
    def exact_share(self) -> float:
        """Share of what was retrieved."""
        return self.exact / self.retrieved

    def answering_share(self, ratio: float) -> float:
        """Share of the context computed while answering if `ratio` of what is stale is computed anew."""
        return (self.computed + ratio * self.stale) / self.retrieved


@dataclass(frozen=True, slots=True)
class ReusePoint:
    """One traffic under all rules; `cap` is in chunks, None where everything is kept. The prefix cache comes first."""

    traffic: Traffic
    cap: int | None
    caches: tuple[Reuse, ...]

    def storage(self, one: Reuse) -> float:
        """What a cache stores, of what the prefix cache does."""
        return one.stored / self.caches[0].stored

    def avoided(self, one: Reuse) -> float | None:
        """Share of the prefix cache's computing again that a cache does without; None if that does none."""
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
    """The base, then the base with each of the other values, one at a time."""
    points = [base]
    points += [replace(base, chunks_per_query=value) for value in chunks_per_query]
    points += [replace(base, exponent=value) for value in exponents]
    points += [replace(base, shuffled=value) for value in shuffled]
    points += [replace(base, repeated=value) for value in repeated]
    return list(dict.fromkeys(points))


def bench_reuse(
    points: Sequence[Traffic], progress: Progress = lambda stage, done, of: None
) -> list[ReusePoint]:
    """Every point under every rule, and the first one once more with each cache capped at one copy of every chunk."""
    done: list[ReusePoint] = []
    total = len(RULES) * (len(points) + 1)

    def simulated(traffic: Traffic, cap: int | None) -> ReusePoint:
        queries, caches = draw_queries(traffic), []
        for rule in RULES:
            caches.append(count_reuse(rule, queries, traffic.known_chunks, cap))
            progress("caches", len(done) * len(RULES) + len(caches), total)
        return ReusePoint(traffic, cap, tuple(caches))

    for traffic in points:
        done.append(simulated(traffic, None))
    one_copy = next(one.stored for one in done[0].caches if one.cache == "anywhere")
    return [*done, simulated(points[0], one_copy)]


def count_reuse(rule: Rule, queries: Sequence[Query], known_chunks: int, cap: int | None = None) -> Reuse:
    """What a cache that is empty at first does with these questions.

    Args:
        rule: how it keeps KV.
        queries: one after the other; chunks from number `known_chunks` on come with the first question for them.
        known_chunks: how many chunks there are beforehand, the numbers from 0.
        cap: how many chunks it may hold KV of; None for all.
    """
    with tempfile.TemporaryDirectory(prefix="kvweave-bench-") as folder:
        counted = _Counted(rule, Path(folder), known_chunks, cap)
        with counted.database.transaction():  # nothing of it has to survive: one commit
            if rule.anywhere:
                for chunk in range(known_chunks):
                    counted.prepare(chunk)
            for query in queries:
                counted.ask(query)
        counted.database.close()
    return counted.result()


class _Counted:
    """One cache: which KV it holds, by the catalogue, and what it did so far."""

    def __init__(self, rule: Rule, folder: Path, known_chunks: int, cap: int | None) -> None:
        self.database = Database(folder / "catalog.sqlite")
        self._rule, self._known_chunks = rule, known_chunks
        self._catalog = Catalog(self.database, clock=lambda: self._now_s)
        self._capacity = Capacity(self.database, self._catalog, folder, lambda: self._in_use)
        self._now_s = 0.0
        self._in_use: frozenset[str] = frozenset()  # what the question at hand has found
        self._capacity.set_limit(UNLIMITED if cap is None else cap)
        self._paths: set[Query] = set()  # as the catalogue lists them, for finding the longest one
        self._made: set[int] = set()
        self._asked: Counter[int] = Counter()
        self._counts: Counter[str] = Counter()

    def prepare(self, chunk: int) -> None:
        """Make a chunk's own copy, as `add` does."""
        self._count_made(chunk, "prepared")
        self._put((chunk,))

    def ask(self, query: Query) -> None:
        """One question: what is found, what is computed, what is kept of it."""
        self._now_s += QUESTION_EVERY_S
        first = {chunk for chunk in query if chunk >= self._known_chunks and not self._asked[chunk]}
        if self._rule.anywhere:
            for chunk in sorted(first):
                self.prepare(chunk)
        query = in_best_order(query, self._paths, self._asked) if self._rule.ordered else query
        paths = [query[: place + 1] for place in range(len(query))]
        found = self._found(paths)
        self._count_found(query, found, first)
        kept = self._computed(paths, found)
        for path in kept:
            self._put(path)
        self._in_use = frozenset()
        self._asked.update(query)

    def result(self) -> Reuse:
        """The counts so far."""
        names = ("retrieved", "found", "exact", "stale", "prepared", "computed", "again")
        return Reuse(self._rule.name, **{name: self._counts[name] for name in names}, stored=len(self._paths))

    def _found(self, paths: Sequence[Query]) -> list[Query | None]:
        """For each chunk the entry that stands for it: of its path, else its own; one query, as a look-up does."""
        ways = [[path, path[-1:]] if self._rule.anywhere else [path] for path in paths]
        listed = self._catalog.paths(_key(path).digest for each in ways for path in each)
        found = [next((path for path in each if _key(path).digest in listed), None) for each in ways]
        if self._rule.extends:
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

    def _computed(self, paths: Sequence[Query], found: Sequence[Query | None]) -> list[Query]:
        """Count what is computed and what is exact; returns the paths whose KV is worth keeping."""
        kept, tainted = [], False
        for path, there in zip(paths, found, strict=True):
            if there is None:
                self._count_made(path[-1], "computed")
                self._counts["exact"] += not tainted
                kept += [] if tainted else [path]
            elif there == path:
                self._counts["exact"] += 1
            else:
                self._counts["stale"] += 1
                tainted = True
        return kept

    def _count_made(self, chunk: int, how: str) -> None:
        self._counts[how] += 1
        self._counts["again"] += chunk in self._made
        self._made.add(chunk)

    def _put(self, path: Query) -> None:
        """List an entry of size 1, after what has to go for it; none where the question uses all there is."""
        if len(self._in_use) >= self._capacity.limit_bytes:
            return
        for name in self._capacity.make_room(1):
            self._paths.discard(tuple(map(int, name.split("/"))))
        name = "/".join(map(str, path))
        if self._catalog.insert(NewEntry(_key(path), "", 1, 1, name, [])):
            self._paths.add(path)


def in_best_order(query: Query, paths: Container[Query], asked: Mapping[int, int]) -> Query:
    """A question's chunks in the order of the longest path that is stored, the others behind, most asked for first.

    `paths` are those that are stored, `asked` how often each chunk was asked for so far; none where it is missing.
    """
    by_popularity = sorted(query, key=lambda chunk: (-asked.get(chunk, 0), chunk))
    path = _longest((), by_popularity, paths)
    return (*path, *(chunk for chunk in by_popularity if chunk not in path))


def _longest(path: Query, chunks: Sequence[int], paths: Container[Query]) -> Query:
    """The longest stored path that begins so and goes on with some of these chunks."""
    longest = path
    for chunk in chunks:
        if chunk not in path and (*path, chunk) in paths:
            longest = max(longest, _longest((*path, chunk), chunks, paths), key=len)
    return longest


@lru_cache(maxsize=2**16)
def _key(path: Query) -> EntryKey:
    """As KV of a chunk is named that was made behind these others; the path of one chunk is its own copy."""
    *before, last = map(_digest, path)
    return EntryKey("bench", _MODEL, last, KVProvenance("observed", (_SYSTEM, *before)))


@cache
def _digest(chunk: int) -> str:
    return digest_tokens([chunk])
