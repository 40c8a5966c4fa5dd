"""The arithmetic of choosing a token: what another implementation must reproduce bit for bit.

Owns the definition of weights, totals, kept sets, draws and random numbers for one row of logits. Knows nothing of
requests, penalties or batches: the order of the steps around these functions is the sampler's (`execute/sampler.py`).

How it is exact
---------------
A probability is held as a **weight**, an integer: `weight(x) = trunc(2**44 * E(z))`, `z = (x - peak) / temperature`,
where `peak` is the row's largest logit and E is the float32 polynomial of `weights`. The likeliest token weighs exactly
2**44; whatever is less likely than 2**-44 of it weighs 0 and is never drawn. Weights add up as int64, and integer sums
are the same in any order, so totals, nuclei and draws do not depend on how the work was tiled, on the instruction set
or on threads. Thresholds and draws are integer comparisons. Nothing here calls a library's exp or log.

`Sampling` is what the sampler calls. This module is one, and the definition: another one gives the same bits.

Float steps are single IEEE operations, rounded to nearest even, never fused and with denormals kept; each docstring
says in which type. A row of logits is float32 [vocab], 1 <= vocab <= MAX_VOCAB, its peak finite, without NaN and +inf;
-inf is a token that cannot be chosen. **Likelier** always means: larger logit, among equal logits the lower id.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]

WEIGHT_BITS = 44
UNIT = 1 << WEIGHT_BITS
"""Weight of the likeliest token."""
MAX_VOCAB = (1 << (63 - WEIGHT_BITS)) - 1
"""Widest logits whose weights surely add up within int64: 524,287."""
FLOAT32_MAX = float(np.finfo(np.float32).max)
FLOAT32_MIN = float(np.finfo(np.float32).tiny)
"""The least positive normal number."""

DRAW = 0
"""Purpose of a random number: the draw of a token."""


class Knobs(NamedTuple):
    """How one line's token is drawn: what `choose` takes."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    number: int


class Sampling(Protocol):
    """The arithmetic of whole lines; the functions of this module say what each does."""

    def peaks(self, logits: Floats) -> tuple[Ints, Floats]: ...
    def pick(self, logits: Floats, knobs: Sequence[Knobs | None]) -> tuple[Ints, Floats]: ...
    def score(
        self, values: Floats, peak: float, temperature: float, token: int, k: int
    ) -> tuple[float, int, tuple[tuple[int, float], ...]]: ...


# E(z): argument reduction by n * ln 2 in two parts (the first exact for every n that occurs), then 1 + r + r*r*q(r).
_LOG2_E = np.float32(1.4426950408889634)
_LN2_HIGH = np.float32(0.693359375)
_LN2_LOW = np.float32(-2.12194440e-4)
# q: degree 4, Chebyshev fit of (exp(r) - 1 - r) / r**2 on |r| <= ln(2) / 2; relative error of E 1.1e-8 before rounding.
_Q = tuple(np.float32(c) for c in (0.0013926184, 0.008363179, 0.041666556, 0.16666576, 0.5))
_LOWEST = np.float32(-40.0)
_CHUNK = 32768

_LN2 = 0.6931471805599453
_SMALL_NUCLEUS = 1024
_COLUMNS = 4096


# -- random numbers ----------------------------------------------------------------------------------------------------


def philox(counter: tuple[Words, Words, Words, Words], key: tuple[int, int]) -> tuple[Words, Words, Words, Words]:
    """Philox4x32-10: four 32-bit words out of four counter words and two key words, elementwise.

    All words stand in uint64 arrays of one shape and are below 2**32. J. K. Salmon et al., "Parallel random numbers: as
    easy as 1, 2, 3", SC 2011.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    mask, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    for _ in range(10):
        a, b = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (b >> half) ^ c1 ^ np.uint64(k0), b & mask, (a >> half) ^ c3 ^ np.uint64(k1), a & mask
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


def numbers(seed: int, choice: int, purpose: int, first: int, count: int) -> list[int]:
    """64-bit random numbers of the output indices first .. first + count - 1: a pure function of the arguments.

    Philox with counter (index, choice, purpose, 0) and the key (low, high word of `seed` in two's complement); the
    number is output word 0 + 2**32 * word 1. It stands for u = number / 2**64 in [0, 1).
    """
    index = np.arange(first, first + count, dtype=np.uint64)
    rest = [np.full(count, word, np.uint64) for word in (choice, purpose, 0)]
    low, high, _, _ = philox((index, rest[0], rest[1], rest[2]), (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF))
    out: list[int] = (low | high << np.uint64(32)).tolist()
    return out


# -- weights -----------------------------------------------------------------------------------------------------------


def weights(values: Floats, peak: float, temperature: float) -> Ints:
    """int64 [n]: the weight of each of n logits, from 0 to 2**44.

    In float32, t = min(temperature, largest float32):

        z = max((x - peak) / t, -40)
        n = round half to even (z * log2(e));  r = z - n * LN2_HIGH;  r = r - n * LN2_LOW
        q = ((((c0 * r) + c1) * r + c2) * r + c3) * r + c4;  e = (q * (r * r) + r) + 1
        weight = trunc(e * 2**(n + 44))            (that product is exact)

    An overflow of x - peak to -inf is meant: such a token weighs 0.
    """
    out = np.empty(values.size, np.int64)
    scale = np.float32(min(temperature, FLOAT32_MAX))
    top = np.float32(peak)
    with np.errstate(over="ignore", under="ignore"):
        for first in range(0, values.size, _CHUNK):
            _weigh(values[first : first + _CHUNK], top, scale, out[first : first + _CHUNK])
    return out


def _weigh(values: Floats, peak: np.float32, temperature: np.float32, out: Ints) -> None:
    z = values - peak
    if temperature != 1:
        z /= temperature
    np.maximum(z, _LOWEST, out=z)
    n = z * _LOG2_E
    np.rint(n, out=n)
    scratch = n * _LN2_HIGH
    z -= scratch
    np.multiply(n, _LN2_LOW, out=scratch)
    z -= scratch
    e = z * _Q[0]
    for c in _Q[1:-1]:
        e += c
        e *= z
    e += _Q[-1]
    np.multiply(z, z, out=scratch)
    e *= scratch
    e += z
    e += np.float32(1)
    exponent = n.astype(np.int32)
    exponent += 127 + WEIGHT_BITS
    exponent <<= 23
    e *= exponent.view(np.float32)
    np.copyto(out, e, casting="unsafe")


def log(total: int) -> float:
    """Natural logarithm of a sum of weights over 2**44, in float64, for 1 <= total < 2**63.

    m * 2**k = total rounded to float64, sqrt(1/2) <= m < sqrt(2) (the float64 nearest to it); s = (m - 1) / (m + 1);
    s**2 sums 1/(2j + 1), j from 10 down to 0, by Horner; result (k - 44) * LN2 + (2 * s) * that sum.
    """
    m, k = math.frexp(total)
    if m < 0.7071067811865476:
        m, k = m * 2, k - 1
    s = (m - 1) / (m + 1)
    square = s * s
    series = 0.0
    for j in range(10, -1, -1):
        series = series * square + 1 / (2 * j + 1)
    return (k - WEIGHT_BITS) * _LN2 + 2 * s * series


# -- order -------------------------------------------------------------------------------------------------------------


def peaks(logits: Floats) -> tuple[Ints, Floats]:
    """For each of [n, vocab] lines the likeliest token, int64 [n], and its logit, float32 [n].

    A line with NaN gives NaN; with +inf and no NaN +inf; with nothing but -inf -inf. Only then is the logit not finite.
    """
    ids = logits.argmax(axis=1)
    return ids, logits[np.arange(len(ids)), ids]


def rank(values: Floats, token: int) -> int:
    """1 + the number of tokens likelier than `token`."""
    value = values[token]
    return 1 + int(np.count_nonzero(values > value)) + int(np.count_nonzero(values[:token] == value))


def top(values: Floats, k: int) -> Ints:
    """int64 [min(k, vocab)]: the k likeliest tokens, likeliest first; k >= 0."""
    if k <= 0:
        return np.empty(0, np.int64)
    if k >= values.size:
        return _likeliest_first(values, np.arange(values.size))
    candidates = np.flatnonzero(values >= _lower_bound(values, k))
    return candidates[_likeliest_first(values[candidates], np.arange(candidates.size))[:k]]


def _lower_bound(values: Floats, k: int) -> np.float32:
    """A value that at least k of `values` reach, and few more: 0 < k < len(values).

    The values are dealt into columns; where k columns hold a value of at least t, at least k values are at least t.
    """
    deep = values.size // _COLUMNS
    if deep < 4 or k > _COLUMNS // 4:
        return np.float32(np.partition(values, values.size - k)[values.size - k])
    highest = values[: deep * _COLUMNS].reshape(deep, _COLUMNS).max(axis=0)
    return np.float32(np.partition(highest, _COLUMNS - k)[_COLUMNS - k])


def _likeliest_first(values: Floats, ids: Ints) -> Ints:
    """`ids` (ascending, the tokens of `values`) by value, largest first, ties in place."""
    return ids[np.argsort(-values, kind="stable")]


# -- kept sets and draws -----------------------------------------------------------------------------------------------


def share(total: int, part: float) -> int:
    """The least whole weight that is at least `part` of `total`, without rounding: ceil(part * total)."""
    return math.ceil(Fraction(part) * total)


def nucleus(values: Floats, weight: Ints, target: int) -> int:
    """The last token of the fewest likeliest tokens whose weights reach `target`, 1 <= target <= sum of weights.

    Tokens of weight 0 count for nothing. Found without sorting the row: those above a pivot logit either reach the
    target, then the rest is out, or they are all in; where it mostly ends, among the likeliest, is tried first.
    """
    ids = np.arange(values.size)
    pivot = _lower_bound(values, _SMALL_NUCLEUS // 2) if values.size > _SMALL_NUCLEUS else None
    while pivot is not None:
        above = values >= pivot
        reached = int((weight * above).sum())
        if reached < target:
            target -= reached
            above = ~above & (weight > 0)
        stay = np.flatnonzero(above)
        ids, values, weight = ids[stay], values[stay], weight[stay]
        pivot = _pivot(values) if ids.size > _SMALL_NUCLEUS else None
    order = _likeliest_first(values, np.arange(ids.size))
    return int(ids[order[_reach(weight[order], target) - 1]])


def _pivot(values: Floats) -> np.float32 | None:
    """A logit halfway between the least and the largest, above the least; None where all are equal."""
    low, high = values.min(), values.max()
    middle = low / 2 + high / 2
    return None if low == high else np.float32(middle if middle > low else high)


def _reach(weight: Ints, target: int) -> int:
    """How many of the first of `weight` it takes to reach `target`."""
    return int(np.searchsorted(np.cumsum(weight), target)) + 1


def draw(weight: Ints, number: int) -> int:
    """The first index whose running sum of weights exceeds floor(number / 2**64 * whole sum): never one of weight 0."""
    running = np.cumsum(weight)
    return int(np.searchsorted(running, (number * int(running[-1])) >> 64, side="right"))


def choose(
    values: Floats, peak: float, temperature: float, *, top_k: int, top_p: float, min_p: float, number: int
) -> int:
    """One token of a row of logits, drawn with a 64-bit random number. temperature > 0.

    1. `top_k` (off below 1): the k likeliest tokens stay.
    2. `top_p` (off at 1): of those the fewest likeliest stay whose weights reach share(their sum, top_p), i.e.
       probabilities are taken after `top_k`, as vLLM does.
    3. `min_p` (off at 0): of those stay the ones whose weight is at least share(2**44, min_p), i.e. that share of the
       likeliest's. This is the order of transformers; vLLM applies min_p first, which differs only in combination.
    4. `draw` in the order of ids.

    The likeliest token always stays.
    """
    ids: Ints | None = None
    if 0 < top_k < values.size:
        ids = top(values, top_k)
        weight = weights(values[ids], peak, temperature)
        if top_p < 1:
            kept = _reach(weight, share(int(weight.sum()), top_p))
            ids, weight = ids[:kept], weight[:kept]
    else:
        weight = weights(values, peak, temperature)
        if top_p < 1:
            last = nucleus(values, weight, share(int(weight.sum()), top_p))
            weight *= values >= values[last]
            weight[last + 1 :] *= values[last + 1 :] != values[last]
    if min_p > 0:
        weight = weight * (weight >= share(UNIT, min_p))
    if ids is None:
        return draw(weight, number)
    order = np.argsort(ids)
    return int(ids[order[draw(weight[order], number)]])


def pick(logits: Floats, knobs: Sequence[Knobs | None]) -> tuple[Ints, Floats]:
    """For each of [n, vocab] lines a token, int64 [n], and the line's peak, float32 [n].

    The token is the line's `choose` with its knobs; the likeliest where they are None; and that of `peaks` where the
    peak is not finite.
    """
    ids, found = peaks(logits)
    for i, (line, peak, given) in enumerate(zip(logits, found.tolist(), knobs, strict=True)):
        if given and math.isfinite(peak):
            ids[i] = choose(
                line, peak, given.temperature,
                top_k=given.top_k, top_p=given.top_p, min_p=given.min_p, number=given.number,
            )  # fmt: skip
    return ids, found


# -- log-probabilities -------------------------------------------------------------------------------------------------


def log_total(values: Floats, peak: float, temperature: float) -> float:
    """float64: `log` of the sum of the row's weights, the normalizer of `logprobs`. At least 0."""
    return log(int(weights(values, peak, temperature).sum()))


def logprobs(values: Floats, peak: float, temperature: float, total: float) -> npt.NDArray[np.float64]:
    """float64 [n]: log-probabilities of n logits of a row: (x - peak) / t - total, t as in `weights`, all in float64.

    `total` is the row's `log_total`; the error against the true log-softmax is below 1e-6.
    """
    out: npt.NDArray[np.float64] = (values.astype(np.float64) - peak) / min(temperature, FLOAT32_MAX) - total
    return out


def score(
    values: Floats, peak: float, temperature: float, token: int, k: int
) -> tuple[float, int, tuple[tuple[int, float], ...]]:
    """Log-probability and `rank` of `token`; the k likeliest, each with its log-probability."""
    best = top(values, k)
    total = log_total(values, peak, temperature)
    own, *others = logprobs(values[np.append(token, best)], peak, temperature, total).tolist()
    return own, rank(values, token), tuple(zip(best.tolist(), others, strict=True))
