"""The best single entries, without clusters: every key is scanned on flash, then the chosen values are read.

Paper: DynaKV §8.1, the naive baseline. Keys and values lie apart, in sequence order, so that the scan reads whole runs
and no key twice. Pages of values stay in memory as clusters do.
"""

from collections.abc import Callable, Sequence
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from kvweave.decode.clusters.retrieval import ClusterParts
from kvweave.decode.disk.entry_format import EntryFormat
from kvweave.decode.disk.sequence import SequencePages
from kvweave.decode.page_cache.frames import rows_of
from kvweave.decode.retriever import TokenBudget
from kvweave.ops.partial_attention import PartialAttention


class SingleEntries:
    """One layer's entries in sequence order; attention to the top ones of an exact scan. T is the pass's rows."""

    def __init__(self, layer: int, parts: ClusterParts) -> None:
        self.layer, self._parts, store = layer, parts, parts.store
        self.when_read: Callable[[], None] = lambda: (
            None
        )  # never: what the next layer asks for cannot be told
        self.before_growth: Callable[[int], None] = lambda more_bytes: (
            None
        )  # last pages have their room from the start
        entry = store.form
        assert entry.width % 2 == 0
        self._form = EntryFormat(entry.width // 2, entry.dtype, entry.storage, entry.flash_page_bytes)
        heads = store.tables[layer].heads
        self._keys = [self._sequence(head) for head in range(heads)]
        self._values = [self._sequence(head) for head in range(heads)]

    @property
    def resident_bytes(self) -> int:
        """The last pages."""
        return sum(sequence.resident_bytes for sequence in (*self._keys, *self._values))

    def fill(self, keys: Tensor, values: Tensor, queries: Tensor | None) -> None:
        """Append entries (G, n, D)."""
        for rows, sequences in ((keys, self._keys), (values, self._values)):
            vectors = self._form.encode(*rows.chunk(2, dim=-1))
            for head, sequence in enumerate(sequences):
                sequence.append(vectors[head])

    def add(self, keys: Tensor, values: Tensor, allowed: TokenBudget) -> None:
        """Append entries (G, n, D)."""
        self.fill(keys, values, None)

    def wanted(self, waiting: int, allowed: TokenBudget) -> int:
        """All."""
        return waiting

    def begin(self) -> None:
        """The scan needs its frames for itself: nothing is read ahead."""

    def ahead(self) -> None:
        """Nothing is read ahead: which entries are chosen changes with every query."""

    def settle(self, allowed: TokenBudget) -> None:
        """Nothing was put off."""

    def attend(self, attention: PartialAttention, left: int) -> int:
        """Scan all keys, attend to the `left` best entries of each head."""
        stored = self._keys[0].count
        count = min(left, stored)
        if count == 0:
            return 0
        self._parts.store.come_to(self.layer)
        logits = self._scan(attention)  # (G, R, n)
        best = logits.softmax(-1).sum(1).topk(count, dim=-1).indices  # (G, k)
        chosen = torch.zeros(best.shape[0], stored, dtype=torch.bool, device=best.device).scatter_(
            1, best, True
        )
        logits = logits.masked_fill_(~chosen[:, None], float("-inf"))
        self._attend(attention, logits, chosen.cpu())
        return int(chosen.sum())

    def _sequence(self, head: int) -> SequencePages:
        store = self._parts.store
        return SequencePages(store.pages.file, store.pages.places, self._form, (self.layer, head))

    def _scan(self, attention: PartialAttention) -> Tensor:
        """The logits of all keys, (G, R, n)."""
        frames, found = self._parts.store.residents.frames, []
        pages = self._keys[0].pages
        step = self._at_once()
        for start in range(0, pages, step):
            some = range(start, min(start + step, pages))
            held = [self._parts.store.residents.room(len(some)) for _ in self._keys]
            try:
                self._read_into(held, self._keys, [some for _ in self._keys])
                keys = self._vectors(rows_of(frames.pages, torch.tensor(held)))
                found.append(attention.logits(keys.to(attention.query.device)))
            finally:
                for own in held:
                    frames.give(own)
        tails = torch.stack([sequence.tail() for sequence in self._keys])  # (G, n, E)
        if tails.shape[1]:
            keys = torch.cat(self._form.decode(tails), dim=-1)
            found.append(attention.logits(keys.to(attention.query.device)))
        return torch.cat(found, dim=-1)

    def _attend(self, attention: PartialAttention, logits: Tensor, chosen: Tensor) -> None:
        """Read the pages that hold chosen values (G, n) and add them."""
        per_page, pages = self._form.per_page, self._values[0].pages
        on_pages = chosen[:, : pages * per_page].unflatten(1, (pages, per_page)).sum(-1)  # (G, pages)
        asked = [own.nonzero()[:, 0].tolist() for own in on_pages]
        step = self._at_once()
        for start in range(0, max(map(len, asked)), step):
            self._attend_pages(attention, logits, [own[start : start + step] for own in asked], on_pages)
        tails = torch.stack([sequence.tail() for sequence in self._values])
        if tails.shape[1] and bool(chosen[:, pages * per_page :].any()):
            values = torch.cat(self._form.decode(tails), dim=-1)
            attention.add_weighed(logits[:, :, pages * per_page :].clone(), values.to(logits.device))

    def _attend_pages(
        self, attention: PartialAttention, logits: Tensor, asked: list[list[int]], on_pages: Tensor
    ) -> None:
        residents, counts = self._parts.store.residents, self._parts.counts
        missing = []
        for head, pages in enumerate(asked):
            keys = [(self.layer, head, page) for page in pages]
            counts.retrieved += len(keys)
            absent = [page for key, page in zip(keys, pages, strict=True) if key not in residents]
            counts.hits += len(keys) - len(absent)
            residents.pin(keys)
            counts.entries_read += int(on_pages[head, absent].sum())
            missing.append(absent)
        self._read(missing)
        residents.pin([(self.layer, head, page) for head, pages in enumerate(missing) for page in pages])
        most = max(map(len, asked))
        per_page = self._form.per_page
        frames = torch.zeros(len(asked), most, dtype=torch.long)
        places = torch.full((len(asked), most), -1)
        for head, pages in enumerate(asked):
            held = [residents.frames_of((self.layer, head, page))[0] for page in pages]
            frames[head, : len(held)] = torch.tensor(held, dtype=torch.long)
            frames[head, len(held) :] = residents.frames_of(self._any(asked))[0]
            places[head, : len(pages)] = torch.tensor(pages, dtype=torch.long)
            residents.use([(self.layer, head, page) for page in pages])
        values = self._vectors(rows_of(residents.frames.pages, frames))  # (G, pages · per page, D)
        columns = (places.clamp(min=0)[..., None] * per_page + torch.arange(per_page)).flatten(1)
        own = logits.gather(2, columns.to(logits.device)[:, None].expand(-1, logits.shape[1], -1))
        absent_pages = (places < 0).repeat_interleave(per_page, dim=1)[:, None].to(logits.device)
        attention.add_weighed(own.masked_fill_(absent_pages, float("-inf")), values.to(logits.device))
        residents.release()

    def _read(self, missing: list[list[int]]) -> None:
        residents, counts = self._parts.store.residents, self._parts.counts
        if not any(missing):
            return
        held = [residents.room(len(pages)) for pages in missing]
        before = counts.reads
        self._read_into(held, self._values, missing)
        counts.cluster_reads += counts.reads - before
        for head, pages in enumerate(missing):
            for page, frame in zip(pages, held[head], strict=True):
                residents.put((self.layer, head, page), [frame])

    def _read_into(
        self, frames: list[list[int]], sequences: list[SequencePages], wanted: Sequence[Sequence[int]]
    ) -> None:
        """Read the pages wanted of each head's sequence, together, and check them."""
        numbers = [sequence.numbers(pages) for sequence, pages in zip(sequences, wanted, strict=True)]
        store = self._parts.store
        store.pages.read_all(
            np.concatenate(numbers), np.array(list(chain.from_iterable(frames))), store.residents.frames
        )
        for sequence, pages, own in zip(sequences, wanted, frames, strict=True):
            sequence.check(pages, rows_of(store.residents.frames.pages, torch.tensor(own, dtype=torch.long)))

    def _any(self, asked: list[list[int]]) -> tuple[int, int, int]:
        """A page in memory to stand where a head has none: hidden, but multiplied by zero."""
        head = next(number for number, pages in enumerate(asked) if pages)
        return self.layer, head, asked[head][0]

    def _vectors(self, pages: Tensor) -> Tensor:
        """Pages (G, P, page bytes) as vectors (G, P · per page, D)."""
        used = pages[..., : self._form.per_page * self._form.bytes]
        entries = used.unflatten(-1, (self._form.per_page, self._form.bytes)).flatten(1, 2)
        return torch.cat(self._form.decode(entries), dim=-1)

    def _at_once(self) -> int:
        """Pages of each head that are laid out together."""
        residents = self._parts.store.residents
        room = residents.frames.free + residents.evictable()
        return max(1, min(self._parts.portion_pages, room // len(self._keys)))
