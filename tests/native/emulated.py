"""What the kernels compute, bit for bit, in NumPy: the definition that docs/exact.md tells in words.

Single float32 operations in the order in which kernels do them, denormals read and written as zeros. Slow on purpose:
whoever changes an order of operations in csrc has to change it here too. Weights are read from the bytes of the file,
never from packed ones. Arrays are float32 unless said otherwise; the first axis is rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from headrace.formats.bits import halves, planes
from headrace.formats.format import Format
from headrace.formats.iq4 import VALUES

Array = np.ndarray
Number = np.ndarray | np.floating[Any]
F = np.float32

LANES = 16
GROUP = 32
"""Inputs that share one scale of activations, and inputs of one step of a bfloat16 product."""
BLOCK = 32
"""Positions of one block of the pool."""
SEGMENT = 512
"""Positions of one segment of attention."""

LEAST = float(2.0**-126)
"""The least normal float32."""


# ---- float32 arithmetic


def flushed(x: Number) -> Array:
    """Denormals as zeros of the same sign."""
    x = np.asarray(x, F)
    return np.where(np.abs(x) < LEAST, np.copysign(F(0), x), x)


def rounded(exact: Array) -> Array:
    """float64 to float32, half to even; what is still below the least normal number after rounding is zero."""
    with np.errstate(all="ignore"):
        out = exact.astype(F)
    tiny = np.abs(exact) < LEAST - 2.0**-151  # from here on it would round to LEAST if exponents had no end
    return np.where(tiny, np.copysign(F(0), out), out)


def _wide(x: Number) -> Array:
    return flushed(x).astype(np.float64)


def _single(operation: Callable[[Array, Array], Array]) -> Callable[[Number, Number], Array]:
    """One IEEE operation: float64 has more than twice the digits of float32, so rounding twice is rounding once."""

    def run(a: Number, b: Number) -> Array:
        with np.errstate(all="ignore"):
            return rounded(operation(_wide(a), _wide(b)))

    return run


add = _single(np.add)
sub = _single(np.subtract)
mul = _single(np.multiply)
div = _single(np.divide)


def sqrt(x: Number) -> Array:
    return rounded(np.sqrt(_wide(x)))


def fma(a: Number, b: Number, c: Number) -> Array:
    """a × b + c, rounded once. The product is exact in float64; the sum is rounded to odd there (Boldo and Melquiond
    2008), so that rounding it to float32 is right."""
    with np.errstate(all="ignore"):
        product, addend = _wide(a) * _wide(b), _wide(c)
        total = np.atleast_1d(product + addend)
        back = total - product
        lost = (product - (total - back)) + (addend - back)  # total + lost is exact (Knuth's two-sum)
        even = (total.view(np.int64) & 1) == 0
        other = np.nextafter(total, np.copysign(np.inf, lost))
        odd = np.where(np.isfinite(total) & (lost != 0) & even, other, total)
    return rounded(odd.reshape(np.broadcast_shapes(product.shape, addend.shape)))


def lane_sum(lanes: Array) -> Array:
    """[..., 16] → [...]: halves onto halves."""
    while lanes.shape[-1] > 1:
        half = lanes.shape[-1] // 2
        lanes = add(lanes[..., :half], lanes[..., half:])
    return lanes[..., 0]


def bits(x: Array) -> Array:
    return np.ascontiguousarray(x, F).view(np.int32)


def floats(x: Array) -> Array:
    return x.astype(np.int64).astype(np.uint64).astype(np.uint32).view(F)


def to_bf16(x: Array) -> Array:
    """Rounded to bfloat16, half to even; still float32. Works on bits: denormals stay, NaN stays NaN."""
    x = np.ascontiguousarray(x, F)
    raw = x.view(np.uint32)
    up = ((raw >> 16 & 1) + np.uint32(0x7FFF) + raw) & np.uint32(0xFFFF0000)
    return np.where(np.isnan(x), x, up.view(F))


# ---- elementary functions


def exp(x: Array) -> Array:
    """e^x: x = n ln 2 + r, a polynomial in r, 2^n put into the exponent."""
    x = np.where(F(-87.3) > x, F(-87.3), np.asarray(x, F))
    x = np.where(F(88.3) < x, F(88.3), x)
    magic = F(12582912.0)
    t = fma(x, F(1.44269504), magic)
    n = sub(t, magic)
    r = fma(n, F(-0.693359375), x)
    r = fma(n, F(2.12194440e-4), r)
    q = fma(F(0.0013926184), r, F(0.008363179))
    for c in (0.041666556, 0.16666576, 0.5):
        q = fma(q, r, F(c))
    e = add(fma(q, mul(r, r), r), F(1))
    power = floats((bits(t).astype(np.int64) << 23) + 0x3F800000)
    return mul(e, power)


def _gate(x: Array, y: Array) -> Array:
    """x / (1 + e^-y)."""
    return div(x, add(F(1), exp(sub(F(0), y))))


def silu(x: Array) -> Array:
    return _gate(x, x)


def gelu_tanh(x: Array) -> Array:
    cubic = fma(mul(mul(x, x), F(0.044715)), x, x)
    return _gate(x, mul(cubic, F(1.5957691216)))


def tanh(x: Array) -> Array:
    size = np.abs(x)
    t = sub(F(1), div(F(2), add(exp(add(size, size)), F(1))))
    signed: Array = np.copysign(t, x)
    return signed


def softcap(x: Array, cap: float) -> Array:
    return mul(tanh(div(x, F(cap))), F(cap))


def gated(gate: Array, up: Array, activation: str) -> Array:
    return mul({"silu": silu, "gelu_tanh": gelu_tanh}[activation](gate), up)


# ---- rows


def embed(table: Format, tokens: Array, factor: float) -> Array:
    lines: Array = table.dense()[tokens]
    return lines if factor == 1.0 else mul(lines, F(factor))


def _lanes(x: Array) -> Array:
    """[..., n] → [..., n / 16, 16], filled up with zeros."""
    stretches = -(-x.shape[-1] // LANES)
    filled = np.zeros((*x.shape[:-1], stretches * LANES), F)
    filled[..., : x.shape[-1]] = x
    return filled.reshape(*x.shape[:-1], stretches, LANES)


def rms_norm(x: Array, weight: Array, eps: float, offset: float) -> Array:
    n = len(weight)
    parts = x.reshape(len(x), -1, n)
    squares = np.zeros((*parts.shape[:2], LANES), F)
    lanes = _lanes(parts)
    for i in range(lanes.shape[2]):
        squares = fma(lanes[:, :, i], lanes[:, :, i], squares)
    rms = div(F(1), sqrt(add(div(lane_sum(squares), F(n)), F(eps))))
    return mul(mul(parts, rms[:, :, None]), add(weight, F(offset))).reshape(x.shape)


def angles(positions: Array, frequencies: Array, factor: float) -> Array:
    """int32 [n] → [n, 2 half]: cosines, then sines. The angle is a float32; the rest is float64."""
    angle = mul(positions.astype(F)[:, None], frequencies).astype(np.float64)
    magic = 6755399441055744.0
    t = angle * 0.63661977236758134 + magic
    n = t - magic
    r = ((angle - n * 1.5707963267341256) - n * 6.0771005063039597e-11) - n * 2.0222662487959506e-21
    s = r * r
    sine, cosine = np.zeros_like(s), np.zeros_like(s)
    for c in (
        *(-7.6471637318198164e-13, 1.6059043836821613e-10, -2.5052108385441720e-08, 2.7557319223985893e-06),
        *(-1.9841269841269841e-04, 8.3333333333333332e-03, -1.6666666666666666e-01, 1.0),
    ):
        sine = sine * s + c
    for c in (
        *(4.7794773323873853e-14, -1.1470745597729725e-11, 2.0876756987868099e-09, -2.7557319223985888e-07),
        *(2.4801587301587302e-05, -1.3888888888888889e-03, 4.1666666666666664e-02, -0.5, 1.0),
    ):
        cosine = cosine * s + c
    sine = sine * r
    quarter = t.view(np.int64) & 3
    both = (
        np.select([quarter == 0, quarter == 1, quarter == 2], [cosine, -sine, -cosine], sine),
        np.select([quarter == 0, quarter == 1, quarter == 2], [sine, cosine, -sine], -cosine),
    )
    return mul(rounded(np.concatenate(both, 1)), F(factor))


def rotate(x: Array, turns: Array, dim: int) -> Array:
    half = turns.shape[1] // 2
    cosine, sine = turns[:, None, :half], turns[:, None, half:]
    heads = x.reshape(len(x), -1, dim)
    out = heads.copy()
    first, second = heads[..., :half], heads[..., half : 2 * half]
    out[..., :half] = sub(mul(first, cosine), mul(second, sine))
    out[..., half : 2 * half] = add(mul(second, cosine), mul(first, sine))
    return out.reshape(x.shape)


# ---- linear maps


@dataclass(frozen=True, eq=False)
class Int8Rows:
    """Rows of activations as integers, filled up with zeros to a multiple of 64 inputs."""

    codes: Array
    """int64 [n, groups, 32]."""
    scale: Array
    """[n, groups]."""

    def bytes(self) -> Array:
        """uint8 [n, bytes], as csrc/layout.h has them: the codes, then 16 bytes a group."""
        n, groups = self.scale.shape
        fields = [("scale", "<f4"), ("sum", "<f4"), ("codes", "<i4"), ("half", "<i2", 2)]
        behind = np.zeros((n, groups), np.dtype(fields))
        half = -self.codes.reshape(n, groups, 2, 16).sum(3)
        behind["scale"], behind["codes"], behind["half"] = self.scale, half.sum(2), half
        behind["sum"] = mul(self.scale, half.sum(2).astype(F))
        codes = self.codes.astype(np.int8).reshape(n, -1)
        return np.concatenate((codes.view(np.uint8), behind.view(np.uint8).reshape(n, -1)), 1)


def to_int8(x: Array) -> Int8Rows:
    """One scale for 32 inputs, amax / 127. Below 2^-100: zeros. With NaN or infinity: the scale is NaN."""
    n, inputs = x.shape
    filled = np.zeros((n, -(-inputs // 64) * 64), F)
    filled[:, :inputs] = x
    groups = filled.reshape(n, -1, GROUP)
    amax = np.abs(groups).max(2)  # NaN where one is NaN
    finite, zero = np.isfinite(amax), amax < 2.0**-100
    live = finite & ~zero
    safe = np.where(live, amax, F(1))
    factor = np.where(live, div(F(127), safe), F(0))
    with np.errstate(invalid="ignore"):
        codes = np.rint(mul(np.where(finite[:, :, None], groups, F(0)), factor[:, :, None])).astype(np.int64)
    scale = np.where(finite, np.where(zero, F(0), div(safe, F(127))), F(np.nan))
    return Int8Rows(codes, scale)


@dataclass(frozen=True, eq=False)
class Parts:
    """A quantized weight, taken apart. x = d q + m, d s q or d s q - m t, where d and m are binary16 numbers."""

    codes: Array
    """int64 [outputs, inputs]: q, less its zero."""
    d: Array
    """[outputs, inputs / 32]: repeated where a block is longer."""
    m: Array | None
    s: Array | None = None
    """int64 [outputs, inputs / 16 or 32]."""
    t: Array | None = None

    def dense(self) -> Array:
        """By the rule of formats: shows that the parts are the right ones."""
        inputs = self.codes.shape[1]
        d = np.repeat(self.d, GROUP, 1)
        out = self.codes.astype(F)
        width = inputs if self.s is None else inputs // self.s.shape[1]
        if self.s is None:
            out *= d
        else:
            out *= d * np.repeat(self.s, width, 1).astype(F)
        if self.m is not None and self.t is None:
            out += np.repeat(self.m, GROUP, 1)
        elif self.m is not None and self.t is not None:
            out -= np.repeat(self.m, GROUP, 1) * np.repeat(self.t, width, 1).astype(F)
        return out


def _fives(high: Array, low: Array) -> Array:
    fifth: Array = np.unpackbits(high, axis=1, bitorder="little")
    fifth <<= 4
    fifth |= planes(low, 16, 4)
    return fifth


def _six_bits(packed: Array) -> tuple[Array, Array]:
    """s and t of Q4_K and Q5_K, [n, 8] each."""
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    s = np.concatenate((first & 63, third & 15 | first >> 6 << 4), 1)
    t = np.concatenate((second & 63, third >> 4 | second >> 6 << 4), 1)
    return s, t


def _signed(s: Array) -> Array:
    return s.astype(np.int64) - 32


def parts(weight: Format) -> Parts:
    """By the tables of headrace.formats."""
    b = weight.data.reshape(-1, weight.block_bytes)
    d = m = s = t = None
    match weight.name:
        case "Q4_0":
            q, zero = planes(b[:, 2:], 16, 4), 8
        case "Q4_1":
            q, zero, m = planes(b[:, 4:], 16, 4), 0, halves(b, 2)
        case "Q5_0":
            q, zero = _fives(b[:, 2:6], b[:, 6:]), 16
        case "Q5_1":
            q, zero, m = _fives(b[:, 4:8], b[:, 8:]), 0, halves(b, 2)
        case "Q8_0":
            q, zero = b[:, 2:].view(np.int8), 0
        case "IQ4_NL":
            q, zero = VALUES[planes(b[:, 2:], 16, 4)], 0
        case "IQ4_XS":
            q, zero = VALUES[planes(b[:, 8:], 16, 4)], 0
            s = _signed(planes(b[:, 4:8], 1, 4) | planes(b[:, 2:4], 1, 2) << 4)
        case "Q2_K":
            q, zero, d, m = planes(b[:, 16:80], 32, 2), 0, halves(b, 80), halves(b, 82)
            s, t = b[:, :16] & 15, b[:, :16] >> 4
        case "Q3_K":
            q, zero, d = planes(b[:, 32:96], 32, 2) | planes(b[:, :32], 32, 1) << 2, 4, halves(b, 108)
            s = _signed(planes(b[:, 96:104], 8, 4) | planes(b[:, 104:108], 4, 2) << 4)
        case "Q4_K":
            q, zero, m = planes(b[:, 16:], 32, 4), 0, halves(b, 2)
            s, t = _six_bits(b[:, 4:16])
        case "Q5_K":
            q, zero, m = planes(b[:, 48:], 32, 4) | planes(b[:, 16:48], 32, 1) << 4, 0, halves(b, 2)
            s, t = _six_bits(b[:, 4:16])
        case "Q6_K":
            q, zero, d = planes(b[:, :128], 64, 4) | planes(b[:, 128:192], 32, 2) << 4, 32, halves(b, 208)
            s = b[:, 192:208].view(np.int8)
        case _:
            raise ValueError(weight.name)
    outputs, inputs = weight.shape
    again = weight.block // GROUP

    def line(x: Array | None) -> Array | None:
        return None if x is None else x.reshape(outputs, -1)

    def whole(x: Array | None) -> Array | None:
        return None if x is None else x.astype(np.int64).reshape(outputs, -1)

    d = np.repeat(halves(b, 0) if d is None else d, again, 1).reshape(outputs, -1)
    m = line(None if m is None else np.repeat(m, again, 1))
    return Parts(q.astype(np.int64).reshape(outputs, inputs) - zero, d, m, whole(s), whole(t))


def linear(x: Array, weight: Format, bias: Array | None = None) -> Array:
    """[n, inputs] → [n, outputs]; the input is converted as the weight's format asks for it."""
    kinds = {"BF16": _bf16_linear, "F16": _wide_linear, "F32": _wide_linear}
    out = kinds.get(weight.name, _int8_linear)(x, weight)
    return out if bias is None else add(out, bias)


def _int8_linear(x: Array, weight: Format) -> Array:
    rows, w = to_int8(x), parts(weight)
    n, groups = rows.scale.shape
    outputs, inputs = weight.shape
    sums = -rows.codes.sum(2)
    acc = np.zeros((n, outputs), F)
    for g in range(groups):
        if g * GROUP >= inputs:  # filled up: zeros
            acc = fma(np.zeros_like(acc), rows.scale[:, g, None], acc)
            continue
        a, codes = rows.codes[:, g], w.codes[:, g * GROUP : (g + 1) * GROUP]
        scale, d = rows.scale[:, g, None], w.d[:, g]
        if w.s is not None and w.s.shape[1] * 16 == inputs:
            of = slice(2 * g, 2 * g + 2)
            acc = fma(_halves(a, codes, w.s[:, of], d, w.m, w.t, g), scale, acc)
            continue
        if w.s is not None:
            d = mul(d, w.s[:, g].astype(F))  # exact
        acc = fma(mul((a @ codes.T).astype(F), d), scale, acc)
        if w.m is not None:
            negative = sub(F(0), w.m[:, g]) if w.t is None else mul(w.m[:, g], w.t[:, g].astype(F))
            minus = mul(rows.scale[:, g], sums[:, g].astype(F))
            acc = fma(minus[:, None], negative, acc)
    return acc


def _halves(a: Array, codes: Array, s: Array, d: Array, m: Array | None, t: Array | None, g: int) -> Array:
    """A group whose halves have scales of their own: the integers of both are added before they become a float."""
    low, high = slice(0, 16), slice(16, 32)
    total = (a[:, low] @ codes[:, low].T) * s[:, 0] + (a[:, high] @ codes[:, high].T) * s[:, 1]
    out = mul(total.astype(F), d)
    if m is None or t is None:
        return out
    minus = -(a[:, low].sum(1)[:, None] * t[:, 2 * g] + a[:, high].sum(1)[:, None] * t[:, 2 * g + 1])
    return fma(minus.astype(F), m[:, g], out)


def _pairs(acc: Array, first: Array, second: Array) -> Array:
    """acc [...] + first · second over the last axis of at most 32, as the tile instruction TDPBF16PS forms it: even
    and odd products apart, each a chain of fused multiply-adds from zero."""
    even = odd = np.zeros(acc.shape, F)
    for p in range(0, first.shape[-1], 2):
        even = fma(first[..., p], second[..., p], even)
        odd = fma(first[..., p + 1], second[..., p + 1], odd)
    return add(acc, add(even, odd))


def _bf16_linear(x: Array, weight: Format) -> Array:
    outputs, inputs = weight.shape
    steps = -(-inputs // GROUP)
    a, w = np.zeros((len(x), steps * GROUP), F), np.zeros((outputs, steps * GROUP), F)
    a[:, :inputs], w[:, :inputs] = to_bf16(x), weight.dense()
    acc = np.zeros((len(x), outputs), F)
    for k in range(0, steps * GROUP, GROUP):
        acc = _pairs(acc, a[:, None, k : k + GROUP], w[None, :, k : k + GROUP])
    return acc


def _wide_linear(x: Array, weight: Format) -> Array:
    a, w = _lanes(x), _lanes(weight.dense())
    acc = np.zeros((len(x), len(w), LANES), F)
    for i in range(a.shape[1]):
        acc = fma(w[None, :, i], a[:, None, i], acc)
    return lane_sum(acc)


# ---- keys and values


def store(pool: Array, keys: Array, values: Array, blocks: Array, places: Array) -> None:
    """pool [blocks, 2, kv_heads, 32, dim], float32 or bfloat16, is written."""
    _, _, heads, _, dim = pool.shape
    for which, x in enumerate((keys, values)):
        lines = x.reshape(-1, heads, dim)
        if pool.dtype == ml_dtypes.bfloat16:
            upper = (to_bf16(lines).view(np.uint32) >> 16).astype(np.uint16)
            pool[blocks, which, :, places] = upper.view(ml_dtypes.bfloat16)
        else:
            pool[blocks, which, :, places] = lines


@dataclass(frozen=True, eq=False)
class Sums:
    """What attention knows of its lines: [lines], [lines], [lines, dim]."""

    m: Array
    l: Array  # noqa: E741
    acc: Array

    @classmethod
    def nothing(cls, lines: int, dim: int) -> Sums:
        return cls(np.full(lines, -np.inf, F), np.zeros(lines, F), np.zeros((lines, dim), F))

    def chosen(self, these: Any, other: Sums) -> Sums:
        return Sums(
            *(
                np.where(these.reshape(-1, *[1] * (mine.ndim - 1)), mine, yours)
                for mine, yours in ((self.m, other.m), (self.l, other.l), (self.acc, other.acc))
            )
        )


def attend(
    queries: Array,
    pool: Array,
    table: Array,
    positions: Array,
    *,
    scale: float,
    softcap: float | None,
    window: int | None,
) -> Array:
    """One row: queries [n, heads × dim] at consecutive positions, `table` the row's blocks by position / 32."""
    _, _, kv_heads, _, dim = pool.shape
    n, heads = len(queries), queries.shape[1] // dim
    group = heads // kv_heads
    q = queries.reshape(n, kv_heads, group, dim)
    out = np.empty_like(q)
    for head in range(kv_heads):
        lines = q[:, head].reshape(n * group, dim)
        if pool.dtype == ml_dtypes.bfloat16:
            lines = to_bf16(lines)
        at = np.repeat(positions, group)
        out[:, head] = _attend_lines(lines, at, pool[:, :, head], table, scale, softcap, window).reshape(n, group, dim)
    return out.reshape(queries.shape)


def _attend_lines(
    q: Array, at: Array, pool: Array, table: Array, scale: float, cap: float | None, window: int | None
) -> Array:
    lines, dim = q.shape
    before, now = Sums.nothing(lines, dim), Sums.nothing(lines, dim)
    first = 0 if window is None else max(0, int(at[0]) - window + 1)
    for number in range(first // BLOCK, int(at[-1]) // BLOCK + 1):
        if number % (SEGMENT // BLOCK) == 0:
            before, now = _merge(before, now), Sums.nothing(lines, dim)
        place = number * BLOCK + np.arange(BLOCK)
        seen = place <= at[:, None]
        if window is not None:
            seen &= place > at[:, None] - window
        keys, values = pool[table[number]]
        now = _block(q, keys, values, seen, now, scale, cap)
    total = _merge(before, now)
    return div(total.acc, total.l[:, None])


def _block(q: Array, keys: Array, values: Array, seen: Array, now: Sums, scale: float, cap: float | None) -> Sums:
    """The sums with one more block; the same ones for a line that sees nothing of it."""
    score = np.zeros(seen.shape, F)
    k = keys.astype(F)
    for step in range(0, q.shape[1], GROUP):
        score = _pairs(score, q[:, None, step : step + GROUP], k[None, :, step : step + GROUP])
    score = mul(score, F(scale))
    if cap:
        score = softcap(score, cap)
    score = np.where(seen, score, F(-np.inf))
    here = score.max(1)
    m = np.where(here > now.m, here, now.m)
    p = exp(sub(score, m[:, None]))
    if keys.dtype == ml_dtypes.bfloat16:
        p = to_bf16(p)
    p = np.where(seen, p, F(0))
    sums = lane_sum(add(p[:, :LANES], p[:, LANES:]))
    factor = exp(sub(now.m, m))
    moved = Sums(m, mul(now.l, factor), mul(now.acc, factor[:, None])).chosen(m != now.m, now)
    acc = _pairs(moved.acc, p[:, None], values.astype(F).T[None])
    return Sums(moved.m, add(moved.l, sums), acc).chosen(seen.any(1), now)


def _merge(before: Sums, now: Sums) -> Sums:
    m = np.where(now.m > before.m, now.m, before.m)
    old, new = exp(sub(before.m, m)), exp(sub(now.m, m))
    acc = fma(before.acc, old[:, None], mul(now.acc, new[:, None]))
    merged = Sums(m, add(mul(before.l, old), mul(now.l, new)), acc)
    return before.chosen((now.m == -np.inf) & (now.l == 0), merged)
