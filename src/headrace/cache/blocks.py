"""The index of the paged KV pool: which block belongs to whom. Owns the free list, reference counts and block tables.

It decides over ints and must not know arrays, requests' contents or the scheduler. A block holds `block` consecutive
positions of one request in one KV group (layers of the same window); ids are interchangeable, so all groups draw from
one free list, and nothing is set aside for a request before it is needed (paging: Kwon et al. 2023, arXiv:2309.06180).

A position p is read by a query q of the same request if p <= q and q - p < window. A block that no future query can
read is given back while its request lives, and its place in the table becomes -1.

Blocks whose contents are worth something to later requests are kept (`cache.radix` says which). A kept block that no
table holds is idle: it counts as free, and is taken for something else when nothing else is left, the one that was used
least recently first, among those of the lowest priority.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice

from headrace.cache.pool import BLOCK


class _Table:
    """One request's blocks: per group the ids by position // block, -1 for the first `gone` of them."""

    __slots__ = ("gone", "groups")

    def __init__(self, groups: int) -> None:
        self.groups: list[list[int]] = [[] for _ in range(groups)]
        self.gone = [0] * groups


class Blocks:
    """`count` blocks of `block` tokens for requests with one table per group; `windows[g]` is group g's, None: all."""

    __slots__ = (
        "_idle",
        "_idle_count",
        "_kept",
        "_lasting",
        "_nothing",
        "_pinned",
        "_refs",
        "_spare",
        "_tables",
        "_windowed",
        "block",
        "count",
        "forget",
        "reserved",
        "windows",
    )

    def __init__(self, count: int, windows: Sequence[int | None], block: int = BLOCK, *, lasting: bool = True) -> None:
        """With `lasting` off no block is ever idle: what no table holds any more is not kept."""
        if count < 1 or block < 1 or not windows or any(w is not None and w < 1 for w in windows):
            raise ValueError(f"a pool needs blocks and groups of at least one token: {count}, {windows}, {block}")
        self.count = count
        self.windows = tuple(windows)
        self.block = block
        self.forget: Callable[[int], None] = _nobody
        """Told of an idle block that is taken for something else."""
        self._lasting = lasting
        self._spare = list(range(count - 1, -1, -1))
        self._refs = [0] * count
        self._kept: dict[int, int] = {}
        self._idle: dict[int, OrderedDict[int, None]] = {}
        self._idle_count = 0
        self._pinned: Counter[int] = Counter()
        self.reserved = 0
        """Blocks that are pinned for good."""
        self._tables: dict[int, _Table] = {}
        self._windowed = [g for g, w in enumerate(windows) if w is not None]
        self._nothing: tuple[tuple[int, ...], ...] = ((),) * len(windows)

    @property
    def free(self) -> int:
        """Blocks that can be had: nobody's, and idle ones."""
        return len(self._spare) + self._idle_count

    @property
    def used(self) -> int:
        """Blocks in tables, and pinned ones."""
        return self.count - self.free

    @property
    def idle(self) -> int:
        """Kept blocks that no table holds, and nobody has pinned."""
        return self._idle_count

    def need(self, length: int) -> int:
        """The most blocks one request must hold at a time to reach `length` tokens, computed one by one."""
        return self._peak((length - 1) // self.block) if length > 0 else 0

    @property
    def most_tokens(self) -> int:
        """The longest sequence that fits alone beside what is reserved; without end (2^40 blocks) where every
        group has a window."""
        return bisect_right(range(2**40), self.count - self.reserved, key=self._peak) * self.block

    def _peak(self, index: int) -> int:
        """Blocks held when the first token of block `index` has been stored; it never falls as `index` grows."""
        first = index * self.block
        return sum(index + 1 - self.read_from(g, first) for g in range(len(self.windows)))

    def read_from(self, group: int, query: int) -> int:
        """The first block of a group that a query at position `query`, or a later one, can read."""
        window = self.windows[group]
        return 0 if window is None else max(0, query - window + 1) // self.block

    # Tables

    def open(self, request: int) -> None:
        """Begin an empty table."""
        if request in self._tables:
            raise ValueError(f"request {request} already has a table")
        self._tables[request] = _Table(len(self.windows))

    def length(self, request: int) -> int:
        """Blocks in each of the request's groups, those given back included."""
        return len(self._tables[request].groups[0])

    def adopt(self, request: int, more: Sequence[Sequence[int]], priority: int = 0) -> None:
        """Lengthen the table by kept blocks that are full, equally many per group; -1 where no query from their end on
        can read. What such a query cannot read of the table is given back. The blocks are worth as much as the most
        that anybody who used them gave as `priority`.
        """
        table = self._tables[request]
        if len(more) != len(table.groups) or len({len(new) for new in more}) != 1:
            raise ValueError(
                f"request {request}: equally many blocks are needed for each of {len(table.groups)} groups"
            )
        for ids, new in zip(table.groups, more, strict=True):
            for b in new:
                if b >= 0:
                    self._hold(b)
                    self._kept[b] = max(self._kept[b], priority)
            ids.extend(new)
        self.trim(request, len(table.groups[0]) * self.block)

    def room(self, request: int, length: int) -> int:
        """How many tokens after the first `length` fit into the table with all that is free."""
        table = self._tables[request].groups
        return (len(table[0]) + self.free // len(table)) * self.block - length

    def grow(self, request: int, length: int) -> None:
        """Lengthen the table to hold `length` tokens."""
        groups = self._tables[request].groups
        more = -(-length // self.block) - len(groups[0])
        if more <= 0:
            return
        if more * len(groups) > self.free:
            raise ValueError(f"{more * len(groups)} blocks wanted, {self.free} free")
        for ids in groups:
            for _ in range(more):
                b = self._take()
                self._refs[b] = 1
                ids.append(b)

    def table(self, request: int, start: int = 0) -> tuple[tuple[int, ...], ...]:
        """Per group the ids from block `start` on, -1 for what was given back."""
        groups = self._tables[request].groups
        return self._nothing if start == len(groups[0]) else tuple(tuple(ids[start:]) for ids in groups)

    def at(self, request: int, index: int) -> list[int]:
        """Per group the id of block `index` of the request."""
        return [ids[index] for ids in self._tables[request].groups]

    def trim(self, request: int, query: int) -> None:
        """Give back what no query at position `query` or later can read."""
        for g in self._windowed:
            gone = self.read_from(g, query)
            table = self._tables[request]
            start = table.gone[g]
            if gone > start:
                ids = table.groups[g]
                self._drop([b for b in ids[start:gone] if b >= 0])
                ids[start:gone] = [-1] * (gone - start)
                table.gone[g] = gone

    def release(self, request: int) -> None:
        """Give back all that the request holds and forget it. Its last blocks count as used less recently than those
        before them, which others may share."""
        table = self._tables.pop(request)
        for index in range(len(table.groups[0]) - 1, -1, -1):
            self._drop([ids[index] for ids in table.groups if ids[index] >= 0])

    # Kept blocks

    def keep(self, b: int, priority: int) -> None:
        """From now on the block's content is worth something, whoever holds it. It must be in a table."""
        if b in self._kept or not self._refs[b]:
            raise ValueError(f"block {b} is kept already, or nobody's")
        self._kept[b] = priority
        self._refs[b] += 1

    def pin(self, ids: Sequence[int]) -> None:
        """Kept blocks that do not become idle before they are unpinned, as often as they were pinned."""
        if strange := [b for b in ids if b not in self._kept]:
            raise ValueError(f"blocks {strange} are not kept")
        for b in ids:
            self._hold(b)
            self._pinned[b] += 1

    def unpin(self, ids: Sequence[int], *, oldest: bool = False) -> None:
        """Take back one `pin` of each. Where they become idle they count as used just now, or with `oldest` before all
        others."""
        if strange := Counter(ids) - self._pinned:
            raise ValueError(f"blocks {sorted(strange)} are not pinned that often")
        for b in ids:
            self._pinned[b] -= 1
            if not self._pinned[b]:
                del self._pinned[b]
        self._drop(ids)
        if oldest:
            for b in ids:
                if self._refs[b] == 1 and b in self._kept:
                    self._idle[self._kept[b]].move_to_end(b, last=False)

    def seize(self, priority: int) -> int:
        """A free block that is kept and pinned from now on, for contents that come from elsewhere."""
        if not self.free:
            raise ValueError("no block is free")
        b = self._take()
        self._refs[b] = 2
        self._kept[b] = priority
        self._pinned[b] = 1
        return b

    def discard(self, b: int) -> None:
        """A seized block is nobody's again."""
        del self._kept[b], self._pinned[b]
        self._refs[b] = 0
        self._spare.append(b)

    def next_idle(self, most: int) -> list[int]:
        """Of the next `most` blocks that would be taken those that are idle, in that order."""
        return list(islice(self._idle_blocks(), max(0, most - len(self._spare))))

    def shared(self, b: int) -> bool:
        """Is a kept block in some table, or pinned?"""
        return self._refs[b] > 1

    def _hold(self, b: int) -> None:
        if self._refs[b] == 1 and b in self._kept:
            priority = self._kept[b]
            del self._idle[priority][b]
            self._taken(priority)
        self._refs[b] += 1

    def _drop(self, ids: Sequence[int]) -> None:
        refs, kept = self._refs, self._kept
        for b in ids:
            refs[b] -= 1
            if not refs[b]:
                self._spare.append(b)
            elif refs[b] == 1 and b in kept:
                if self._lasting:
                    self._idle.setdefault(kept[b], OrderedDict())[b] = None
                    self._idle_count += 1
                else:
                    self._forget(b)
                    self._spare.append(b)

    def _take(self) -> int:
        """A block that is free, out of every list."""
        if self._spare:
            return self._spare.pop()
        lowest = min(self._idle)
        b, _ = self._idle[lowest].popitem(last=False)
        self._taken(lowest)
        self._forget(b)
        return b

    def _taken(self, priority: int) -> None:
        """An idle block of this priority is not idle any more."""
        self._idle_count -= 1
        if not self._idle[priority]:
            del self._idle[priority]

    def _forget(self, b: int) -> None:
        self._refs[b] = 0
        del self._kept[b]
        self.forget(b)

    # Invariants

    def check(
        self, spans: Mapping[int, tuple[int, int]], places: Mapping[int, tuple[int, int]], pins: Sequence[int] = ()
    ) -> None:
        """Prove what must hold between steps, or raise AssertionError.

        `spans` gives for every request with a table how many tokens it has stored, and the lowest position that may
        still query through its table; `places` for every kept block its group and its index; `pins` are the pinned
        blocks, each as often as it was pinned.
        """
        _must(self._tables.keys() == spans.keys(), f"tables of {sorted(self._tables)}, requests {sorted(spans)}")
        _must(self._kept.keys() == places.keys(), "not the blocks that are kept")
        found: dict[int, tuple[int, int]] = dict(places)
        counts: Counter[int] = Counter()
        for request, table in self._tables.items():
            stored, query = spans[request]
            self._check_table(request, table, stored, query)
            for g, ids in enumerate(table.groups):
                for i, b in enumerate(ids[table.gone[g] :], table.gone[g]):
                    counts[b] += 1
                    _must(found.setdefault(b, (g, i)) == (g, i), f"block {b} has two places")
        spare, idle = set(self._spare), set(self._idle_blocks())
        _must(len(spare) == len(self._spare), "a block is free twice")
        _must(not spare & found.keys(), f"blocks {sorted(spare & found.keys())} are free and owned")
        _must(len(spare) + len(found) == self.count, "a block is lost")
        _must(self._pinned == Counter(pins), "not the blocks that are pinned")
        _must(self._pinned.keys() <= self._kept.keys(), "a pinned block is not kept")
        right = [counts[b] + self._pinned[b] + (b in self._kept) for b in range(self.count)]
        _must(self._refs == right, "a reference count is wrong")
        _must(idle == {b for b in self._kept if self._refs[b] == 1}, "not the idle blocks")
        _must(len(idle) == self._idle_count, "idle blocks are miscounted")
        _must(all(blocks for blocks in self._idle.values()), "an empty list of idle blocks")
        _must(all(self._kept[b] == p for p, blocks in self._idle.items() for b in blocks), "a wrong priority")
        _must(self._lasting or not idle, "idle blocks where none should last")

    def _idle_blocks(self) -> Iterator[int]:
        for priority in sorted(self._idle):
            yield from self._idle[priority]

    def _check_table(self, request: int, table: _Table, stored: int, query: int) -> None:
        lengths = {len(ids) for ids in table.groups}
        _must(len(lengths) == 1, f"request {request}: tables of unequal length")
        _must(lengths.pop() * self.block >= stored, f"request {request}: tables shorter than its {stored} tokens")
        for g in range(len(self.windows)):
            ids, gone = table.groups[g], table.gone[g]
            right = self.read_from(g, query)
            _must(gone == right, f"request {request}: {gone} blocks of group {g} given back, not {right}")
            _must(all((b < 0) == (i < gone) for i, b in enumerate(ids)), f"request {request}: -1 in the wrong place")


def _nobody(b: int) -> None:
    """Nobody wants to know."""


def _must(holds: bool, otherwise: str) -> None:
    if not holds:
        raise AssertionError(otherwise)
