"""The index of the KV pool: nothing is lost, owned twice, read after it was given back, or kept longer than needed.
What is kept goes in the right order."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest

from headrace.cache.blocks import Blocks

WINDOWS = [(None,), (1,), (2,), (3,), (4,), (5,), (9,), (None, None), (4, None), (1, 7, None), (3, 6)]


@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("block", [1, 2, 3, 4, 8])
def test_most_tokens_is_what_one_request_can_reach(windows: tuple[int | None, ...], block: int) -> None:
    for count in range(1, 24):
        blocks = Blocks(count, windows, block)
        blocks.open(0)
        length = 0
        while length < 200 and blocks.room(0, length) > 0:
            assert blocks.used <= blocks.need(length + 1) <= count
            blocks.grow(0, length + 1)
            length += 1
            blocks.trim(0, length)
            blocks.check({0: (length, length)}, {})
        assert blocks.most_tokens == length or (length == 200 <= blocks.most_tokens)


def test_need_is_reached() -> None:
    for windows in WINDOWS:
        blocks = Blocks(100, windows, 4)
        blocks.open(0)
        peak = 0
        for length in range(1, 60):
            blocks.grow(0, length)
            peak = max(peak, blocks.used)
            if length % 4 == 1:
                assert blocks.need(length) == peak
            blocks.trim(0, length)
    assert Blocks(9, (None,), 4).need(0) == 0


@pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 8, 9])
@pytest.mark.parametrize("block", [1, 2, 4])
def test_a_block_goes_when_no_later_query_reads_it(window: int, block: int) -> None:
    blocks = Blocks(80, (window, None), block)
    blocks.open(7)
    blocks.grow(7, 40)
    for query in range(41):
        blocks.trim(7, query)
        windowed, whole = blocks.table(7)
        for i, b in enumerate(windowed):
            read = any(q - p < window for q in range(query, 60) for p in range(i * block, i * block + block) if p <= q)
            assert (b >= 0) == read
        assert -1 not in whole
        blocks.check({7: (40, query)}, {})
    blocks.release(7)
    assert blocks.free == 80


def test_tables_are_told_as_increments() -> None:
    blocks = Blocks(10, (None, None), 4)
    blocks.open(0)
    assert (blocks.length(0), blocks.table(0)) == (0, ((), ()))
    blocks.grow(0, 5)
    first, second = blocks.table(0)
    assert len(first) == len(second) == blocks.length(0) == 2
    assert not set(first) & set(second)
    assert blocks.at(0, 1) == [first[1], second[1]]
    blocks.grow(0, 8)
    assert blocks.table(0, 2) == ((), ())
    blocks.grow(0, 9)
    third, fourth = blocks.table(0, 2)
    assert blocks.table(0) == (first + third, second + fourth)
    assert blocks.table(0, 1) == (first[1:] + third, second[1:] + fourth)
    assert (blocks.used, blocks.free) == (6, 4)
    assert blocks.room(0, 9) == 3 + 2 * 4
    with pytest.raises(ValueError, match="6 blocks wanted, 4 free"):
        blocks.grow(0, 21)
    blocks.grow(0, 20)
    assert blocks.room(0, 20) == 0


# Kept blocks


def kept(blocks: Blocks, request: int, length: int, priority: int = 0) -> tuple[tuple[int, ...], ...]:
    """A request that has computed `length` tokens, and all of whose whole blocks are kept. Its table."""
    blocks.open(request)
    blocks.grow(request, length)
    for index in range(length // blocks.block):
        for b in blocks.at(request, index):
            blocks.keep(b, priority)
    return blocks.table(request)


def taken(blocks: Blocks) -> list[int]:
    """What is given up for a request that takes all there is, in order."""
    gone: list[int] = []
    blocks.forget = gone.append
    blocks.open(999)
    blocks.grow(999, blocks.free // len(blocks.windows) * blocks.block)
    return gone


def test_a_kept_block_that_nobody_holds_is_free_but_there() -> None:
    blocks = Blocks(6, (None,), 2)
    ((a, b, c),) = kept(blocks, 0, 5)
    places = {a: (0, 0), b: (0, 1)}
    blocks.check({0: (5, 5)}, places)
    assert (blocks.used, blocks.free, blocks.idle) == (3, 3, 0)
    blocks.release(0)
    blocks.check({}, places)
    assert (blocks.used, blocks.free, blocks.idle) == (0, 6, 2)
    blocks.open(1)
    assert blocks.room(1, 0) == 12
    blocks.adopt(1, [[a, b]])
    assert blocks.table(1) == ((a, b),)
    assert (blocks.used, blocks.free, blocks.idle) == (2, 4, 0)
    blocks.check({1: (4, 4)}, places)
    blocks.release(1)
    assert taken(blocks) == [b, a]
    assert (blocks.used, blocks.free, blocks.idle) == (6, 0, 0)
    assert c in blocks.table(999)[0]
    blocks.check({999: (12, 12)}, {})


def test_only_what_is_in_a_table_can_be_kept_and_once() -> None:
    blocks = Blocks(4, (None,), 2)
    ((a, b),) = kept(blocks, 0, 3)
    with pytest.raises(ValueError, match=f"block {a} is kept already"):
        blocks.keep(a, 0)
    with pytest.raises(ValueError, match="nobody's"):
        blocks.keep(next(i for i in range(4) if i not in (a, b)), 0)


def test_idle_blocks_go_last_and_the_one_used_least_recently_first() -> None:
    blocks = Blocks(8, (None,), 2)
    (first,) = kept(blocks, 0, 4)
    (second,) = kept(blocks, 1, 4)
    blocks.release(0)
    blocks.release(1)
    gone: list[int] = []
    blocks.forget = gone.append
    blocks.open(2)
    blocks.grow(2, 8)
    assert not gone, "there were blocks that nobody wanted"
    blocks.adopt(2, [[first[0]]])  # used again: now it is the latest, after it is given back
    blocks.release(2)
    assert taken(blocks) == [first[1], second[1], second[0], first[0]]


def test_within_a_request_deeper_blocks_go_first_in_all_groups() -> None:
    blocks = Blocks(6, (None, None), 2)
    one, other = kept(blocks, 0, 6)
    blocks.release(0)
    order = taken(blocks)
    assert [{one[i], other[i]} for i in (2, 1, 0)] == [set(order[i : i + 2]) for i in (0, 2, 4)]


def test_the_lowest_priority_goes_first_whenever_it_was_used() -> None:
    blocks = Blocks(6, (None,), 2)
    by_priority = {p: kept(blocks, p, 4, p)[0] for p in (5, -3, 0)}
    for p in (5, 0, -3):
        blocks.release(p)
    assert taken(blocks) == [b for p in (-3, 0, 5) for b in by_priority[p][::-1]]


def test_what_the_urgent_use_is_worth_as_much_as_they_are_from_then_on() -> None:
    blocks = Blocks(6, (None,), 2)
    (low,) = kept(blocks, 0, 4, 0)
    (high,) = kept(blocks, 1, 4, 1)
    blocks.release(0)
    blocks.release(1)
    for request, priority in ((2, 1), (3, 0)):  # the other way round it stays as it was
        blocks.open(request)
        blocks.adopt(request, [[low[0]]], priority)
        blocks.release(request)
    assert taken(blocks) == [low[1], high[1], high[0], low[0]]


def test_priorities_leave_no_traces() -> None:
    blocks = Blocks(2, (None,), 2)
    for request in range(200):
        kept(blocks, request, 4, request)
        blocks.release(request)
    assert len(blocks._idle) <= 2


def test_nothing_is_idle_where_nothing_lasts() -> None:
    blocks = Blocks(6, (None,), 2, lasting=False)
    gone: list[int] = []
    blocks.forget = gone.append
    ((a, b, _),) = kept(blocks, 0, 5)
    blocks.open(1)
    blocks.adopt(1, [[a]])
    blocks.release(0)
    assert gone == [b]
    assert (blocks.used, blocks.free, blocks.idle) == (1, 5, 0)
    blocks.check({1: (2, 2)}, {a: (0, 0)})
    blocks.pin([a])
    blocks.release(1)
    assert gone == [b]
    blocks.check({}, {a: (0, 0)}, [a])
    blocks.unpin([a])
    assert gone == [b, a]
    assert blocks.free == 6
    blocks.check({}, {})


def test_pinned_blocks_stay_until_they_are_unpinned_as_often() -> None:
    blocks = Blocks(4, (None,), 2)
    ((a, b),) = kept(blocks, 0, 4)
    places = {a: (0, 0), b: (0, 1)}
    blocks.pin([a])
    blocks.pin([a, b])
    blocks.release(0)
    assert (blocks.used, blocks.free, blocks.idle) == (2, 2, 0)
    assert blocks.shared(a) and blocks.shared(b)
    blocks.check({}, places, [a, a, b])
    blocks.unpin([a, b])
    assert (blocks.used, blocks.free, blocks.idle) == (1, 3, 1)
    assert blocks.shared(a) and not blocks.shared(b)
    blocks.check({}, places, [a])
    assert taken(blocks) == [b]
    blocks.release(999)
    blocks.unpin([a])
    assert (blocks.free, blocks.idle) == (4, 1)
    blocks.check({}, {a: (0, 0)})


def test_only_kept_blocks_are_pinned_and_only_pinned_ones_unpinned() -> None:
    blocks = Blocks(4, (None,), 2)
    ((a, b),) = kept(blocks, 0, 3)
    with pytest.raises(ValueError, match=rf"blocks \[{b}\] are not kept"):
        blocks.pin([a, b])
    blocks.check({0: (3, 3)}, {a: (0, 0)})
    blocks.pin([a])
    with pytest.raises(ValueError, match=rf"blocks \[{a}\] are not pinned that often"):
        blocks.unpin([a, a])
    blocks.check({0: (3, 3)}, {a: (0, 0)}, [a])


def test_what_is_pinned_is_no_room_and_what_is_so_for_good_shortens_the_longest_sequence() -> None:
    blocks = Blocks(6, (None,), 2)
    ((a, b),) = kept(blocks, 0, 4)
    blocks.pin([a, a, b])
    assert blocks.most_tokens == 12, "pins of a moment are waited for"
    blocks.release(0)
    blocks.open(1)
    assert blocks.room(1, 0) == 8
    blocks.reserved = 2
    assert blocks.most_tokens == 8


@pytest.mark.parametrize("first_to_go", [0, 1, 2])
def test_shared_blocks_are_held_until_their_last_owner_goes(first_to_go: int) -> None:
    blocks = Blocks(20, (None, 3), 2)
    whole, windowed = kept(blocks, 0, 9)
    places = {b: (g, i) for g, ids in enumerate((whole, windowed)) for i, b in enumerate(ids[:4])}
    blocks.trim(0, 9)
    for other in (1, 2):
        blocks.open(other)
        blocks.adopt(other, [list(whole[:4]), [-1, -1, -1, windowed[3]]])
    assert blocks.used == 5 + 2
    assert blocks.table(1) == (whole[:4], (-1, -1, -1, windowed[3]))
    spans = {0: (9, 9), 1: (8, 8), 2: (8, 8)}
    blocks.check(spans, places)
    blocks.grow(1, 9)
    assert blocks.table(1)[0][-1] not in whole
    for gone in (first_to_go, (first_to_go + 1) % 3):
        blocks.release(gone)
        del spans[gone]
        blocks.check(spans, places)
        assert blocks.used >= 4 + 1
        assert all(blocks.shared(b) for b in (*whole[:4], windowed[3]))
        assert not any(blocks.shared(b) for b in windowed[:3])
    blocks.release((first_to_go + 2) % 3)
    assert (blocks.used, blocks.idle) == (0, 8)
    blocks.check({}, places)


@pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 7])
def test_who_adopts_gives_back_what_it_cannot_read_any_more(window: int) -> None:
    """The second has computed two blocks itself, then finds the next three."""
    blocks = Blocks(40, (window,), 2)
    (donor,) = kept(blocks, 0, 10)
    (own,) = kept(blocks, 1, 4)
    blocks.trim(1, 4)
    first = blocks.read_from(0, 10)
    blocks.adopt(1, [[b if i >= first else -1 for i, b in enumerate(donor)][2:]])
    (table,) = blocks.table(1)
    assert table == tuple(b if i >= first else -1 for i, b in enumerate((*own, *donor[2:])))
    places = {b: (0, i) for ids in (donor, own) for i, b in enumerate(ids)}
    blocks.trim(0, 10)
    blocks.check({0: (10, 10), 1: (10, 10)}, places)


def test_a_trimmed_block_that_is_kept_is_idle() -> None:
    blocks = Blocks(20, (4, None), 2)
    windowed, whole = kept(blocks, 0, 12)
    blocks.trim(0, 12)
    assert blocks.idle == 4
    places = {b: (g, i) for g, ids in enumerate((windowed, whole)) for i, b in enumerate(ids)}
    blocks.check({0: (12, 12)}, places)
    gone: list[int] = []
    blocks.forget = gone.append
    blocks.open(1)
    blocks.grow(1, 10)
    assert gone == [windowed[0], windowed[1]], "the first are of least use to anybody"


@pytest.mark.parametrize("equally", [[[0, 1], [2]], [[0]]])
def test_groups_adopt_equally_many(equally: list[list[int]]) -> None:
    blocks = Blocks(20, (None, None), 2)
    one, other = kept(blocks, 0, 4)
    names = (*one, *other)
    blocks.open(1)
    with pytest.raises(ValueError):
        blocks.adopt(1, [[names[i] for i in ids] for ids in equally])


def test_tables_are_opened_once() -> None:
    blocks = Blocks(4, (None,), 2)
    blocks.open(3)
    with pytest.raises(ValueError, match="already has a table"):
        blocks.open(3)
    with pytest.raises(KeyError):
        blocks.release(4)


@pytest.mark.parametrize(("count", "windows", "block"), [(0, (None,), 4), (4, (), 4), (4, (0,), 4), (4, (None,), 0)])
def test_nonsense_pools_are_refused(count: int, windows: tuple[int | None, ...], block: int) -> None:
    with pytest.raises(ValueError, match="a pool needs"):
        Blocks(count, windows, block)


def free_twice(b: Blocks) -> None:
    b._spare.append(b._spare[0])


def free_though_owned(b: Blocks) -> None:
    b._spare[0] = b.table(0)[0][0]


def free_though_idle(b: Blocks) -> None:
    b._spare[0] = next(b._idle_blocks())


def lose(b: Blocks) -> None:
    b._spare.pop()


def miscount(b: Blocks) -> None:
    b._refs[b.table(0)[0][0]] += 1


def miscount_a_spare_one(b: Blocks) -> None:
    b._refs[b._spare[0]] += 1


def own_twice(b: Blocks) -> None:
    b._tables[1].groups[0][-1] = b.table(0)[0][0]


def own_in_two_groups(b: Blocks) -> None:
    b._tables[0].groups[0][0] = b.table(0)[1][-1]


def own_at_two_places(b: Blocks) -> None:
    ids = b._tables[0].groups[0]
    ids[0], ids[1] = ids[1], ids[0]


def share_what_is_not_kept(b: Blocks) -> None:
    """Counted rightly, but the place says that it is another's."""
    mine, his = b._tables[0].groups[0], b._tables[1].groups[0]
    b._drop([mine[-1]])
    b._hold(his[-2])
    mine[-1] = his[-2]


def cut_short(b: Blocks) -> None:
    for ids in b._tables[0].groups:
        b._drop([ids.pop()])


def cut_one_group_short(b: Blocks) -> None:
    b._drop([b._tables[0].groups[0].pop()])


def lengthen_one_group(b: Blocks) -> None:
    new = b._take()
    b._refs[new] = 1
    b._tables[0].groups[0].append(new)


def name_what_was_given_back(b: Blocks) -> None:
    b._tables[0].groups[1][0] = b._tables[0].groups[1][-1]


def keep_too_long(b: Blocks) -> None:
    b._tables[0].gone[1] -= 1


def give_back_too_early(b: Blocks) -> None:
    b.trim(0, 12)


def leave_a_hole(b: Blocks) -> None:
    ids = b._tables[0].groups[0]
    b._drop([ids[-1]])
    ids[-1] = -1


def forget(b: Blocks) -> None:
    b.release(1)


def keep_unasked(b: Blocks) -> None:
    b.keep(b.table(0)[0][-1], 0)


def pin_unasked(b: Blocks) -> None:
    b.pin([next(b._idle_blocks())])


def unpin_unasked(b: Blocks) -> None:
    b.unpin([PINNED[-1]])


def pin_another(b: Blocks) -> None:
    b.unpin([PINNED[-1]])
    b.pin([next(b._idle_blocks())])


def pin_without_holding(b: Blocks) -> None:
    b._pinned[PINNED[-1]] += 1


def idle_though_held(b: Blocks) -> None:
    b._idle[0][b.table(0)[0][0]] = None
    b._idle_count += 1


def neither_idle_nor_held(b: Blocks) -> None:
    b._idle[0].popitem()
    b._idle_count -= 1


def miscount_idle(b: Blocks) -> None:
    b._idle_count += 1


def idle_at_a_wrong_priority(b: Blocks) -> None:
    b._kept[next(b._idle_blocks())] = 7


def leave_an_empty_list(b: Blocks) -> None:
    b._idle[3] = b._idle[0].__class__()


def idle_though_nothing_lasts(b: Blocks) -> None:
    b._lasting = False


PINNED: list[int] = []
DAMAGE = [
    free_twice,
    free_though_owned,
    free_though_idle,
    lose,
    miscount,
    miscount_a_spare_one,
    own_twice,
    own_in_two_groups,
    own_at_two_places,
    share_what_is_not_kept,
    cut_short,
    cut_one_group_short,
    lengthen_one_group,
    name_what_was_given_back,
    keep_too_long,
    give_back_too_early,
    leave_a_hole,
    forget,
    keep_unasked,
    pin_unasked,
    unpin_unasked,
    pin_another,
    pin_without_holding,
    idle_though_held,
    neither_idle_nor_held,
    miscount_idle,
    idle_at_a_wrong_priority,
    leave_an_empty_list,
    idle_though_nothing_lasts,
]


def lived_in() -> tuple[Blocks, dict[int, tuple[int, int]], dict[int, tuple[int, int]]]:
    """Two that run, the first with two kept blocks of each group; three idle ones of which one is pinned, twice."""
    blocks = Blocks(40, (None, 5), 2)
    whole, windowed = kept(blocks, 2, 6)
    blocks.open(0)
    blocks.adopt(0, [whole[:1], windowed[:1]])
    for request in (0, 1):
        if request:
            blocks.open(request)
        blocks.grow(request, 10)
        blocks.trim(request, 10)
    places = {b: (g, i) for g, ids in enumerate((whole, windowed)) for i, b in enumerate(ids)}
    PINNED[:] = [whole[1], whole[1]]
    blocks.pin(PINNED)
    blocks.release(2)
    return blocks, {0: (10, 10), 1: (10, 10)}, places


@pytest.mark.parametrize("break_it", DAMAGE)
def test_check_sees(break_it: Callable[[Blocks], None]) -> None:
    blocks, spans, places = lived_in()
    blocks.check(spans, places, PINNED)
    break_it(blocks)
    with pytest.raises(AssertionError):
        blocks.check(spans, places, PINNED)


def test_check_sees_wrong_places() -> None:
    blocks, spans, places = lived_in()
    shared = blocks.table(0)[0][0]
    assert places[shared] == (0, 0)
    with pytest.raises(AssertionError, match="two places"):
        blocks.check(spans, places | {shared: (0, 1)}, PINNED)
    with pytest.raises(AssertionError, match="not the blocks that are kept"):
        blocks.check(spans, {b: place for b, place in places.items() if b != shared}, PINNED)


def test_random_lives() -> None:
    """Against a model: who holds what is known, the order in which idle ones go too."""
    rng = random.Random(5)
    seen: Counter[str] = Counter()
    for _ in range(80):
        windows = rng.choice(WINDOWS)
        size = rng.choice((1, 2, 4))
        lasting = rng.random() < 0.8
        blocks = Blocks(rng.randint(8, 60), windows, size, lasting=lasting)
        spans: dict[int, tuple[int, int]] = {}
        places: dict[int, tuple[int, int]] = {}
        worth: dict[int, int] = {}
        pins: list[int] = []

        def forget(b: int, blocks: Blocks = blocks, places: dict[int, tuple[int, int]] = places) -> None:
            del places[b]
            seen["forgotten"] += 1

        blocks.forget = forget
        for number in range(150):
            request = rng.choice([*spans, None])
            deed = rng.random()
            if request is None:
                blocks.open(number)
                spans[number] = (0, 0)
            elif deed < 0.2:
                blocks.release(request)
                del spans[request]
            elif deed < 0.4:
                for index in range(spans[request][0] // size):
                    for g, b in enumerate(blocks.at(request, index)):
                        if b >= 0 and b not in places and rng.random() < 0.8:
                            worth[b] = rng.randint(0, 2)
                            blocks.keep(b, worth[b])
                            places[b] = g, index
            elif deed < 0.5 and (run := whole_run(blocks, request, spans[request][0] // size, places)):
                blocks.open(number)
                blocks.adopt(number, run)
                length = len(run[0]) * size
                spans[number] = (length, length)
                seen["adopted"] += 1
            elif deed < 0.6 and places:
                pins.append(rng.choice(list(places)))
                blocks.pin(pins[-1:])
                seen["pinned"] += 1
            elif deed < 0.7 and pins:
                blocks.unpin([pins.pop(rng.randrange(len(pins)))])
            elif room := blocks.room(request, spans[request][0]):
                length = spans[request][0] + rng.randint(1, room)
                blocks.grow(request, length)
                blocks.trim(request, length)
                spans[request] = (length, length)
            blocks.check(spans, places, pins)
        for request in spans:
            blocks.release(request)
        blocks.unpin(pins)
        blocks.check({}, places)
        assert blocks.free == blocks.count
        assert lasting or not places
        order = [worth[b] for b in taken(blocks)]
        assert order == sorted(order)
    assert min(seen.values()) > 100, seen


def whole_run(blocks: Blocks, request: int, most: int, places: dict[int, tuple[int, int]]) -> list[list[int]] | None:
    """The longest run of the request's first blocks that another could adopt."""
    table = blocks.table(request)
    for count in range(most, 0, -1):
        firsts = [blocks.read_from(g, count * blocks.block) for g in range(len(table))]
        if all(b in places for ids, first in zip(table, firsts, strict=True) for b in ids[first:count]):
            return [[-1] * first + list(ids[first:count]) for ids, first in zip(table, firsts, strict=True)]
    return None
