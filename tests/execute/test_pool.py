"""The pool's memory: shapes, clearing, laziness."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.cache.pool import KV_DTYPES, Pool, PoolShape


@pytest.mark.parametrize("kv_format", KV_DTYPES)
def test_shape_and_size(kv_format: str) -> None:
    shape = PoolShape(blocks=5, slots=3, kv_heads=2, dim=8, kv_format=kv_format, block=4)
    pool = Pool(shape)
    assert [s.shape for s in pool.slots] == [(5, 2, 2, 4, 8)] * 3
    assert all(s.dtype == KV_DTYPES[kv_format] and s.flags.c_contiguous and not s.any() for s in pool.slots)
    assert pool.nbytes == sum(s.nbytes for s in pool.slots) == 5 * shape.block_bytes
    pool.slots[1][2] = 1
    assert not pool.slots[0].any()
    assert not pool.slots[2].any()


@pytest.mark.parametrize("kv_format", KV_DTYPES)
def test_clearing_takes_what_an_earlier_owner_left(kv_format: str) -> None:
    pool = Pool(PoolShape(4, 2, 1, 2, kv_format, block=2))
    for _ in range(3):
        pool.clear([2, 0])
        assert not any(s[[0, 2]].any() for s in pool.slots)
        pool.clear([])
        for slot in pool.slots:
            slot[:] = np.nan
    pool.clear([0])
    assert not any(s[0].any() for s in pool.slots)
    assert all(np.isnan(s[1:].astype(np.float32)).all() for s in pool.slots)


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
