"""What decoding read, found in memory and held: sums that a step's difference is taken of.

Counted where it happens and read by whoever reports; knows nothing of either.
"""

from dataclasses import asdict, dataclass, fields

from kvweave.types import Decoding


@dataclass(slots=True)
class DecodeCounts:
    """Sums since the cache was made, over all layers and heads.

    `pages_read`, `bytes_read`, `reads`: from flash, representatives and index scans included; `entries_read`: useful
    entries among them, clusters' alone, in `cluster_reads` reads. `retrieved`, `hits`: clusters asked for, and those of
    them that were in memory because they had been asked for before; `hits_ahead`: because they had been fetched ahead, or
    were on their way. `prefetched`, `prefetch_unused`: clusters fetched ahead, and those of them
    that went without being used. `pages_written`, `bytes_written`, `writes`; `partial_pages`: pages written before
    they were full. `split_bytes_read`: read for splits alone. `moved_bytes`: written again at
    another place, as the half of a split cluster that leaves and, in a packed layout, what stands behind it.
    `copied_bytes`: to the device's memory that `device_bytes` sets aside. `attended`: entries attended, summed over layers
    and KV heads. `splits`, `forced_splits` of them for a full buffer, `rows`: new rows. `peak_resident_bytes`: the most KV
    held in memory at any time.
    """

    rows: int = 0
    attended: int = 0
    retrieved: int = 0
    hits: int = 0
    hits_ahead: int = 0
    prefetched: int = 0
    prefetch_unused: int = 0
    pages_read: int = 0
    bytes_read: int = 0
    reads: int = 0
    cluster_reads: int = 0
    entries_read: int = 0
    split_bytes_read: int = 0
    pages_written: int = 0
    bytes_written: int = 0
    writes: int = 0
    partial_pages: int = 0
    moved_bytes: int = 0
    copied_bytes: int = 0
    splits: int = 0
    forced_splits: int = 0
    resident_bytes: int = 0
    peak_resident_bytes: int = 0

    @property
    def mean_run_entries(self) -> float:
        """Entries that one read from flash brings on the mean."""
        return self.entries_read / self.cluster_reads if self.cluster_reads else 0.0

    @property
    def hit_rate(self) -> float:
        """Share of retrieved clusters that had stayed in memory since they were asked for before, 0..1."""
        return self.hits / self.retrieved if self.retrieved else 0.0

    @property
    def ahead_rate(self) -> float:
        """Share of retrieved clusters that had been fetched ahead, 0..1."""
        return self.hits_ahead / self.retrieved if self.retrieved else 0.0

    def hold(self, resident_bytes: int) -> None:
        """Note what is held in memory now."""
        self.resident_bytes = resident_bytes
        self.peak_resident_bytes = max(self.peak_resident_bytes, resident_bytes)

    def copy(self) -> "DecodeCounts":
        """These sums as they are now."""
        return DecodeCounts(**asdict(self))

    def since(self, earlier: "DecodeCounts") -> "DecodeCounts":
        """What was added since `earlier`; what is held and its peak stay as they are."""
        levels = {"resident_bytes", "peak_resident_bytes"}
        names = [field.name for field in fields(self)]
        return DecodeCounts(
            **{n: getattr(self, n) - (0 if n in levels else getattr(earlier, n)) for n in names}
        )

    def per_token(self) -> Decoding:
        """A report row's facts, by the names that every report uses; a token is a new row."""
        rows = max(1, self.rows)
        return Decoding(
            attended_per_token=self.attended / rows,
            pages_read_per_token=self.pages_read / rows,
            bytes_per_token=self.bytes_read / rows,
            reads_per_token=self.reads / rows,
            mean_run_entries=self.mean_run_entries,
            hit_rate=self.hit_rate,
            ahead_rate=self.ahead_rate,
            resident_bytes=self.peak_resident_bytes,
        )
