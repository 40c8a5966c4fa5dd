"""Sampling in C++ on every instruction set that this machine has, bit for bit against the NumPy definition."""

from __future__ import annotations

import math
from fractions import Fraction
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headrace.execute.plan import Admission
from headrace.execute.sampler import Draw, SamplingState, Score, reduce
from headrace.native import _core as core
from headrace.native import isas
from headrace.native.sampling import NativeSampling
from headrace.ops import sampling as s
from headrace.ops.sampling import Knobs
from headrace.params import SamplingParams
from tests.execute.resolved import OFF

BIG = float(np.finfo(np.float32).max)
TINY = float(np.finfo(np.float32).smallest_subnormal)
HUGE = 262_144
few = settings(max_examples=120, deadline=None)


@pytest.fixture(params=isas(), scope="module")
def native(request: pytest.FixtureRequest) -> NativeSampling:
    return NativeSampling(request.param)


values = st.one_of(
    st.integers(-4, 4).map(float),
    st.floats(-60, 60, width=32),
    st.sampled_from([0.0, -0.0, TINY, -TINY, 3 * TINY, BIG, -BIG, 1e38, -1e38, 1e-38, -math.inf, 1.0000001]),
)
temperatures = st.one_of(
    st.just(1.0), st.floats(1e-5, 5), st.sampled_from([1e-5, 1e38, 1e300, 1e-20, 1e-40, TINY, 1e36, 1.0000001])
)


@st.composite
def rows(draw: st.DrawFn) -> np.ndarray:
    """A row with a finite peak: ties, the far ends of float32, and every length within a vector and a few beyond."""
    row = np.array(draw(st.lists(values, min_size=1, max_size=70)), np.float32)
    if draw(st.booleans()):
        row = np.resize(row, draw(st.integers(1, 1600)))
    if np.isneginf(row).all():
        row[draw(st.integers(0, len(row) - 1))] = 0
    return row


KINDS = ("normal", "ties", "equal", "rising", "falling", "one", "peaked", "steep", "banned", "faint", "tiny", "model")


@cache
def wide(kind: str, size: int) -> np.ndarray:
    rng = np.random.default_rng(size)
    i = np.arange(size)
    row: np.ndarray = {
        "normal": lambda: rng.standard_normal(size),
        "ties": lambda: rng.integers(-3, 3, size),
        "equal": lambda: np.full(size, -7.0),
        "rising": lambda: i / 100,
        "falling": lambda: -i / 3,
        "one": lambda: np.where(i == size - 1, 0, -np.inf),
        "peaked": lambda: rng.standard_normal(size) + 20 * (i == 17),
        "steep": lambda: rng.standard_normal(size) * 50,
        "banned": lambda: np.where(rng.random(size) < 0.9, -np.inf, rng.standard_normal(size)),
        "faint": lambda: np.where(i % 1000 == 7, 0.0, -rng.uniform(28, 31, size)),  # weights from 12 to 0
        "tiny": lambda: rng.integers(-9, 9, size) * TINY,
        "model": lambda: rng.standard_normal(size) * 2.5 + 9 * (rng.random(size) < 0.002) * rng.exponential(1, size),
    }[kind]().astype(np.float32)
    return row


SIZES = (8192 + 511, 50_001, HUGE)


# -- weights, totals, log-probabilities --------------------------------------------------------------------------------


@given(rows(), temperatures)
@few
def test_weights(native: NativeSampling, row: np.ndarray, temperature: float) -> None:
    peak = float(row.max())
    got = native.weights(row, peak, temperature)
    assert got.dtype == np.int64
    assert got.tolist() == s.weights(row, peak, temperature).tolist()
    assert native.log_total(row, peak, temperature) == s.log_total(row, peak, temperature)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 3.0, 1e-5])
@pytest.mark.parametrize("peak", [0.0, 20.5, -3e30])
def test_weights_of_a_fine_sweep(native: NativeSampling, temperature: float, peak: float) -> None:
    """All the way down to where weights are 0, and beyond."""
    row = (peak - np.linspace(0, 45 * temperature, 300_007)).astype(np.float32)
    row[-1] = -np.inf
    peak = float(row.max())
    assert np.array_equal(native.weights(row, peak, temperature), s.weights(row, peak, temperature))
    assert native.log_total(row, peak, temperature) == s.log_total(row, peak, temperature)


@given(st.integers(1, 2**63 - 1))
@few
@example(1)
@example(2**63 - 1)
@example(2**53 + 1)
def test_log(total: int) -> None:
    assert core.log_weight(total) == s.log(total)


@given(rows(), temperatures, st.integers(-1, 90), st.data())
@few
def test_scores(native: NativeSampling, row: np.ndarray, temperature: float, k: int, data: st.DataObject) -> None:
    token, peak = data.draw(st.integers(0, len(row) - 1)), float(row.max())
    assert native.score(row, peak, temperature, token, k) == s.score(row, peak, temperature, token, k)


@pytest.mark.parametrize("kind", KINDS)
def test_scores_of_wide_rows(native: NativeSampling, kind: str) -> None:
    row = wide(kind, 50_001)
    peak = float(row.max())
    for token, k in ((0, 5), (int(row.argmax()), 0), (50_000, 20)):
        assert native.score(row, peak, 0.8, token, k) == s.score(row, peak, 0.8, token, k)


# -- order -------------------------------------------------------------------------------------------------------------


@given(rows(), st.sampled_from([None, math.nan, -math.nan, math.inf]), st.data())
@few
def test_peaks(native: NativeSampling, row: np.ndarray, bad: float | None, data: st.DataObject) -> None:
    if bad is not None:
        row[data.draw(st.integers(0, len(row) - 1))] = bad
    lines = np.stack([row, row[::-1], np.full(len(row), -np.inf, np.float32)])
    got, expected = native.peaks(lines), s.peaks(lines)
    assert got[0].tolist() == expected[0].tolist()
    assert got[1].tobytes() == expected[1].tobytes()


@pytest.mark.parametrize("place", [0, 31, 511, 512, 5_000, HUGE - 1])
def test_peaks_of_wide_rows(native: NativeSampling, place: int) -> None:
    line = wide("normal", HUGE)[None].copy()
    for value in (10.0, math.nan, math.inf):
        line[0, place] = value
        got, expected = native.peaks(line), s.peaks(line)
        assert (got[0].tolist(), got[1].tobytes()) == (expected[0].tolist(), expected[1].tobytes())


@given(rows(), st.integers(-1, 90), st.data())
@few
def test_order(native: NativeSampling, row: np.ndarray, k: int, data: st.DataObject) -> None:
    token = data.draw(st.integers(0, len(row) - 1))
    assert native.top(row, k).tolist() == s.top(row, k).tolist()
    assert native.rank(row, token) == s.rank(row, token)


@cache
def expected_order(kind: str, size: int) -> np.ndarray:
    return s.top(wide(kind, size), size)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_order_of_wide_rows(native: NativeSampling, kind: str, size: int) -> None:
    row = wide(kind, size)
    ranked = expected_order(kind, size)
    for k in (1, 2, 40, 1024, 1025, 4000, size - 1, size, size + 1):
        assert np.array_equal(native.top(row, k), ranked[:k])
    for token in (0, 17, size - 1, int(row.argmax())):
        assert native.rank(row, token) == s.rank(row, token)


# -- kept sets and draws -----------------------------------------------------------------------------------------------

parts = st.one_of(
    st.floats(0, 1), st.floats(0, 1e-300), st.sampled_from([1.0, 0.5, 5e-324, 2**-52, 1 - 2**-53, 0.1, 2.0**-1022])
)


@given(st.one_of(st.integers(1, 2**63 - 1), st.integers(1, 100), st.just(2**44)), parts)
@settings(max_examples=1000, deadline=None)
@example(2**63 - 1, 1 - 2**-53)
@example(2**63 - 1, 1.0)
@example(2**63 - 1, 2.0**-63)
@example(1, 5e-324)
def test_share(total: int, part: float) -> None:
    """m * total / 2**s rounded up, in 128 bits: m has 53 bits and total 63, so the product has at most 116, and where
    s is larger the quotient is below 1."""
    assert core.share(total, part) == s.share(total, part) == math.ceil(Fraction(part) * total)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_a_nucleus_ends_exactly_at_its_target(native: NativeSampling, kind: str, temperature: float) -> None:
    row = wide(kind, 20_000)
    peak = float(row.max())
    weight = s.weights(row, peak, temperature)
    ranked = [i for i in s.top(row, len(row)).tolist() if weight[i]]
    running = np.cumsum(weight[ranked]).tolist()
    for n in {0, 1, 3, 6, 300, 700, 1500, 12_345, len(ranked) - 2, len(ranked) - 1}:
        if not 0 <= n < len(ranked):
            continue
        for target in (running[n], running[n] - 1, running[n] + 1):
            if 1 <= target <= running[-1]:
                expected = s.nucleus(row, weight, target)
                assert native._core.nucleus(row, peak, temperature, target) == expected
        assert native._core.nucleus(row, peak, temperature, running[n]) == ranked[n]


knobs = st.builds(
    Knobs,
    temperature=temperatures,
    top_k=st.one_of(st.sampled_from([0, -1, 1, 10**9, 2**63 - 1]), st.integers(1, 70)),
    top_p=st.one_of(st.sampled_from([1.0, 1e-300, 0.5, math.nextafter(1, 0)]), st.floats(1e-6, 1)),
    min_p=st.one_of(st.sampled_from([0.0, 1.0, 1e-300]), st.floats(0, 1)),
    number=st.one_of(st.sampled_from([0, 2**64 - 1, 2**63]), st.integers(0, 2**64 - 1)),
)


@given(rows(), st.lists(st.one_of(st.none(), knobs), min_size=1, max_size=6), st.data())
@settings(max_examples=400, deadline=None)
def test_picks(native: NativeSampling, row: np.ndarray, given: list[Knobs | None], data: st.DataObject) -> None:
    lines = np.stack([np.roll(row, i) for i in range(len(given))])
    if data.draw(st.booleans()):
        lines[-1, -1] = np.nan
    got, expected = native.pick(lines, given), s.pick(lines, given)
    assert got[0].tolist() == expected[0].tolist()
    assert got[1].tobytes() == expected[1].tobytes()


@cache
def expected_picks(kind: str, size: int) -> list[tuple[Knobs, int]]:
    """Knobs, and the token that the definition gives."""
    sets = [
        (0, 1.0, 0.0), (0, 0.9, 0.0), (0, 0.3, 0.1), (0, 1e-9, 0.0), (0, 1 - 2**-53, 0.0), (0, 1.0, 0.2), (0, 1.0, 1.0),
        (0, 1.0, 1e-12), (40, 1.0, 0.0), (200, 0.7, 0.0), (1200, 0.99, 0.001), (size - 1, 0.9, 0.0), (size, 1.0, 0.0),
    ]  # fmt: skip
    numbers = s.numbers(5, 0, 0, 0, len(sets)) + [2**64 - 1] * len(sets)
    asked = [Knobs(0.9, *kept, number) for kept, number in zip(sets * 2, numbers, strict=True)]
    asked += [Knobs(t, 0, p, 0.0, 2**64 - 1) for t in (1e-5, 1.0, 4.0, 1e300) for p in (0.95, 0.9999)]
    row = wide(kind, size)
    return [(each, int(s.pick(row[None], [each])[0][0])) for each in asked if size < HUGE or each.top_k < size - 1]


@pytest.mark.parametrize(
    ("kind", "size"),
    [(kind, size) for kind in KINDS for size in SIZES if size < HUGE or kind in ("model", "ties", "banned")],
)
def test_picks_of_wide_rows(native: NativeSampling, kind: str, size: int) -> None:
    row = wide(kind, size)
    for each, expected in expected_picks(kind, size):
        assert native.pick(row[None], [each])[0].tolist() == [expected], each


def test_min_p_between_two_float32(native: NativeSampling) -> None:
    """The bound is a weight plus 1, which as a float32 would be the weight itself."""
    row = np.array([0.0, -0.5, -0.6], np.float32)
    weight = int(s.weights(row, 0.0, 1.0)[1])
    for bound, expected in ((weight, 1), (weight + 1, 0)):
        asked = [Knobs(1.0, 0, 1.0, bound / s.UNIT, 2**64 - 1)]
        assert native.pick(row[None], asked)[0].tolist() == s.pick(row[None], asked)[0].tolist() == [expected]


# -- around it ---------------------------------------------------------------------------------------------------------


def test_the_float_mode_of_the_caller_does_not_matter_and_stays(native: NativeSampling) -> None:
    row = wide("tiny", 3000)
    peak = float(row.max())
    asked = [Knobs(1e-40, 0, 0.4, 0.0, number) for number in s.numbers(1, 0, 0, 0, 20)]
    lines = np.ascontiguousarray(np.broadcast_to(row, (20, 3000)))
    expected = s.pick(lines, asked)[0].tolist(), s.weights(row, peak, 1e-40).tolist()
    small = torch.tensor([1e-40])
    assert torch.set_flush_denormal(True)
    try:
        got = native.pick(lines, asked)[0].tolist(), native.weights(row, peak, 1e-40).tolist()
        flushed = float(small * 1.0) == 0
    finally:
        torch.set_flush_denormal(False)
    assert got == expected
    assert flushed


def test_the_sampler_answers_the_same(native: NativeSampling) -> None:
    """Draws of every kind, scores and errors in one call, after all steps."""
    rng = np.random.default_rng(4)
    vocab = 5000
    asks: list[Draw | Score] = []
    for n in range(120):
        params = OFF | {
            "temperature": float(rng.choice([0.0, 0.7, 1.0, 2.0])),
            "top_k": int(rng.choice([0, 1, 50])),
            "top_p": float(rng.choice([1.0, 0.9])),
            "min_p": float(rng.choice([0.0, 0.05])),
            "logprobs": [None, 0, 5][n % 3],
            "logprobs_mode": str(rng.choice(["raw", "processed"])),
            "seed": n,
        }
        if n % 4 == 1:
            params |= {"frequency_penalty": 0.5, "logit_bias": {7: 2.5}, "min_tokens": 4}
        admission = Admission(0, 0, SamplingParams(**params), (1, 2, 3, 7), 3, frozenset({9}))
        asks.append(Score(n, n % 7) if n % 10 == 0 else Draw(SamplingState(admission, vocab)))
    logits = (rng.standard_normal((len(asks), vocab)) * 3).astype(np.float32)
    logits[5, 9] = np.nan
    logits[6] = -np.inf
    expected = reduce(logits.copy(), asks)
    assert reduce(logits.copy(), asks, native) == expected
    assert sum(answer.error is not None for answer in expected) == 2


def test_what_is_refused(native: NativeSampling) -> None:
    line = np.zeros((1, 8), np.float32)
    good = Knobs(1.0, 0, 1.0, 0.0, 0)
    for wrong in (line.astype(np.float64), line[:, ::2], line[0]):
        with pytest.raises(TypeError):
            native.peaks(wrong)
    with pytest.raises(ValueError, match="1 to 524,287 logits"):
        native.peaks(np.zeros((1, 0), np.float32))
    with pytest.raises(ValueError, match="1 to 524,287 logits"):
        native.peaks(np.zeros((1, s.MAX_VOCAB + 1), np.float32))
    with pytest.raises(ValueError, match="one tuple of knobs for each line"):
        native.pick(line, [good, good])
    for bad in (good._replace(temperature=1e-300), good._replace(top_p=math.nan), good._replace(min_p=1.5)):
        with pytest.raises(ValueError, match="out of range"):
            native.pick(line, [bad])
    with pytest.raises(IndexError, match="no such token"):
        native.rank(line[0], 8)
    with pytest.raises(IndexError, match="no such token"):
        native.score(line[0], 0.0, 1.0, -1, 3)
    with pytest.raises(ValueError, match="target"):
        native._core.nucleus(line[0], 0.0, 1.0, 8 * s.UNIT + 1)


def test_an_unknown_instruction_set_is_refused() -> None:
    with pytest.raises(ValueError, match="no instruction set mmx"):
        NativeSampling("mmx")
