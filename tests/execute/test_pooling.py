"""Hidden states pooled to one vector: what a row reads, in which order it sums, beside rows that ask for logits."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.execute.plan import Row, Want
from headrace.execute.pooling import NOT_FINITE, Pooled
from tests.execute.test_local import Rig, admission


def row(start: int, count: int, want: Want) -> Row:
    return Row(1, start, (0,) * count, ((0,),), want)


def states(count: int, width: int = 5) -> np.ndarray:
    """Of very different sizes, and large ones that cancel each other, so that another order of sums gives other
    bits in float64 too."""
    rng = np.random.default_rng(count)
    lines = rng.standard_normal((count, width)) * 10.0 ** rng.integers(-4, 8, (count, width))
    for first in range(2, count - 5, 11):
        lines[first] = 2.0**70
        lines[first + 4] = -(2.0**70)
    return lines.astype(np.float32)


def summed(lines: np.ndarray) -> np.ndarray:
    """The definition, in Python's floats."""
    out = []
    for column in lines.T.tolist():
        total = 0.0
        for value in column:
            total += value
        out.append(total / len(column))
    return np.array(out).astype(np.float32)


@pytest.mark.parametrize("chunks", [[90], [1, 1, 88], [33, 57], [89, 1]])
def test_the_mean_is_one_sum_however_rows_are_cut(chunks: list[int]) -> None:
    lines, pooled, start = states(90), Pooled("mean"), 0
    for count in chunks:
        want = Want.HIDDEN if start + count == 90 else Want.NOTHING
        one = row(start, count, want)
        assert pooled.reads(one) == range(count)
        got = pooled.add(one, lines[start : start + count])
        start += count
        if want is Want.NOTHING:
            assert got.embedding == ()
    assert np.array(got.embedding, np.float32).tobytes() == summed(lines).tobytes()
    assert got.error is None


def test_the_last_reads_one_state() -> None:
    lines, pooled = states(6), Pooled("last")
    assert len(pooled.reads(row(0, 4, Want.NOTHING))) == 0
    assert pooled.add(row(0, 4, Want.NOTHING), lines[:0]).embedding == ()
    assert pooled.reads(row(4, 2, Want.HIDDEN)) == range(1, 2)
    assert pooled.add(row(4, 2, Want.HIDDEN), lines[5:]).embedding == tuple(lines[5].tolist())


def test_rows_that_are_missing_are_seen() -> None:
    with pytest.raises(ValueError, match="a row at 4, but 0 hidden states"):
        Pooled("mean").add(row(4, 2, Want.HIDDEN), states(2))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_what_is_not_finite_is_this_requests_error(pooling: str, value: float) -> None:
    lines = states(2)
    lines[1, 3] = value
    if pooling == "mean":
        lines[0, 3] = -value
    pooled = Pooled(pooling)
    got = pooled.add(row(0, 2, Want.HIDDEN), lines if pooling == "mean" else lines[1:])
    assert got.error == NOT_FINITE
    assert got.embedding == ()


def test_beside_rows_that_ask_for_logits() -> None:
    """Vectors and tokens are those of each request alone, in any order of rows."""
    prompts = {1: [1, 2, 3, 4, 5], 2: [6, 7, 8], 3: [9, 1, 4, 4], 4: [3, 3]}
    extra = {1: {"pooling": "mean", "max_tokens": 0}, 3: {"pooling": "last", "max_tokens": 0}}
    extra[4] = {"prompt_logprobs": 0}  # type: ignore[dict-item]
    wants = {1: Want.HIDDEN, 2: Want.TOKEN, 3: Want.HIDDEN, 4: Want.BOTH}

    def run(order: list[int]) -> dict[int, object]:
        rig = Rig()
        rows = [rig.row(r, 0, prompts[r], wants[r]) for r in order]
        new = [admission(r, prompts[r], len(prompts[r]), **extra.get(r, {})) for r in order]  # type: ignore[arg-type]
        return dict(zip(order, rig.step(*rows, admitted=new), strict=True))

    alone = {r: run([r])[r] for r in prompts}
    assert len(alone[1].embedding) == len(alone[3].embedding) == 3  # type: ignore[attr-defined]
    assert len(alone[2].tokens) == len(alone[4].tokens) == 1  # type: ignore[attr-defined]
    for order in ([1, 2, 3, 4], [2, 1, 4, 3], [3, 4, 2, 1], [1, 3]):
        assert run(order) == {r: alone[r] for r in order}
