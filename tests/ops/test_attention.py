"""Attention over the pool: cutting the work never matters, and no row reads what is not its own."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from headrace.ops import attention
from headrace.ops.attention import ATTEND, STORE
from headrace.ops.op import Case
from tests.native.emulated import nan_block
from tests.ops.calling import call, index_of

CASES = [pytest.param(case, id=case.name) for case in ATTEND.cases(np.random.default_rng(3))]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("workspace", [1, 3000, 60_000])
def test_tiles_of_any_size_give_the_same(case: Case, workspace: int, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = call(ATTEND, ATTEND.reference, case)
    assert case.kv is not None
    before = len(index_of(case.kv, 4).tiles)
    monkeypatch.setattr(attention, "WORKSPACE", workspace)
    assert workspace > 1 or len(index_of(case.kv, 4).tiles) > before
    np.testing.assert_allclose(call(ATTEND, ATTEND.reference, case), whole, atol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_rows_alone_give_the_same(case: Case) -> None:
    whole, kv = call(ATTEND, ATTEND.reference, case), case.kv
    assert kv is not None
    for row in range(len(kv.lengths)):
        own = slice(kv.offsets[row], kv.offsets[row + 1])
        alone = replace(
            case,
            inputs=(case.inputs[0][own],),
            kv=replace(
                kv,
                positions=kv.positions[own],
                offsets=np.array([0, own.stop - own.start], np.int32),
                lengths=kv.lengths[row : row + 1],
                table=kv.table[row : row + 1],
            ),
        )
        np.testing.assert_allclose(call(ATTEND, ATTEND.reference, alone), whole[own], atol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_a_row_that_is_not_finite_touches_no_other(case: Case) -> None:
    whole, kv = call(ATTEND, ATTEND.reference, case), case.kv
    assert kv is not None
    row, pool, queries = 0, kv.pool.copy(), case.inputs[0].copy()
    blocks = [b for b in kv.table[row] if b >= 0]
    pool[blocks] = nan_block(kv)
    queries[kv.offsets[row] : kv.offsets[row + 1]] = np.inf
    poisoned = call(ATTEND, ATTEND.reference, replace(case, inputs=(queries,), kv=replace(kv, pool=pool)))
    assert np.isnan(poisoned[: kv.offsets[1]]).all()
    assert np.array_equal(poisoned[kv.offsets[1] :], whole[kv.offsets[1] :])


def test_decode_rows_of_like_length_share_a_tile() -> None:
    case = next(ATTEND.cases(np.random.default_rng(3)))
    assert case.kv is not None
    sizes = sorted(tile.tokens.shape for tile in index_of(case.kv, 4).tiles)
    assert sizes == [(1, 1), (3, 1)], "blocks 1, 1, 2 together, 7 alone"


@pytest.mark.parametrize("op", [STORE, ATTEND], ids=["store", "attend"])
def test_a_missing_block_is_an_error(op: attention.Op) -> None:
    case = next(op.cases(np.random.default_rng(3)))
    assert case.kv is not None
    table = case.kv.table.copy()
    table[3, 2] = -1
    with pytest.raises(ValueError, match="row 3: the block table has no block"):
        call(op, op.reference, replace(case, kv=replace(case.kv, table=table)))
