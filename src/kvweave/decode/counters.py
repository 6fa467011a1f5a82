"""Counters of offloaded decoding: what was read, found in memory, written and held."""

from dataclasses import dataclass

from kvweave.results import DecodeStats


@dataclass(slots=True)
class DecodeCounts:
    """Sums since the cache was created, over all layers and heads.

    Attributes:
        rows: new rows.
        attended: attended entries, summed over layers and KV heads.
        retrieved: requested clusters.
        hits: those found in memory because an earlier step had requested them.
        hits_ahead: those found in memory because they had been prefetched, or were being read.
        prefetched, prefetch_unused: clusters prefetched, and those evicted without being used.
        pages_read, bytes_read, reads: from disk, those of indexes included.
        cluster_reads, entries_read: reads of clusters alone, and the useful entries that they returned.
        pages_written, bytes_written, writes: to disk.
        partial_pages: pages written before they were full.
        resident_bytes, peak_resident_bytes: KV in memory now, and the most at any time.
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
    pages_written: int = 0
    bytes_written: int = 0
    writes: int = 0
    partial_pages: int = 0
    resident_bytes: int = 0
    peak_resident_bytes: int = 0

    @property
    def mean_run_entries(self) -> float:
        """Average number of entries per read of clusters."""
        return self.entries_read / self.cluster_reads if self.cluster_reads else 0.0

    @property
    def hit_rate(self) -> float:
        """Share of requested clusters that were in memory since an earlier request, 0..1."""
        return self.hits / self.retrieved if self.retrieved else 0.0

    @property
    def ahead_rate(self) -> float:
        """Share of requested clusters that had been prefetched, 0..1."""
        return self.hits_ahead / self.retrieved if self.retrieved else 0.0

    def record_resident(self, resident_bytes: int) -> None:
        self.resident_bytes = resident_bytes
        self.peak_resident_bytes = max(self.peak_resident_bytes, resident_bytes)

    def per_token(self) -> DecodeStats:
        """Return the facts of a report row, per new row."""
        rows = max(1, self.rows)
        return DecodeStats(
            attended_per_token=self.attended / rows,
            pages_read_per_token=self.pages_read / rows,
            bytes_per_token=self.bytes_read / rows,
            reads_per_token=self.reads / rows,
            mean_run_entries=self.mean_run_entries,
            hit_rate=self.hit_rate,
            ahead_rate=self.ahead_rate,
            resident_bytes=self.peak_resident_bytes,
        )
