"""Blocks on their way between a pool and a tier."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from headrace.cache.pool import Bytes, Pool, PoolShape
from headrace.execute import moving
from headrace.execute.moving import WAIT_S, Mover
from headrace.execute.plan import Move, Moved


class Kept:
    """A tier in memory; `gate` holds it up."""

    def __init__(self) -> None:
        self.content: dict[bytes, bytes] = {}
        self.groups: dict[bytes, int] = {}
        self.gate = threading.Semaphore(1000)
        self.fails = False

    def put(self, key: bytes, groups: int, parts: Sequence[Bytes]) -> bool:
        self.gate.acquire()
        if self.fails:
            raise RuntimeError("a tier with a fault")
        self.content[key] = b"".join(bytes(part) for part in parts)
        self.groups[key] = groups
        return True

    def get(self, key: bytes) -> bytes | None:
        self.gate.acquire()
        return self.content.get(key)


@pytest.fixture
def pool() -> Pool:
    pool = Pool(PoolShape(6, 3, 1, 16, "bf16"))
    rng = np.random.default_rng(1)
    for slot in pool.slots:
        slot[:] = rng.integers(0, 255, slot.shape)
    return pool


@pytest.fixture
def tier() -> Kept:
    return Kept()


@pytest.fixture
def mover(pool: Pool, tier: Kept) -> Iterator[Mover]:
    mover = Mover(pool, tier)
    yield mover
    tier.gate.release(1000)
    mover.close()


def over(mover: Mover, count: int) -> list[Moved]:
    moved: list[Moved] = []
    deadline = time.monotonic() + 10
    while len(moved) < count:
        assert time.monotonic() < deadline
        moved += mover.over(wait=True)
    assert mover.over(wait=False) == ()
    return moved


def block(pool: Pool, number: int) -> bytes:
    return b"".join(slot[number].tobytes() for slot in pool.slots)


def test_there_and_back(pool: Pool, tier: Kept, mover: Mover) -> None:
    before = [block(pool, b) for b in range(6)]
    mover.begin(Move(b"k", (4, -1, 2), load=False))
    (moved,) = over(mover, 1)
    assert (moved.key, moved.load, moved.done) == (b"k", False, True)
    assert moved.seconds > 0
    assert (tier.groups[b"k"], tier.content[b"k"]) == (0b101, before[4] + before[2])
    mover.begin(Move(b"k", (0, -1, 5), load=True))
    assert [(m.load, m.done) for m in over(mover, 1)] == [(True, True)]
    assert [block(pool, b) for b in range(6)] == [before[4], *before[1:5], before[2]]
    pool.clear([5])
    assert not any(block(pool, 5)), "it is not new any more"


def test_what_is_not_there_or_of_another_size_changes_nothing(pool: Pool, tier: Kept, mover: Mover) -> None:
    before = [block(pool, b) for b in range(6)]
    tier.content[b"short"] = before[0][:-1]
    tier.content[b"one"] = before[0]
    for key, blocks in ((b"missing", (1,)), (b"short", (1,)), (b"one", (1, 2))):
        mover.begin(Move(key, blocks, load=True))
    assert [m.done for m in over(mover, 3)] == [False] * 3
    assert [block(pool, b) for b in range(6)] == before


def test_a_fault_of_the_tier_is_a_move_that_failed(mover: Mover, tier: Kept, caplog: pytest.LogCaptureFixture) -> None:
    tier.fails = True
    mover.begin(Move(b"k", (0,), load=False))
    assert not over(mover, 1)[0].done
    assert "a tier with a fault" in caplog.text
    tier.fails = False
    mover.begin(Move(b"k", (0,), load=False))
    assert over(mover, 1)[0].done


def test_nobody_waits_longer_than_a_moment(mover: Mover, tier: Kept) -> None:
    tier.gate = threading.Semaphore(0)
    mover.begin(Move(b"k", (0,), load=False))
    begin = time.monotonic()
    assert mover.over(wait=False) == ()
    assert mover.over(wait=True) == ()
    assert WAIT_S * 0.9 < time.monotonic() - begin < 2


def test_without_a_tier_every_move_fails(pool: Pool) -> None:
    mover = Mover(pool, None)
    mover.begin(Move(b"k", (0,), load=False))
    mover.begin(Move(b"k", (0,), load=True))
    assert [m.done for m in over(mover, 2)] == [False, False]
    mover.close()


def test_the_end_waits_for_what_has_begun(pool: Pool, tier: Kept) -> None:
    Mover(pool, tier).close()
    mover = Mover(pool, tier)
    for b in range(6):
        mover.begin(Move(bytes([b]), (b,), load=False))
    mover.close()
    assert len(tier.content) == 6


def test_the_end_does_not_wait_for_ever(pool: Pool, tier: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moving, "CLOSE_S", 0.05)
    tier.gate = threading.Semaphore(0)
    mover = Mover(pool, tier)
    for b in range(6):
        mover.begin(Move(bytes([b]), (b,), load=False))
    threading.Timer(0.2, tier.gate.release, (1000,)).start()
    mover.close()
    assert len(tier.content) == 1, "the one that had begun"
