"""Strategy without clusters: scans all keys on disk and attends to the best single entries.

Paper: DynaKV §8.1, the naive baseline. Keys and values are stored apart, in the order of the text, so that the scan reads
whole runs and no key twice. Pages of values stay in memory as clusters do.
"""

from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvweave.decode.disk.entry_format import EntryFormat
from kvweave.decode.disk.layout import Layout, Owner
from kvweave.decode.disk.page_file import AlignedBuffer, PageFile
from kvweave.decode.store.frames import gather_pages
from kvweave.decode.strategy import CacheHooks, Retriever, SharedState, Strategy, TokenBudget
from kvweave.errors import StoreError
from kvweave.ops.partial_attention import PartialAttention


class SequencePages:
    """Encoded vectors (n, E) of one head in the order of the text, in pages on disk; the last, half-filled page stays in memory.

    `entry_format` encodes a vector as an entry of two halves.
    """

    def __init__(self, file: PageFile, layout: Layout, entry_format: EntryFormat, owner: Owner) -> None:
        self.entry_format = entry_format
        self.count = 0
        self._file, self._layout, self._owner = file, layout, owner
        self._homes: list[int] = []
        self._checksums: list[int] = []  # of each full page: the sum of its words, signed
        self._tail = torch.zeros(entry_format.page_entries, entry_format.entry_bytes, dtype=torch.uint8)

    @property
    def resident_bytes(self) -> int:
        """Memory of the last page."""
        return self._tail.nbytes

    @property
    def pages(self) -> int:
        """Number of full pages, which are on disk."""
        return self.count // self.entry_format.page_entries

    def append(self, vectors: Tensor) -> None:
        """Append encoded vectors (n, E)."""
        page_entries = self.entry_format.page_entries
        start = 0
        while start < vectors.shape[0]:
            slot = self.count % page_entries
            some = vectors[start : start + page_entries - slot]
            self._tail[slot : slot + some.shape[0]] = some
            self.count += some.shape[0]
            start += some.shape[0]
            if slot + some.shape[0] == page_entries:
                self._write(self.pages - 1)

    def tail(self) -> Tensor:
        """Return the vectors (n, E) of the half-filled last page; read-only."""
        return self._tail[: self.count % self.entry_format.page_entries]

    def page_numbers(self, pages: Sequence[int]) -> NDArray[np.int64]:
        """Return where these pages are in the file."""
        numbers, home_pages = np.asarray(pages, np.int64), self._layout.home_pages
        homes = np.asarray(self._homes, np.int64)[numbers // home_pages]
        return self._layout.page_numbers(homes, numbers % home_pages)

    def check(self, pages: Sequence[int], content: Tensor) -> None:
        """Raise StoreError unless `content` (n, page bytes) is what was written as these pages."""
        sums = content.view(torch.int64).sum(1)
        expected = torch.tensor([self._checksums[page] for page in pages], dtype=torch.int64)
        wrong = torch.nonzero(sums != expected)
        if wrong.numel():
            layer, head = self._owner
            raise StoreError(
                f"page {pages[int(wrong[0])]} of layer {layer}, head {head} was read and is not what was written; start "
                "again from the text"
            )

    def _write(self, page: int) -> None:
        """Write the last page, which is full."""
        if page // self._layout.home_pages == len(self._homes):
            self._homes.append(self._layout.allocate(self._owner))
        buffer = AlignedBuffer(self.entry_format.page_bytes)
        content = torch.frombuffer(buffer.view, dtype=torch.uint8)
        content[: self._tail.numel()] = self._tail.flatten()
        self._checksums.append(int(content.view(torch.int64).sum()))
        self._file.write(int(self.page_numbers([page])[0]), [buffer.view])


class TopEntries(Retriever):
    """One layer's entries in the order of the text; attention to the top ones of an exact scan.

    Tensor letters: G KV heads, R query rows of a head's group, n entries, P pages, D head width. The page cache holds
    pages of values, each under its number as a cluster.

    Nothing is prefetched: the scan needs all frames, and the selected entries change with every query.
    """

    def __init__(self, layer: int, shared: SharedState, hooks: CacheHooks) -> None:
        # No hook is called: the last pages are allocated from the start, and what the next layer retrieves is unknown.
        self.layer, self._shared, self._store = layer, shared, shared.store
        entry = shared.store.entry_format
        assert entry.width % 2 == 0
        self._format = EntryFormat(entry.width // 2, entry.dtype, entry.storage, entry.disk_page_bytes)
        heads = range(shared.store.tables[layer].heads)
        self._keys = [self._new_sequence(head) for head in heads]
        self._values = [self._new_sequence(head) for head in heads]

    @property
    def resident_bytes(self) -> int:
        """Memory of the last pages."""
        return sum(sequence.resident_bytes for sequence in (*self._keys, *self._values))

    def fill(self, keys: Tensor, values: Tensor, queries: Tensor | None) -> None:
        """Append entries (G, n, D)."""
        for rows, sequences in ((keys, self._keys), (values, self._values)):
            vectors = self._format.encode(*rows.chunk(2, dim=-1))
            for head, sequence in enumerate(sequences):
                sequence.append(vectors[head])

    def add(self, keys: Tensor, values: Tensor, budget: TokenBudget) -> None:
        """Append entries (G, n, D)."""
        self.fill(keys, values, None)

    def attend(self, attention: PartialAttention, limit: int) -> int:
        """Scan all keys, and attend to the `limit` best entries of each head."""
        stored = self._keys[0].count
        count = min(limit, stored)
        if count == 0:
            return 0
        self._store.start_layer(self.layer)
        logits = self._scan(attention)  # (G, R, n)
        best = logits.softmax(-1).sum(1).topk(count, dim=-1).indices  # (G, k)
        selected = torch.zeros(best.shape[0], stored, dtype=torch.bool, device=best.device)
        selected = selected.scatter_(1, best, True)
        logits = logits.masked_fill_(~selected[:, None], float("-inf"))
        self._attend_selected(attention, logits, selected.cpu())
        return int(selected.sum())

    def _new_sequence(self, head: int) -> SequencePages:
        pages = self._store.pages
        return SequencePages(pages.file, pages.layout, self._format, (self.layer, head))

    def _scan(self, attention: PartialAttention) -> Tensor:
        """Return the logits of all keys, (G, R, n)."""
        page_cache, device = self._store.page_cache, attention.query.device
        found = []
        pages, step = self._keys[0].pages, self._portion_pages()
        for start in range(0, pages, step):
            some = range(start, min(start + step, pages))
            frames = [page_cache.allocate(len(some)) for _ in self._keys]
            try:
                self._read_into(frames, self._keys, [some for _ in self._keys])
                keys = self._vectors(gather_pages(page_cache.frames.pages, torch.tensor(frames)))
                found.append(attention.logits(keys.to(device)))
            finally:
                for own in frames:
                    page_cache.frames.free(own)
        tails = torch.stack([sequence.tail() for sequence in self._keys])  # (G, n, E)
        if tails.shape[1]:
            keys = torch.cat(self._format.decode(tails), dim=-1)
            found.append(attention.logits(keys.to(device)))
        return torch.cat(found, dim=-1)

    def _attend_selected(self, attention: PartialAttention, logits: Tensor, selected: Tensor) -> None:
        """Read the pages that hold selected values (G, n), and attend to them; other logits are −inf."""
        page_entries, pages = self._format.page_entries, self._values[0].pages
        on_pages = selected[:, : pages * page_entries].unflatten(1, (pages, page_entries)).sum(-1)  # (G, P)
        needed = [own.nonzero()[:, 0].tolist() for own in on_pages]
        step = self._portion_pages()
        for start in range(0, max(map(len, needed)), step):
            self._attend_pages(attention, logits, [own[start : start + step] for own in needed], on_pages)
        tails = torch.stack([sequence.tail() for sequence in self._values])
        if tails.shape[1] and bool(selected[:, pages * page_entries :].any()):
            values = torch.cat(self._format.decode(tails), dim=-1)
            attention.add_logits(logits[:, :, pages * page_entries :].clone(), values.to(logits.device))

    def _attend_pages(
        self, attention: PartialAttention, logits: Tensor, needed: list[list[int]], on_pages: Tensor
    ) -> None:
        """Attend to some pages of each head; `on_pages` (G, P) are the selected entries of each page."""
        self._load(needed, on_pages)
        frames, pages = self._frames_of(needed)  # (G, p)
        self._store.page_cache.record_use(
            [key for head, own in enumerate(needed) for key in self._page_keys(head, own)]
        )
        page_entries = self._format.page_entries
        values = self._vectors(
            gather_pages(self._store.page_cache.frames.pages, frames)
        )  # (G, p · page entries, D)
        columns = (pages.clamp(min=0)[..., None] * page_entries + torch.arange(page_entries)).flatten(1)
        own_logits = logits.gather(2, columns.to(logits.device)[:, None].expand(-1, logits.shape[1], -1))
        padding = (pages < 0).repeat_interleave(page_entries, dim=1)[:, None].to(logits.device)
        attention.add_logits(own_logits.masked_fill_(padding, float("-inf")), values.to(logits.device))
        self._store.page_cache.unpin_all()

    def _load(self, needed: list[list[int]], on_pages: Tensor) -> None:
        """Load pages of values, and pin them."""
        page_cache, counts = self._store.page_cache, self._shared.counts
        missing = []
        for head, pages in enumerate(needed):
            keys = self._page_keys(head, pages)
            counts.retrieved += len(keys)
            absent = [page for key, page in zip(keys, pages, strict=True) if key not in page_cache]
            counts.hits += len(keys) - len(absent)
            page_cache.pin(keys)
            counts.entries_read += int(on_pages[head, absent].sum())
            missing.append(absent)
        self._read(missing)
        page_cache.pin([key for head, pages in enumerate(missing) for key in self._page_keys(head, pages)])

    def _frames_of(self, needed: list[list[int]]) -> tuple[Tensor, Tensor]:
        """Return frames and numbers of pages in memory, (G, p) each; where a head has fewer, any frame and −1."""
        page_cache = self._store.page_cache
        longest = max(map(len, needed))
        # Values there are hidden, but multiplied by zero: they must be finite.
        some_head = next(head for head, pages in enumerate(needed) if pages)
        (padding,) = page_cache.frames_of((self.layer, some_head, needed[some_head][0]))
        frames = torch.full((len(needed), longest), padding)
        numbers = torch.full((len(needed), longest), -1)
        for head, pages in enumerate(needed):
            own = [page_cache.frames_of(key)[0] for key in self._page_keys(head, pages)]
            frames[head, : len(own)] = torch.tensor(own, dtype=torch.long)
            numbers[head, : len(own)] = torch.tensor(pages, dtype=torch.long)
        return frames, numbers

    def _page_keys(self, head: int, pages: Sequence[int]) -> list[tuple[int, int, int]]:
        return [(self.layer, head, page) for page in pages]

    def _read(self, missing: list[list[int]]) -> None:
        """Read pages of values, given for each head."""
        page_cache, counts = self._store.page_cache, self._shared.counts
        if not any(missing):
            return
        frames = [page_cache.allocate(len(pages)) for pages in missing]
        before = counts.reads
        self._read_into(frames, self._values, missing)
        counts.cluster_reads += counts.reads - before
        for head, pages in enumerate(missing):
            for key, frame in zip(self._page_keys(head, pages), frames[head], strict=True):
                page_cache.insert(key, [frame])

    def _read_into(
        self, frames: list[list[int]], sequences: list[SequencePages], pages: Sequence[Sequence[int]]
    ) -> None:
        """Read pages of each head's sequence into frames, all together, and check them."""
        memory = self._store.page_cache.frames
        numbers = [sequence.page_numbers(own) for sequence, own in zip(sequences, pages, strict=True)]
        all_frames = np.array(list(chain.from_iterable(frames)))
        self._store.pages.read_pages(np.concatenate(numbers), all_frames, memory)
        for sequence, own, into in zip(sequences, pages, frames, strict=True):
            sequence.check(own, gather_pages(memory.pages, torch.tensor(into, dtype=torch.long)))

    def _vectors(self, pages: Tensor) -> Tensor:
        """Return pages (G, P, page bytes) as vectors (G, P · page entries, D)."""
        entries = self._format.entries_in(pages).flatten(1, 2)
        return torch.cat(self._format.decode(entries), dim=-1)

    def _portion_pages(self) -> int:
        """Return how many pages of each head are attended to at once."""
        page_cache = self._store.page_cache
        room = page_cache.frames.free_count + page_cache.evictable_frames()
        return max(1, min(self._shared.portion_pages, room // len(self._keys)))


ENTRIES = Strategy(TopEntries)
