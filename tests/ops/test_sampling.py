"""The arithmetic of choosing tokens against slow twins: scalar loops and full sorts that read like the docstrings."""

from __future__ import annotations

import math
from collections import Counter
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headrace.ops import sampling as s

BIG = float(np.finfo(np.float32).max)
TINY = float(np.finfo(np.float32).smallest_subnormal)
few = settings(max_examples=150, deadline=None)

values = st.one_of(
    st.integers(-4, 4).map(float),
    st.floats(-60, 60, width=32),
    st.sampled_from([0.0, -0.0, TINY, -TINY, BIG, -BIG, 1e38, -1e38, -math.inf, 1.0000001]),
)


@st.composite
def rows(draw: st.DrawFn, most: int = 60) -> np.ndarray:
    """A row of logits with a finite peak: many ties, and the far ends of float32."""
    row = np.array(draw(st.lists(values, min_size=1, max_size=most)), np.float32)
    if np.isneginf(row).all():
        row[draw(st.integers(0, len(row) - 1))] = 0
    return row


temperatures = st.one_of(st.just(1.0), st.floats(1e-5, 5), st.sampled_from([1e-5, 1e300, 1e38]))


# -- twins: the definition, one token at a time ------------------------------------------------------------------------


def slow_philox(counter: list[int], key: list[int]) -> list[int]:
    for _ in range(10):
        a, b = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [b >> 32 ^ counter[1] ^ key[0], b & 0xFFFFFFFF, a >> 32 ^ counter[3] ^ key[1], a & 0xFFFFFFFF]
        key = [(key[0] + 0x9E3779B9) % 2**32, (key[1] + 0xBB67AE85) % 2**32]
    return counter


def slow_weight(x: np.float32, peak: np.float32, temperature: float) -> int:
    f = np.float32
    with np.errstate(all="ignore"):
        z = max((x - peak) / f(min(temperature, BIG)), f(-40))
        n = np.rint(z * f(1.4426950408889634))
        r = z - n * f(0.693359375)
        r = r - n * f(-2.12194440e-4)
        c = [f(v) for v in (0.0013926184, 0.008363179, 0.041666556, 0.16666576, 0.5)]
        q = ((((c[0] * r) + c[1]) * r + c[2]) * r + c[3]) * r + c[4]
        e = (q * (r * r) + r) + f(1)
    assert isinstance(e, np.float32)
    return int(float(e) * 2.0 ** (int(n) + 44))


def order(row: np.ndarray) -> list[int]:
    """Likeliest first."""
    return sorted(range(len(row)), key=lambda i: (-float(row[i]), i))


def slow_kept(row: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> dict[int, int]:
    """Weights of the tokens that stay, by id."""
    weight = [slow_weight(x, row.max(), temperature) for x in row]
    kept = order(row)
    if top_k > 0:
        kept = kept[:top_k]
    if top_p < 1:
        whole, total, head = sum(weight[i] for i in kept), 0, []
        for i in kept:
            head.append(i)
            total += weight[i]
            if Fraction(total) >= Fraction(top_p) * whole:
                break
        kept = head
    kept = [i for i in kept if Fraction(weight[i]) >= Fraction(min_p) * 2**44]
    return {i: weight[i] for i in sorted(kept)}


def slow_choose(row: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float, number: int) -> int:
    kept = slow_kept(row, temperature, top_k, top_p, min_p)
    left = number * sum(kept.values()) // 2**64
    for i, weight in kept.items():
        if left < weight:
            return i
        left -= weight
    raise AssertionError("a number below 2**64 always ends inside")


def choose(row: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float, number: int) -> int:
    return s.choose(row, float(row.max()), temperature, top_k=top_k, top_p=top_p, min_p=min_p, number=number)


# -- random numbers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ([0] * 4, [0] * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_philox_gives_the_published_vectors(counter: list[int], key: list[int], expected: str) -> None:
    """Known answers of Random123, the authors' library (kat_vectors, philox4x32 10)."""
    c = [np.array([word], np.uint64) for word in counter]
    got = s.philox((c[0], c[1], c[2], c[3]), (key[0], key[1]))
    assert " ".join(f"{int(word[0]):08x}" for word in got) == expected
    assert " ".join(f"{word:08x}" for word in slow_philox(counter, key)) == expected


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 127), st.integers(0, 3), st.integers(0, 2**31))
@few
def test_numbers_are_a_pure_function_of_their_place(seed: int, choice: int, purpose: int, first: int) -> None:
    key = [seed % 2**64 % 2**32, seed % 2**64 // 2**32]
    expected = []
    for index in range(first, first + 5):
        words = slow_philox([index, choice, purpose, 0], list(key))
        expected.append(words[0] + 2**32 * words[1])
    assert s.numbers(seed, choice, purpose, first, 5) == expected


def excess(observed: dict[object, int], expected: dict[object, float]) -> float:
    """Chi-square in standard deviations above its mean; below about 5 is ordinary."""
    stat = sum((observed.get(key, 0) - e) ** 2 / e for key, e in expected.items())
    return (stat - (len(expected) - 1)) / math.sqrt(2 * max(1, len(expected) - 1))


@pytest.mark.parametrize(
    ("here", "there"),
    [
        ((1, 0, 0), (1, 1, 0)),  # two choices
        ((1, 0, 0), (2, 0, 0)),  # two seeds
        ((-1, 0, 0), (1, 0, 0)),
        ((1, 0, 0), (1, 0, 1)),  # two purposes
    ],
)
def test_numbers_of_different_places_are_independent(here: tuple[int, ...], there: tuple[int, ...]) -> None:
    n = 20000
    a, b = (s.numbers(place[0], place[1], place[2], 0, n) for place in (here, there))
    pairs = Counter((x >> 61, y >> 61) for x, y in zip(a, b, strict=True))
    assert abs(excess(dict(pairs), {(i, j): n / 64 for i in range(8) for j in range(8)})) < 4.5
    successive = Counter((x >> 61, y >> 61) for x, y in pairwise(a))
    assert abs(excess(dict(successive), {(i, j): (n - 1) / 64 for i in range(8) for j in range(8)})) < 4.5


# -- weights, totals, log-probabilities --------------------------------------------------------------------------------


@given(rows(), temperatures)
@few
def test_weights_are_bit_for_bit_the_recipe(row: np.ndarray, temperature: float) -> None:
    got = s.weights(row, float(row.max()), temperature)
    assert got.dtype == np.int64
    assert got.tolist() == [slow_weight(x, row.max(), temperature) for x in row]


def test_weights_are_close_to_exp_and_end_at_2_to_the_minus_44() -> None:
    z = -np.linspace(0, 45, 200_001, dtype=np.float32)
    got = s.weights(z, 0.0, 1.0)
    exact = np.exp(z.astype(np.float64)) * 2**44
    assert (np.abs(got - exact) <= exact * 2**-22.5 + 1).all()
    assert got[0] == s.UNIT
    assert got.max() == s.UNIT
    assert (got[z < -30.6] == 0).all()
    assert (got[z > -30.4] > 0).all()


def test_the_widest_logits_do_not_overflow() -> None:
    row = np.full(s.MAX_VOCAB, 3.5, np.float32)
    assert int(s.weights(row, 3.5, 1.0).sum()) == s.MAX_VOCAB * 2**44 < 2**63
    assert s.choose(row, 3.5, 1.0, top_k=0, top_p=1, min_p=0, number=2**64 - 1) == s.MAX_VOCAB - 1
    assert s.choose(row, 3.5, 1.0, top_k=0, top_p=0.5, min_p=0, number=2**64 - 1) == s.MAX_VOCAB // 2


@given(st.integers(1, 2**63 - 1))
@few
@example(1)
@example(2**44)
@example(2**63 - 1)
def test_log_of_a_total(total: int) -> None:
    assert s.log(total) == pytest.approx(math.log(total) - 44 * math.log(2), abs=4e-15, rel=1e-15)


def test_log_of_one_likeliest_token_is_zero() -> None:
    assert s.log(s.UNIT) == 0


@pytest.mark.parametrize("temperature", [1.0, 0.3, 2.0])
def test_logprobs_are_those_of_the_softmax(temperature: float) -> None:
    rng = np.random.default_rng(3)
    for scale in (0.01, 1, 8):
        row = (rng.standard_normal(5000) * scale).astype(np.float32)
        exact = row.astype(np.float64) / temperature
        exact -= exact.max() + np.log(np.exp(exact - exact.max()).sum())
        peak = float(row.max())
        got = s.logprobs(row, peak, temperature, s.log_total(row, peak, temperature))
        assert np.abs(got - exact).max() < 1e-6


# -- order -------------------------------------------------------------------------------------------------------------


@given(rows(), st.integers(0, 70), st.data())
@few
def test_order_against_a_full_sort(row: np.ndarray, k: int, data: st.DataObject) -> None:
    expected = order(row)
    assert s.top(row, k).tolist() == expected[:k]
    token = data.draw(st.integers(0, len(row) - 1))
    assert s.rank(row, token) == expected.index(token) + 1
    ids, logits = s.peaks(row[None])
    assert (int(ids[0]), float(logits[0])) == (expected[0], float(row[expected[0]]))


@pytest.mark.parametrize("size", [4096 * 4, 4096 * 4 + 1, 50_001])
@pytest.mark.parametrize("kind", ["normal", "ties", "equal", "rising", "one"])
def test_order_of_wide_rows(size: int, kind: str) -> None:
    """Rows wide enough for the shortcut through column maxima."""
    rng = np.random.default_rng(size)
    row = {
        "normal": lambda: rng.standard_normal(size),
        "ties": lambda: rng.integers(-3, 3, size),
        "equal": lambda: np.zeros(size),
        "rising": lambda: np.arange(size),
        "one": lambda: np.where(np.arange(size) == size - 1, 0, -np.inf),
    }[kind]().astype(np.float32)
    expected = order(row)
    for k in (1, 2, 100, 1024, 1025, size - 1, size, size + 1):
        assert s.top(row, k).tolist() == expected[:k]


def test_peaks_show_what_is_not_finite() -> None:
    lines = np.array([[1, 2, 2], [1, np.nan, np.inf], [np.inf, 1, 0], [-np.inf] * 3, [-np.inf, -5, 0]], np.float32)
    ids, logits = s.peaks(lines)
    assert np.isfinite(logits).tolist() == [True, False, False, False, True]
    assert (ids[0], ids[4]) == (1, 2)


# -- kept sets and draws -----------------------------------------------------------------------------------------------

knobs = {
    "temperature": temperatures,
    "top_k": st.one_of(st.sampled_from([0, -1, 1, 10**9]), st.integers(1, 70)),
    "top_p": st.one_of(st.sampled_from([1.0, 1e-300, 0.5, math.nextafter(1, 0)]), st.floats(1e-6, 1)),
    "min_p": st.one_of(st.sampled_from([0.0, 1.0, 1e-300]), st.floats(0, 1)),
    "number": st.one_of(st.sampled_from([0, 2**64 - 1, 2**63]), st.integers(0, 2**64 - 1)),
}


@given(rows(), *knobs.values())
@settings(max_examples=400, deadline=None)
def test_choose_is_the_definition(
    row: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float, number: int
) -> None:
    got = choose(row, temperature, top_k, top_p, min_p, number)
    assert got == slow_choose(row, temperature, top_k, top_p, min_p, number)


@pytest.mark.parametrize("kind", ["normal", "ties", "equal", "peaked", "steep", "banned"])
@pytest.mark.parametrize("size", [3000, 20_000])
def test_choose_on_wide_rows(size: int, kind: str) -> None:
    """Rows wide enough for the search by pivots."""
    rng = np.random.default_rng(size)
    row = {
        "normal": lambda: rng.standard_normal(size),
        "ties": lambda: rng.integers(-3, 3, size),
        "equal": lambda: np.full(size, -7.0),
        "peaked": lambda: rng.standard_normal(size) + 20 * (np.arange(size) == 17),
        "steep": lambda: rng.standard_normal(size) * 50,
        "banned": lambda: np.where(rng.random(size) < 0.5, -np.inf, rng.standard_normal(size)),
    }[kind]().astype(np.float32)
    nuclei = [(0, 0.9, 0.0), (0, 0.3, 0.1), (0, 1e-9, 0.0), (0, 1 - 1e-12, 0.0)]
    knobs = [*nuclei, (0, 1.0, 0.2), (200, 0.7, 0.0), (1200, 1.0, 0.0)]
    weight = [slow_weight(x, row.max(), 0.9) for x in row]
    ranked = order(row)
    for top_k, top_p, min_p in knobs:
        kept = ranked[:top_k] if top_k else ranked
        if top_p < 1:
            running = np.cumsum([weight[i] for i in kept])
            kept = kept[: int(np.searchsorted(running, math.ceil(Fraction(top_p) * int(running[-1])))) + 1]
        kept = sorted(i for i in kept if weight[i] >= Fraction(min_p) * 2**44)
        running = np.cumsum([weight[i] for i in kept])
        for number in s.numbers(5, 0, 0, 0, 40):
            left = number * int(running[-1]) >> 64
            expected = kept[int(np.searchsorted(running, left, side="right"))]
            assert choose(row, 0.9, top_k, top_p, min_p, number) == expected


def test_the_nucleus_is_the_smallest_and_ties_go_to_lower_ids() -> None:
    row = np.array([0, 1, 1, 1, 1], np.float32)
    weight = s.weights(row, 1.0, 1.0)
    assert s.nucleus(row, weight, 1) == 1
    assert s.nucleus(row, weight, 2 * s.UNIT) == 2
    assert s.nucleus(row, weight, 2 * s.UNIT + 1) == 3
    assert s.nucleus(row, weight, 4 * s.UNIT + 1) == 0


@pytest.mark.parametrize("kind", ["normal", "ties", "faint"])
def test_the_nucleus_of_wide_rows_ends_exactly_at_its_target(kind: str) -> None:
    rng = np.random.default_rng(3)
    row = {
        "normal": lambda: rng.standard_normal(5000),
        "ties": lambda: rng.integers(-3, 3, 5000),
        "faint": lambda: np.where(np.arange(5000) % 1000 == 7, 0.0, -rng.uniform(28, 31, 5000)),  # weights from 12 to 0
    }[kind]().astype(np.float32)
    weight = s.weights(row, float(row.max()), 1.0)
    ranked = [i for i in order(row) if weight[i]]
    running = np.cumsum(weight[ranked]).tolist()
    for n in (0, 1, 3, 6, 300, 700, 1500, len(ranked) - 2, len(ranked) - 1):
        assert s.nucleus(row, weight, running[n]) == ranked[n]
        assert s.nucleus(row, weight, running[n] - 1) == ranked[n if weight[ranked[n]] > 1 else n - 1]


def test_share_is_exact() -> None:
    assert s.share(2**62, 1.0) == 2**62
    assert s.share(2**62 - 1, 0.5) == 2**61
    assert s.share(10, 5e-324) == 1
    assert s.share(3, math.nextafter(1, 0)) == 3


def test_off_values_keep_everything() -> None:
    """top_p 1, min_p 0 and top_k at or above the vocabulary (or 0, or -1) change nothing."""
    rng = np.random.default_rng(1)
    row = (rng.standard_normal(500) * 3).astype(np.float32)
    for number in s.numbers(9, 0, 0, 0, 300):
        plain = choose(row, 1.0, 0, 1.0, 0.0, number)
        assert all(choose(row, 1.0, k, 1.0, 0.0, number) == plain for k in (-1, 500, 501, 10**9))
    assert choose(row, 1.0, 0, 1.0, 0.0, 2**64 - 1) == 499


def test_min_p_of_one_keeps_the_likeliest_and_its_equals() -> None:
    row = np.array([3, 5, 1, 5, 4.9], np.float32)
    assert {choose(row, 1.0, 0, 1.0, 1.0, n) for n in s.numbers(1, 0, 0, 0, 100)} == {1, 3}


@pytest.mark.parametrize(
    "row",
    [
        [-math.inf, -math.inf, 0.0, -math.inf],
        [BIG, -BIG, BIG, -math.inf],
        [TINY, 0.0, -TINY, -math.inf],
        [-BIG, -BIG, -BIG, -math.inf],
        [1e38, 1e38, 1e38, 1e38],
    ],
)
@pytest.mark.parametrize("temperature", [1e-5, 1.0, 1e38, 1e300])
def test_extreme_rows_never_give_nan_or_a_banned_token(row: list[float], temperature: float) -> None:
    line = np.array(row, np.float32)
    banned = {i for i, x in enumerate(row) if x == -math.inf}
    with np.errstate(invalid="raise"):
        for number in s.numbers(2, 0, 0, 0, 50):
            assert choose(line, temperature, 0, 0.9, 0.0, number) not in banned
            assert choose(line, temperature, 3, 1.0, 0.0, number) not in banned
        peak = float(line.max())
        total = s.log_total(line, peak, temperature)
    got = s.logprobs(line, peak, temperature, total)
    assert not np.isnan(got).any()
    if np.ptp(line[~np.isneginf(line)].astype(np.float64)) < BIG:  # else x - peak overflows, and the weight is 0
        assert np.exp(got).sum() == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        (1.0, 0, 1.0, 0.0),
        (0.7, 0, 1.0, 0.0),
        (1.6, 12, 1.0, 0.0),
        (1.0, 0, 0.8, 0.0),
        (1.0, 0, 1.0, 0.1),
        (0.9, 20, 0.9, 0.05),
    ],
)
def test_draws_follow_the_exact_distribution(temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    """Chi-square of 20,000 draws against float64 probabilities, kept sets included."""
    row = (np.random.default_rng(7).standard_normal(40) * 1.5).astype(np.float32)
    p = np.exp((row.astype(np.float64) - row.max()) / temperature)
    p /= p.sum()
    kept = order(row)[: top_k or None]
    before = np.cumsum([0.0, *(p[i] for i in kept[:-1])]) / sum(p[i] for i in kept)
    kept = [i for i, b in zip(kept, before, strict=True) if b < top_p and p[i] >= min_p * p.max()]
    total, n = sum(p[i] for i in kept), 20_000
    observed = Counter(choose(row, temperature, top_k, top_p, min_p, x) for x in s.numbers(11, 0, 0, 0, n))
    assert set(observed) <= set(kept)
    assert excess(dict(observed), {i: n * p[i] / total for i in kept}) < 4.5
