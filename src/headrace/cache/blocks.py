"""The index of the paged KV pool: which block belongs to whom. Owns the free list, reference counts and block tables.

It decides over ints and must not know arrays, requests' contents or the scheduler. A block holds `block` consecutive
positions of one request in one KV group (layers of the same window); ids are interchangeable, so all groups draw from
one free list, and nothing is set aside for a request before it is needed (paging: Kwon et al. 2023, arXiv:2309.06180).

A position p is read by a query q of the same request if p <= q and q - p < window. A block that no future query can
read is given back while its request lives, and its place in the table becomes -1.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence

from headrace.cache.pool import BLOCK


class _Table:
    """One request's blocks: per group the ids by position // block, -1 for the first `gone` of them."""

    __slots__ = ("gone", "groups")

    def __init__(self, groups: int) -> None:
        self.groups: list[list[int]] = [[] for _ in range(groups)]
        self.gone = [0] * groups


class Blocks:
    """`count` blocks of `block` tokens for requests with one table per group; `windows[g]` is group g's, None: all."""

    __slots__ = ("_nothing", "_refs", "_spare", "_tables", "_windowed", "block", "count", "windows")

    def __init__(self, count: int, windows: Sequence[int | None], block: int = BLOCK) -> None:
        if count < 1 or block < 1 or not windows or any(w is not None and w < 1 for w in windows):
            raise ValueError(f"a pool needs blocks and groups of at least one token: {count}, {windows}, {block}")
        self.count = count
        self.windows = tuple(windows)
        self.block = block
        self._spare = list(range(count - 1, -1, -1))
        self._refs = [0] * count
        self._tables: dict[int, _Table] = {}
        self._windowed = [(g, w) for g, w in enumerate(windows) if w is not None]
        self._nothing: tuple[tuple[int, ...], ...] = ((),) * len(windows)

    @property
    def free(self) -> int:
        """Blocks that nobody owns."""
        return len(self._spare)

    @property
    def used(self) -> int:
        return self.count - len(self._spare)

    def need(self, length: int) -> int:
        """The most blocks one request must hold at a time to reach `length` tokens, computed one by one."""
        return self._peak((length - 1) // self.block) if length > 0 else 0

    @property
    def most_tokens(self) -> int:
        """The longest sequence that fits when it is alone; without end (2^40 blocks) where every group has a window."""
        return bisect_right(range(2**40), self.count, key=self._peak) * self.block

    def _peak(self, index: int) -> int:
        """Blocks held when the first token of block `index` has been stored; it never falls as `index` grows."""
        first = index * self.block
        return sum(index + 1 - (0 if w is None else max(0, first - w + 1) // self.block) for w in self.windows)

    def open(self, request: int) -> None:
        """Begin an empty table."""
        if request in self._tables:
            raise ValueError(f"request {request} already has a table")
        self._tables[request] = _Table(len(self.windows))

    def share(self, owner: int, request: int, count: int) -> None:
        """Begin `request`'s table with references to the first `count` blocks of `owner`'s, which must be full.

        `request` goes on at position count * block; what no query from there on can read is -1. ValueError where
        `owner` no longer has what such a query can read.
        """
        source = self._tables[owner]
        self.open(request)
        table = self._tables[request]
        for g, window in enumerate(self.windows):
            gone = 0 if window is None else max(0, count * self.block - window + 1) // self.block
            ids = source.groups[g][gone:count]
            if len(ids) != count - gone or source.gone[g] > gone:
                del self._tables[request]
                raise ValueError(f"request {owner} has not all of the first {count} blocks of group {g}")
            table.groups[g] = [-1] * gone + ids
            table.gone[g] = gone
        for ids in table.groups:
            for b in ids:
                if b >= 0:
                    self._refs[b] += 1

    def room(self, request: int, length: int) -> int:
        """How many tokens after the first `length` fit into the table with all that is free."""
        table = self._tables[request].groups
        return (len(table[0]) + len(self._spare) // len(table)) * self.block - length

    def grow(self, request: int, length: int) -> tuple[tuple[int, ...], ...]:
        """Lengthen the table to hold `length` tokens. Per group the ids that were appended."""
        groups = self._tables[request].groups
        more = -(-length // self.block) - len(groups[0])
        if more <= 0:
            return self._nothing
        if more * len(groups) > len(self._spare):
            raise ValueError(f"{more * len(groups)} blocks wanted, {len(self._spare)} free")
        appended = []
        for ids in groups:
            new = [self._spare.pop() for _ in range(more)]
            for b in new:
                self._refs[b] = 1
            ids += new
            appended.append(tuple(new))
        return tuple(appended)

    def table(self, request: int) -> tuple[tuple[int, ...], ...]:
        """Per group all ids, -1 for what was given back."""
        return tuple(tuple(ids) for ids in self._tables[request].groups)

    def trim(self, request: int, query: int) -> None:
        """Give back what no query at position `query` or later can read."""
        for g, window in self._windowed:
            gone = (query - window + 1) // self.block
            table = self._tables[request]
            start = table.gone[g]
            if gone > start:
                ids = table.groups[g]
                self._drop(ids[start:gone])
                ids[start:gone] = [-1] * (gone - start)
                table.gone[g] = gone

    def release(self, request: int) -> None:
        """Give back all that the request holds and forget it."""
        table = self._tables.pop(request)
        for ids, gone in zip(table.groups, table.gone, strict=True):
            self._drop(ids[gone:])

    def _drop(self, ids: list[int]) -> None:
        refs = self._refs
        for b in ids:
            refs[b] -= 1
            if not refs[b]:
                self._spare.append(b)

    def check(self, spans: Mapping[int, tuple[int, int]]) -> None:
        """Prove what must hold between steps, or raise AssertionError.

        `spans` gives for every request with a table how many tokens it has stored, and the lowest position that may
        still query through its table.
        """
        _must(self._tables.keys() == spans.keys(), f"tables of {sorted(self._tables)}, requests {sorted(spans)}")
        places: dict[int, tuple[int, int]] = {}
        counts: Counter[int] = Counter()
        for request, table in self._tables.items():
            stored, query = spans[request]
            self._check_table(request, table, stored, query)
            for g, ids in enumerate(table.groups):
                for i, b in enumerate(ids[table.gone[g] :], table.gone[g]):
                    counts[b] += 1
                    _must(places.setdefault(b, (g, i)) == (g, i), f"block {b} has two places")
        spare = set(self._spare)
        _must(len(spare) == len(self._spare), "a block is free twice")
        _must(not spare & counts.keys(), f"blocks {sorted(spare & counts.keys())} are free and owned")
        _must(len(spare) + len(counts) == self.count, "a block is lost")
        _must(all(self._refs[b] == counts[b] for b in range(self.count)), "a reference count is wrong")

    def _check_table(self, request: int, table: _Table, stored: int, query: int) -> None:
        lengths = {len(ids) for ids in table.groups}
        _must(len(lengths) == 1, f"request {request}: tables of unequal length")
        _must(lengths.pop() * self.block >= stored, f"request {request}: tables shorter than its {stored} tokens")
        for g, window in enumerate(self.windows):
            ids, gone = table.groups[g], table.gone[g]
            right = 0 if window is None else max(0, query - window + 1) // self.block
            _must(gone == right, f"request {request}: {gone} blocks of group {g} given back, not {right}")
            _must(all((b < 0) == (i < gone) for i, b in enumerate(ids)), f"request {request}: -1 in the wrong place")


def _must(holds: bool, otherwise: str) -> None:
    if not holds:
        raise AssertionError(otherwise)
