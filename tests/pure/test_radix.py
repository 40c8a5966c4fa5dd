"""The prefix cache: what it finds is the right thing, it finds all there is, and it keeps nothing that is gone."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence

import pytest

from headrace.cache import radix
from headrace.cache.blocks import Blocks
from headrace.cache.radix import CANDIDATES, Part, PrefixCache

BLOCK = 4
Windows = tuple[int | None, ...]


class House:
    """A cache and requests that compute what it lacks."""

    def __init__(self, count: int = 40, windows: Windows = (None,), *, lasting: bool = True) -> None:
        self.blocks = Blocks(count, windows, BLOCK, lasting=lasting)
        self.cache = PrefixCache(self.blocks)
        self.root = self.cache.root("")
        self.spans: dict[int, tuple[int, int]] = {}
        self.next = 0

    def keys(self, tokens: Sequence[int], root: bytes | None = None) -> list[bytes]:
        keys: list[bytes] = []
        self.cache.extend(keys, root or self.root, tokens)
        return keys

    def compute(self, tokens: Sequence[int], priority: int = 0, *, sound: bool = True, trim: bool = False) -> int:
        """A request that has computed all of `tokens`, its whole blocks are put into the cache."""
        request, self.next = self.next, self.next + 1
        self.blocks.open(request)
        self.blocks.grow(request, len(tokens))
        keys = self.keys(tokens)
        for index, key in enumerate(keys):
            part = tokens[index * BLOCK : (index + 1) * BLOCK]
            parent = keys[index - 1] if index else self.root
            held = self.blocks.at(request, index)
            self.cache.put(parent, key, index, part, held, priority, sound=sound)
        if trim:
            self.blocks.trim(request, len(tokens))
        self.spans[request] = (len(tokens), len(tokens) if trim else 0)
        self.check()
        return request

    def end(self, request: int, rest: Sequence[int] = (), parent: bytes = b"", *, sound: bool = True) -> None:
        """The request goes; what its last block holds is put into the cache where `rest` says what that is."""
        if rest:
            index = self.blocks.length(request) - 1
            self.cache.put(parent, None, index, rest, self.blocks.at(request, index), 0, sound=sound)
        self.blocks.release(request)
        del self.spans[request]
        self.check()

    def match(self, tokens: Sequence[int], start: int = 0) -> int:
        return self.cache.match(self.keys(tokens), start)

    def evict(self, count: int) -> None:
        """Somebody takes all that is free until `count` of the idle blocks are gone."""
        self.blocks.open(-1)
        spare = self.blocks.free - self.blocks.idle
        assert (spare + count) % len(self.blocks.windows) == 0
        self.blocks.grow(-1, (spare + count) // len(self.blocks.windows) * BLOCK)
        self.blocks.release(-1)
        self.check()

    def check(self) -> None:
        self.cache.check(self.spans)


def run(length: int, salt: int = 0) -> list[int]:
    return [(7 * i + salt) % 50 for i in range(length)]


# Keys


def test_equal_keys_are_equal_prefixes_of_one_root() -> None:
    cache = House().cache
    roots = {cache.root(""), cache.root("a"), PrefixCache(Blocks(1, (None,)), b"other").root("")}
    assert len(roots) == 3
    assert cache.root("a") == PrefixCache(Blocks(9, (None, 4))).root("a")
    keys = {}
    for root in roots:
        for first in ([1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 4, 3], [258, 0, 0, 1], [1 << 20, 2, 3, 4]):
            for second in ([1, 2, 3, 4], [1, 2, 3, 5]):
                mine: list[bytes] = []
                cache.extend(mine, root, first + second)
                keys[root, *first] = mine[0]
                keys[root, *first, *second] = mine[1]
                again: list[bytes] = []
                cache.extend(again, root, first + second)
                assert again == mine
    assert len(set(keys.values()) | roots) == len(keys) + len(roots)


def test_keys_are_appended_as_tokens_come_and_never_made_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    key = radix._key
    monkeypatch.setattr(radix, "_key", lambda parent, tokens: made.append(1) or key(parent, tokens))  # type: ignore[func-returns-value]
    house = House()
    tokens, keys = run(23), []
    for length in range(24):
        house.cache.extend(keys, house.root, tokens[:length])
        assert len(keys) == length // BLOCK == len(made)
    assert keys == house.keys(tokens)


# Whole blocks


def test_what_one_has_computed_another_takes() -> None:
    house = House()
    first = house.compute(run(14))
    assert house.match(run(14)) == 3
    assert house.match(run(30)) == 3
    assert house.match(run(9)) == 2
    assert house.match(run(3)) == 0
    assert house.match([*run(7), 99, *run(14)[8:]]) == 1
    assert house.match([99, *run(14)[1:]]) == 0
    house.blocks.open(7)
    house.cache.take(7, house.keys(run(30)), 3)
    assert house.blocks.table(7)[0] == house.blocks.table(first)[0][:3]
    house.spans[7] = (12, 12)
    house.end(first)
    assert (house.blocks.used, house.blocks.idle) == (3, 0)
    house.end(7)
    assert (house.blocks.used, house.blocks.idle) == (0, 3)
    assert house.match(run(30)) == 3


def test_who_stands_in_the_middle_takes_the_rest() -> None:
    house = House()
    donor = house.compute(run(16))
    house.blocks.open(7)
    house.blocks.grow(7, 8)
    keys = house.keys(run(16))
    assert house.cache.match(keys, 2) == 4
    assert house.cache.match(keys, 4) == 0
    house.cache.take(7, keys, 4)
    assert house.blocks.table(7)[0][2:] == house.blocks.table(donor)[0][2:]
    assert not set(house.blocks.table(7)[0][:2]) & set(house.blocks.table(donor)[0])
    house.spans[7] = (16, 16)
    house.check()


def test_what_is_there_is_not_replaced() -> None:
    house = House()
    one, other = house.compute(run(8)), house.compute(run(8))
    table, twin = house.blocks.table(one)[0], house.blocks.table(other)[0]
    house.end(one)
    house.end(other)
    assert house.blocks.idle == 2
    house.blocks.open(7)
    house.cache.take(7, house.keys(run(8)), 2)
    assert house.blocks.table(7)[0] == table != twin


def test_an_entry_needs_a_block_of_its_own() -> None:
    house = House()
    request = house.compute(run(4))
    (b,) = house.blocks.at(request, 0)
    for held in ([-1], [b]):
        house.cache.put(house.root, None, 0, [9, 9, 9, 9], held, 0, sound=True)
        house.check()
        assert len(house.cache) == 1


def test_salts_see_nothing_of_each_other() -> None:
    house = House()
    house.compute(run(8))
    mine, other = house.keys(run(8)), house.keys(run(8), house.cache.root("mine"))
    assert (house.cache.match(mine), house.cache.match(other)) == (2, 0)
    assert house.cache.part(house.root, run(3)) is not None
    assert house.cache.part(house.cache.root("mine"), run(3)) is None


def test_entries_vanish_with_their_last_block() -> None:
    house = House(count=6)
    request = house.compute(run(12))
    house.end(request)
    for left in (2, 1, 0):
        house.evict(1)
        assert len(house.cache) == left == house.match(run(12))
    assert not house.cache._of_block
    assert not house.cache._beginning
    two = House(count=6, windows=(None, None))
    request = two.compute(run(4))
    two.end(request)
    two.blocks.open(8)
    two.blocks.grow(8, 8)
    two.spans[8] = (8, 8)
    assert (len(two.cache), two.match(run(4)), two.blocks.idle) == (1, 1, 2)
    two.evict(2)
    assert (len(two.cache), two.match(run(4))) == (0, 0)


def test_nothing_is_left_of_many() -> None:
    house = House(count=8)
    for salt in range(300):
        request = house.compute(run(10, salt), priority=salt % 3)
        house.end(request, run(10, salt)[8:], house.keys(run(10, salt))[1])
    assert len(house.cache) <= 8
    assert len(house.cache._beginning) <= 8
    assert len(house.cache._of_block) <= 8


def test_an_orphan_is_found_again_when_its_parent_is_back() -> None:
    house = House(count=6)
    request = house.compute(run(12))
    house.blocks.open(7)
    house.cache.take(7, house.keys(run(12)), 3)
    house.blocks.release(request)
    del house.spans[request]
    table = house.blocks._tables[7].groups[0]
    first = table[0]
    house.blocks._drop([first])  # its first block alone is idle
    table[0] = -1
    house.blocks._tables[7].gone[0] = 1
    house.blocks.open(8)
    house.blocks.grow(8, 4 * BLOCK)
    assert (house.match(run(12)), len(house.cache)) == (0, 2)
    house.blocks.release(8)
    house.blocks.open(9)
    house.blocks.grow(9, BLOCK)
    house.cache.put(house.root, house.keys(run(4))[0], 0, run(4), house.blocks.at(9, 0), 0, sound=True)
    assert (house.match(run(12)), len(house.cache)) == (3, 3)


def test_more_urgent_prefixes_stay_longer() -> None:
    house = House(count=8)
    ends = [house.compute(run(8, salt), priority) for salt, priority in ((0, 1), (1, 0), (2, 0))]
    for request in ends:
        house.end(request)
    house.blocks.open(7)
    house.cache.take(7, house.keys(run(8, 1)), 2, priority=1)
    house.spans[7] = (8, 8)
    house.end(7)
    house.evict(2)
    assert [house.match(run(8, salt)) for salt in range(3)] == [2, 2, 0]
    house.evict(2)
    assert [house.match(run(8, salt)) for salt in range(3)] == [0, 2, 0]


# Windows


def test_a_window_needs_only_the_last_blocks() -> None:
    house = House(windows=(None, 6))
    donor = house.compute(run(20), trim=True)
    keys = house.keys(run(20))
    house.blocks.open(7)
    house.blocks.grow(7, 40)
    house.blocks.release(7)
    assert house.blocks.idle == 3
    house.blocks.open(8)
    house.cache.take(8, keys, 5)
    whole, windowed = house.blocks.table(donor)
    assert house.blocks.table(8) == (whole, (-1, -1, -1, *windowed[3:]))
    house.spans[8] = (20, 20)
    house.check()
    assert house.cache.held(keys, 5) == 5 + 2


def test_a_prefix_is_reused_only_up_to_where_all_is_there() -> None:
    """Windowed blocks of the beginning are gone: a shorter prefix cannot be had any more, the long one can."""
    house = House(count=20, windows=(None, 6))
    house.compute(run(20), trim=True)
    assert [house.match(run(4 * n)) for n in range(6)] == [0, 1, 2, 3, 4, 5]
    house.blocks.open(7)
    house.blocks.grow(7, 6 * BLOCK)  # takes two of the three that are idle
    house.blocks.release(7)
    assert [house.match(run(4 * n)) for n in range(6)] == [0, 0, 0, 0, 4, 5]
    assert house.cache.match(house.keys(run(12)), 1) == 0
    assert house.cache.match(house.keys(run(12)), 2) == 3


def test_where_every_layer_has_a_window_a_prefix_without_beginning_is_found() -> None:
    house = House(count=8, windows=(6, 9))
    request = house.compute(run(12), trim=True)
    house.blocks.open(7)
    house.blocks.grow(7, 4)
    house.spans[7] = (4, 0)
    assert (len(house.cache), house.match(run(12))) == (3, 3)
    house.end(7)
    house.end(request)
    house.evict(2)
    assert len(house.cache) == 2, "the first entry is gone altogether"
    house.blocks.open(8)
    house.cache.take(8, house.keys(run(12)), 3)
    assert house.cache.held(house.keys(run(12)), 3) == 2 + 2
    house.spans[8] = (12, 12)
    house.check()


# Parts of blocks


def test_the_beginning_of_a_block_is_found_by_what_stands_before_it() -> None:
    house = House()
    house.compute([1, 2, 3, 4, 5, 6, 7, 8])
    keys = house.keys([1, 2, 3, 4])
    first, second = house.blocks.table(0)[0]
    part = house.cache.part
    assert part(house.root, [1, 2, 3, 9]) == Part((first,), 3)
    assert part(house.root, [1, 2, 3]) == Part((first,), 3)
    assert part(house.root, [1]) == Part((first,), 1)
    assert part(house.root, [2, 2, 3, 4]) is None
    assert part(house.root, [5, 6, 7]) is None
    assert part(house.root, []) is None
    assert part(keys[0], [5, 6, 9]) == Part((second,), 2)


def test_a_block_that_is_not_full_can_be_copied_but_not_shared() -> None:
    house = House()
    request = house.compute(run(6))
    (b,) = house.blocks.at(request, 1)
    parent = house.keys(run(4))[0]
    house.end(request, run(6)[4:], parent)
    assert (house.blocks.idle, house.match(run(8))) == (2, 1)
    assert house.cache.part(parent, run(8)[4:]) == Part((b,), 2)
    request = house.compute(run(8))
    (full,) = house.blocks.at(request, 1)
    assert house.cache.part(parent, run(8)[4:]) == Part((full,), 4)


def test_the_longest_beginning_wins_and_the_latest_among_equals() -> None:
    house = House()
    ids = [house.blocks.at(house.compute(tokens), 0)[0] for tokens in ([1, 2, 8, 8], [1, 2, 3, 8], [1, 2, 9, 9])]
    assert house.cache.part(house.root, [1, 2, 3, 4]) == Part((ids[1],), 3)
    assert house.cache.part(house.root, [1, 2, 5]) == Part((ids[2],), 2)


def test_no_more_than_so_many_are_compared() -> None:
    house = House(count=CANDIDATES + 1)
    for last in range(CANDIDATES + 1):
        house.compute([1, 2, 3, last])
    assert house.cache.part(house.root, [1, 2, 3, 1]) == Part((house.blocks.at(1, 0)[0],), 4)
    latest = house.blocks.at(CANDIDATES, 0)[0]
    assert house.cache.part(house.root, [1, 2, 3, 0]) == Part((latest,), 3), "the oldest is not looked at"


def test_only_sound_blocks_are_copied_from() -> None:
    house = House()
    house.compute([1, 2, 3, 4], sound=False)
    assert house.cache.part(house.root, [1, 2, 3]) is None
    assert house.match([1, 2, 3, 4]) == 1, "who shares it would compute the same"
    request = house.compute([1, 2, 9], sound=False)
    house.end(request, [1, 2, 9], house.root, sound=False)
    assert house.cache.part(house.root, [1, 2, 3]) is None
    keys = house.keys([1, 2, 3, 4])
    house.cache.prove([*keys, b"of somebody who is gone"])
    assert house.cache.part(house.root, [1, 2, 9]) == Part((house.blocks.at(0, 0)[0],), 2)
    house.compute([5, 6, 7, 8], sound=False)
    house.compute([5, 6, 7, 8], sound=True)
    assert house.cache.part(house.root, [5, 6]) is not None, "that another found it sound says it of both"
    house.compute([5, 6, 7, 8], sound=False)
    assert house.cache.part(house.root, [5, 6]) is not None


def test_a_block_that_some_group_lacks_is_not_copied() -> None:
    house = House(count=7, windows=(None, 4))
    request = house.compute(run(8), trim=True)
    assert house.cache.part(house.root, run(2)) is not None
    house.blocks.open(7)
    house.blocks.grow(7, BLOCK)
    house.blocks.open(8)
    house.blocks.grow(8, BLOCK)
    assert house.blocks.idle == 0, "the window's first block is another's now"
    assert house.cache.part(house.root, run(2)) is None
    assert house.cache.part(house.keys(run(4))[0], run(6)[4:]) == Part(tuple(house.blocks.at(request, 1)), 2)


# Pins


def test_of_a_pinned_prefix_a_window_keeps_what_is_read_behind_it() -> None:
    house = House(count=9, windows=(None, 6))
    request = house.compute(run(12))
    assert house.cache.pin(house.keys(run(12))) == 3 + 2
    house.end(request)
    house.evict(1)
    assert house.match(run(12)) == 3


def test_a_pinned_prefix_is_never_given_up() -> None:
    house = House(count=8, windows=(None, 6))
    request = house.compute(run(12))
    keys = house.keys(run(12))
    assert house.cache.pin([*keys[:2], b"nothing"]) == 4
    house.end(request)
    assert (house.blocks.used, house.blocks.idle) == (4, 2)
    house.evict(2)
    assert house.match(run(12)) == 2
    assert house.cache.held(keys, 2) == 2 + 2
    house.blocks.open(7)
    assert house.blocks.room(7, 0) == 2 * BLOCK
    house.blocks.release(7)
    assert house.cache.pin(keys[:2]) == 4
    house.check()


# Invariants


def lose_an_entry(cache: PrefixCache) -> None:
    del cache._entries[next(iter(cache._entries))]


def lose_a_beginning(cache: PrefixCache) -> None:
    next(iter(cache._beginning.values())).popitem()


def leave_an_empty_beginning(cache: PrefixCache) -> None:
    cache._beginning[b"", 0] = {}


def wrong_tokens(cache: PrefixCache) -> None:
    next(iter(cache._entries.values())).tokens = (1, 1, 1, 1)


def wrong_parent(cache: PrefixCache) -> None:
    next(iter(cache._entries.values())).parent = bytes(32)


def swap_blocks(cache: PrefixCache) -> None:
    one, other, *_ = cache._entries.values()
    one.blocks, other.blocks = other.blocks, one.blocks


def forget_a_block(cache: PrefixCache) -> None:
    next(iter(cache._entries.values())).blocks[0] = -1


def forget_whose_block(cache: PrefixCache) -> None:
    cache._of_block.popitem()


def an_entry_without_blocks(cache: PrefixCache) -> None:
    entry = next(iter(cache._entries.values()))
    for b in entry.blocks:
        cache._blocks._forget(b)
        cache._blocks._spare.append(b)
    cache._entries[entry.key] = entry
    cache._beginning[entry.parent, entry.tokens[0]] = {entry.key: entry}


def forget_a_pin(cache: PrefixCache) -> None:
    cache._pinned.pop()


def wrong_index(cache: PrefixCache) -> None:
    for entry in cache._entries.values():
        entry.index += 1


@pytest.mark.parametrize(
    "break_it",
    [
        lose_an_entry,
        lose_a_beginning,
        leave_an_empty_beginning,
        wrong_tokens,
        wrong_parent,
        swap_blocks,
        forget_a_block,
        forget_whose_block,
        an_entry_without_blocks,
        forget_a_pin,
        wrong_index,
    ],
)
def test_check_sees(break_it: Callable[[PrefixCache], None]) -> None:
    house = House(windows=(None, 6))
    house.end(house.compute(run(12)))
    house.compute(run(8, 1))
    house.cache.pin(house.keys(run(8, 1)))
    break_it(house.cache)
    with pytest.raises(AssertionError):
        house.check()


# Against a dictionary of prefixes


class Naive:
    """What is in the cache, by whole prefixes: which block of each group, and is it sound."""

    def __init__(self, windows: Windows) -> None:
        self.windows = windows
        self.held: dict[tuple[int, ...], list[int]] = {}
        self.sound: set[tuple[int, ...]] = set()

    def put(self, prefix: tuple[int, ...], blocks: Sequence[int], *, sound: bool) -> None:
        mine = self.held.setdefault(prefix, [-1] * len(self.windows))
        for g, b in enumerate(blocks):
            if mine[g] < 0:
                mine[g] = b
        if max(mine) < 0:
            del self.held[prefix]
        elif sound:
            self.sound.add(prefix)

    def forget(self, b: int) -> None:
        for prefix, blocks in self.held.items():
            if b in blocks:
                blocks[blocks.index(b)] = -1
                if max(blocks) < 0:
                    del self.held[prefix]
                    self.sound.discard(prefix)
                return
        raise AssertionError(f"nobody knows block {b}")

    def read(self, tokens: tuple[int, ...], count: int, start: int) -> list[int] | None:
        """The cached blocks that a query after `count` whole blocks reads; None where one is missing."""
        found = []
        for g, window in enumerate(self.windows):
            for index in range(start, count):
                last = (index + 1) * BLOCK - 1
                if window is None or count * BLOCK - last < window:
                    found.append(self.held.get(tokens[: last + 1], [-1] * len(self.windows))[g])
        return None if -1 in found else found

    def match(self, tokens: tuple[int, ...], start: int) -> int:
        counts = range(start + 1, len(tokens) // BLOCK + 1)
        return max((c for c in counts if self.read(tokens, c, start) is not None), default=0)

    def part(self, before: tuple[int, ...], tokens: tuple[int, ...]) -> int:
        """The most tokens that a block of the cache begins with."""
        most = 0
        for prefix, blocks in self.held.items():
            own = prefix[len(before) :]
            if prefix in self.sound and min(blocks) >= 0 and prefix[: len(before)] == before and len(own) <= BLOCK:
                most = max(most, next((i for i in range(len(tokens)) if own[: i + 1] != tokens[: i + 1]), len(tokens)))
        return most


@pytest.mark.parametrize("windows", [(None,), (None, 6), (5,), (9, 3), (None, 1, 8)])
def test_random_lives_against_a_dictionary(windows: Windows) -> None:
    rng = random.Random(3)
    seen: Counter[str] = Counter()
    for _ in range(40):
        live_together(rng, windows, seen)
    holes = ("holes",) if any(windows) else ()
    assert min(seen[what] for what in ("reused", "part", "forgotten", "held", *holes)) > 40, seen


def live_together(rng: random.Random, windows: Windows, seen: Counter[str]) -> None:
    """Requests over two letters: they come, take what is there, compute the rest, put it there and go."""
    house = House(rng.randint(6, 30) * len(windows), windows, lasting=rng.random() < 0.9)
    blocks, cache, naive = house.blocks, house.cache, Naive(windows)

    def forget(b: int, own: Callable[[int], None] = blocks.forget) -> None:
        naive.forget(b)
        own(b)
        seen["forgotten"] += 1

    blocks.forget = forget
    live: dict[int, tuple[int, ...]] = {}
    before: list[tuple[int, ...]] = []
    for request in range(60):
        tokens = tuple(rng.choice((1, 1, 1, 2)) for _ in range(rng.randint(1, 16)))
        if before and rng.random() < 0.5:  # the next turn of a talk
            tokens = (rng.choice(before[-4:]) + tokens)[:40]
        before.append(tokens)
        keys = house.keys(tokens)
        blocks.open(request)
        count = cache.match(keys)
        assert count == naive.match(tokens, 0)
        if count:
            expected = naive.read(tokens, count, 0)
            assert expected is not None
            holders = {b for other in live for ids in blocks.table(other) for b in ids}
            assert cache.held(keys, count) == len(holders & set(expected))
            seen["held"] += bool(holders & set(expected))
            seen["holes"] += any(-1 in naive.held.get(tokens[: (i + 1) * BLOCK], [-1]) for i in range(count))
            cache.take(request, keys, count)
            assert sorted(b for ids in blocks.table(request) for b in ids if b >= 0) == sorted(expected)
            seen["reused"] += 1
        house.spans[request] = (count * BLOCK, count * BLOCK)
        house.check()
        prefix, following = tokens[: count * BLOCK], tokens[count * BLOCK : (count + 1) * BLOCK]
        part = cache.part(keys[count - 1] if count else house.root, following)
        assert (0 if part is None else part.tokens) == naive.part(prefix, following)
        seen["part"] += part is not None
        if blocks.room(request, count * BLOCK) < len(tokens) - count * BLOCK:
            blocks.release(request)
            del house.spans[request]
            continue
        blocks.grow(request, len(tokens))
        live[request] = tokens
        sound = rng.random() < 0.7
        for index in range(count, len(keys)):
            if rng.random() < 0.9:
                own = tokens[index * BLOCK : (index + 1) * BLOCK]
                parent = keys[index - 1] if index else house.root
                held = blocks.at(request, index)
                cache.put(parent, keys[index], index, own, held, rng.randint(0, 1), sound=sound)
                naive.put(tokens[: (index + 1) * BLOCK], held, sound=sound)
        blocks.trim(request, len(tokens))
        house.spans[request] = (len(tokens), len(tokens))
        house.check()
        while live and rng.random() < 0.5:
            gone = rng.choice(list(live))
            tokens = live.pop(gone)
            rest, keys = tokens[len(tokens) // BLOCK * BLOCK :], house.keys(tokens)
            if rest:
                naive.put(tokens, blocks.at(gone, len(keys)), sound=True)
            house.end(gone, rest, keys[-1] if keys else house.root)
        assert {b for ids in naive.held.values() for b in ids if b >= 0} == cache._of_block.keys()
