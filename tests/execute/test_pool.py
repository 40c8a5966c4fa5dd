"""The pool's memory: shapes, clearing, laziness."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from headrace import config
from headrace.cache.pool import RESIDENT, Pool, PoolShape, slot_stride
from headrace.formats.kv import KV_FORMATS

KV = pytest.mark.parametrize("kv_format", KV_FORMATS)


def test_formats_are_those_of_the_option() -> None:
    assert tuple(KV_FORMATS) == config.KV_FORMATS
    assert all(name == form.name for name, form in KV_FORMATS.items())


LINES = {"f32": 40 * 8, "bf16": 40 * 4, "int8": 2 * (34 + 34), "int4": 2 * (34 + 18)}
"""Bytes of a head of 40 channels, key and value: two groups where there are scales."""


@KV
def test_shape_and_size(kv_format: str) -> None:
    shape = PoolShape(blocks=5, slots=3, kv_heads=2, dim=40, kv_format=kv_format, block=4)
    pool = Pool(shape)
    assert [s.shape for s in pool.slots] == [(5, 2 * 4 * LINES[kv_format])] * 3
    assert shape.block_bytes == 3 * 2 * 4 * LINES[kv_format]
    assert all(s.dtype == np.uint8 and s.flags.c_contiguous and not s.any() for s in pool.slots)
    assert pool.nbytes == sum(s.nbytes for s in pool.slots) == 5 * shape.block_bytes
    pool.slots[1][2] = 1
    assert not pool.slots[0].any()
    assert not pool.slots[2].any()


@pytest.mark.parametrize("slots", [3, 18, 24, 28, 30])
@pytest.mark.parametrize("nbytes", [RESIDENT, 87 * RESIDENT, 165 * RESIDENT + RESIDENT // 4, 24_576_000])
def test_slots_enter_new_huge_pages_one_after_the_other(slots: int, nbytes: int) -> None:
    """Each entry was 4 ms on a virtual machine, and eight of them came with the same block."""
    stride = slot_stride(nbytes, slots)
    assert nbytes <= stride <= nbytes + RESIDENT // slots
    entries = sorted(-slot * stride % RESIDENT for slot in range(slots))
    assert all(b - a > RESIDENT // slots * 0.8 for a, b in pairwise(entries))


def test_slots_lie_apart_in_a_large_pool() -> None:
    pool = Pool(PoolShape(blocks=100, slots=3, kv_heads=4, dim=64, kv_format="bf16"))
    for slot in pool.slots:
        assert slot.flags.c_contiguous
        assert not slot.any()
        slot[:] = 1
    assert pool.nbytes == sum(slot.nbytes for slot in pool.slots)


@KV
def test_clearing_takes_what_an_earlier_owner_left(kv_format: str) -> None:
    pool = Pool(PoolShape(4, 2, 1, 2, kv_format, block=2))
    for _ in range(3):
        pool.clear([2, 0])
        assert not any(s[[0, 2]].any() for s in pool.slots)
        pool.clear([])
        for slot in pool.slots:
            slot[:] = 0xFF  # NaN, as a number or as a scale
    pool.clear([0])
    assert not any(s[0].any() for s in pool.slots)
    assert all((s[1:] == 0xFF).all() for s in pool.slots)


@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_a_copy_is_all_of_a_block(kv_format: str) -> None:
    pool = Pool(PoolShape(4, 2, 1, 2, kv_format, block=2))
    for i, slot in enumerate(pool.slots):
        slot[1] = np.arange(slot.shape[1]) % 200 + i
    pool.copy(1, 3)
    for i, slot in enumerate(pool.slots):
        assert (slot[3] == np.arange(slot.shape[1]) % 200 + i).all()
        assert not slot[[0, 2]].any()
    pool.clear([3])
    assert not any(slot[3].any() for slot in pool.slots), "it is not new any more"


@pytest.mark.parametrize(("source", "target"), [(-1, 0), (0, -1), (4, 0), (0, 4)])
def test_copies_outside_the_pool_are_refused(source: int, target: int) -> None:
    with pytest.raises(IndexError, match="from 0 to 3"):
        Pool(PoolShape(4, 1, 1, 1, "f32")).copy(source, target)


@pytest.mark.parametrize("blocks", [[-1], [4], [0, 4], [1, -2]])
def test_ids_outside_the_pool_are_refused(blocks: list[int]) -> None:
    pool = Pool(PoolShape(4, 1, 1, 1, "f32"))
    with pytest.raises(IndexError, match="from 0 to 3"):
        pool.clear(blocks)


@pytest.mark.parametrize(
    ("field", "value"), [("blocks", 0), ("slots", 0), ("kv_heads", -1), ("dim", 0), ("block", 0), ("kv_format", "f64")]
)
def test_a_shape_that_cannot_be_is_refused(field: str, value: object) -> None:
    good = {"blocks": 1, "slots": 1, "kv_heads": 1, "dim": 1, "kv_format": "f32", "block": 1}
    with pytest.raises(ValueError, match=field):
        PoolShape(**(good | {field: value}))  # type: ignore[arg-type]


def test_an_unused_pool_costs_no_memory() -> None:
    """Blocks never used are never touched, not even to clear them."""

    def resident() -> int:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * 4096

    before = resident()
    pool = Pool(PoolShape(blocks=1024, slots=8, kv_heads=1, dim=64, kv_format="f32"))  # 128 MiB
    pool.clear(list(range(1024)))
    assert pool.nbytes == 128 << 20
    assert resident() - before < 16 << 20
    pool.slots[0][7] = 1
    pool.clear([7])
    assert not pool.slots[0][7].any()
