"""The index of the KV pool: nothing is lost, owned twice, read after it was given back, or kept longer than needed."""

from __future__ import annotations

import random
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
            blocks.check({0: (length, length)})
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
        blocks.check({7: (40, query)})
    blocks.release(7)
    assert blocks.free == 80


def test_grow_tells_what_it_appended() -> None:
    blocks = Blocks(10, (None, None), 4)
    blocks.open(0)
    first, second = blocks.grow(0, 5)
    assert len(first) == len(second) == 2
    assert not set(first) & set(second)
    assert blocks.grow(0, 8) == ((), ())
    third, fourth = blocks.grow(0, 9)
    assert blocks.table(0) == (first + third, second + fourth)
    assert (blocks.used, blocks.free) == (6, 4)
    assert blocks.room(0, 9) == 3 + 2 * 4
    with pytest.raises(ValueError, match="6 blocks wanted, 4 free"):
        blocks.grow(0, 21)


@pytest.mark.parametrize("first_to_go", [0, 1, 2])
def test_shared_blocks_go_with_their_last_owner(first_to_go: int) -> None:
    blocks = Blocks(20, (None, 3), 2)
    blocks.open(0)
    blocks.grow(0, 9)
    blocks.trim(0, 8)
    for sibling in (1, 2):
        blocks.share(0, sibling, 4)
    assert blocks.used == 5 + 2
    whole, windowed = blocks.table(1)
    assert whole == blocks.table(0)[0][:4]
    assert windowed == (-1, -1, -1, blocks.table(0)[1][3])
    spans = {0: (9, 8), 1: (8, 8), 2: (8, 8)}
    blocks.check(spans)
    blocks.grow(1, 9)
    for gone in (first_to_go, (first_to_go + 1) % 3):
        blocks.release(gone)
        del spans[gone]
        blocks.check(spans)
        assert blocks.used >= 4 + 1
    blocks.release((first_to_go + 2) % 3)
    assert blocks.used == 0
    blocks.check({})


def test_only_what_is_still_there_can_be_shared() -> None:
    blocks = Blocks(20, (3,), 2)
    blocks.open(0)
    blocks.grow(0, 12)
    blocks.trim(0, 12)
    with pytest.raises(ValueError, match="request 0 has not all of the first 3 blocks of group 0"):
        blocks.share(0, 1, 3)
    with pytest.raises(ValueError, match="first 7 blocks"):
        blocks.share(0, 1, 7)
    blocks.share(0, 1, 6)
    blocks.check({0: (12, 12), 1: (12, 12)})


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


def lose(b: Blocks) -> None:
    b._spare.pop()


def miscount(b: Blocks) -> None:
    b._refs[b.table(0)[0][0]] += 1


def own_twice(b: Blocks) -> None:
    b._tables[1].groups[0][-1] = b.table(0)[0][0]


def own_in_two_groups(b: Blocks) -> None:
    b._tables[0].groups[0][0] = b.table(0)[1][-1]


def cut_short(b: Blocks) -> None:
    for ids in b._tables[0].groups:
        b._drop([ids.pop()])


def keep_too_long(b: Blocks) -> None:
    b._tables[0].gone[1] -= 1


def give_back_too_early(b: Blocks) -> None:
    b.trim(0, 12)


def forget(b: Blocks) -> None:
    b.release(1)


@pytest.mark.parametrize(
    "break_it",
    [
        free_twice,
        free_though_owned,
        lose,
        miscount,
        own_twice,
        own_in_two_groups,
        cut_short,
        keep_too_long,
        give_back_too_early,
        forget,
    ],
)
def test_check_sees(break_it: Callable[[Blocks], None]) -> None:
    blocks = Blocks(30, (None, 5), 2)
    for request in (0, 1):
        blocks.open(request)
        blocks.grow(request, 10)
        blocks.trim(request, 10)
    spans = {0: (10, 10), 1: (10, 10)}
    blocks.check(spans)
    break_it(blocks)
    with pytest.raises(AssertionError):
        blocks.check(spans)


def test_random_lives() -> None:
    rng = random.Random(5)
    for _ in range(60):
        windows = rng.choice(WINDOWS)
        size = rng.choice((1, 2, 4))
        blocks = Blocks(rng.randint(8, 60), windows, size)
        spans: dict[int, tuple[int, int]] = {}
        for number in range(150):
            request = rng.choice([*spans, None])
            if request is None:
                blocks.open(number)
                spans[number] = (0, 0)
            elif rng.random() < 0.2:
                blocks.release(request)
                del spans[request]
            elif rng.random() < 0.2 and spans[request][0] >= size:
                count = spans[request][0] // size
                if count * size == spans[request][0]:
                    blocks.share(request, number, count)
                    spans[number] = (count * size, count * size)
            elif room := blocks.room(request, spans[request][0]):
                length = spans[request][0] + rng.randint(1, room)
                blocks.grow(request, length)
                blocks.trim(request, length)
                spans[request] = (length, length)
            blocks.check(spans)
        for request in spans:
            blocks.release(request)
        assert blocks.free == blocks.count
