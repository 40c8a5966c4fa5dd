"""What the kernels compute, bit for bit, in NumPy: the definition that docs/exact.md tells in words.

Single float32 operations in the order in which kernels do them, denormals read and written as zeros. Slow on purpose:
whoever changes an order of operations in csrc has to change it here too. Weights are read from the bytes of the file,
never from packed ones. Arrays are float32 unless said otherwise; the first axis is rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace.formats.bits import halves, planes
from headrace.formats.format import Format
from headrace.formats.iq4 import VALUES
from headrace.ops.op import KVCase

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


BITS = {"f32": (32, 32), "bf16": (16, 16), "int8": (8, 8), "int4": (8, 4)}
"""Of keys and of values, by format; from 8 down numbers are codes with scales."""


def spread(x: Array) -> Array:
    """[..., dim] times the Hadamard matrix over the root of `dim`; unchanged where `dim` is no power of two."""
    dim = x.shape[-1]
    if dim & (dim - 1):
        return x
    parts = x.reshape(*x.shape[:-1], -1, LANES)
    out = np.zeros_like(parts)
    for i in range(LANES):
        minus = np.array([(i & j).bit_count() % 2 for j in range(LANES)], bool)
        out = add(out, np.where(minus, -parts[..., i, None], parts[..., i, None]))
    step, flat = LANES, out.reshape(-1, dim)
    while step < dim:
        pairs = flat.reshape(-1, dim // step // 2, 2, step)
        first, second = pairs[:, :, 0], pairs[:, :, 1]
        flat = np.stack((add(first, second), sub(first, second)), 2).reshape(-1, dim)
        step *= 2
    return mul(flat, F(1) / np.sqrt(F(dim))).reshape(x.shape)


def to_codes(x: Array, largest: int) -> tuple[Array, Array]:
    """Codes [..., groups, 32] and scales [..., groups], which are bfloat16 numbers; filled up with zeros."""
    filled = np.zeros((*x.shape[:-1], -(-x.shape[-1] // GROUP) * GROUP), F)
    filled[..., : x.shape[-1]] = x
    groups = filled.reshape(*x.shape[:-1], -1, GROUP)
    amax = np.abs(groups).max(-1)  # NaN where one is NaN
    finite = np.isfinite(amax)
    live = finite & (amax >= 2.0**-100)
    scale = np.where(live, to_bf16(div(np.where(live, amax, F(1)), F(largest))), F(0))
    factor = div(F(1), np.where(live, scale, F(1)))
    codes = np.rint(mul(np.where(live[..., None], groups, F(0)), factor[..., None])).astype(np.int8)
    assert np.abs(codes).max(initial=0) <= largest
    return codes, np.where(finite, scale, F(np.nan))


def lines_of(x: Array, bits: int) -> Array:
    """[..., dim] as the reference's lines, uint8 [..., line] (headrace/formats/kv.py)."""
    if bits == 32:
        return np.ascontiguousarray(x).view(np.uint8)
    if bits == 16:
        return (to_bf16(x).view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    codes, scale = to_codes(x, (1 << bits - 1) - 1)
    codes = codes.reshape(*x.shape[:-1], -1)
    if bits == 4:
        codes = codes[..., ::2] & 15 | codes[..., 1::2] << 4
    halves = (np.ascontiguousarray(scale).view(np.uint32) >> 16).astype(np.uint16)
    return np.concatenate((codes.view(np.uint8), halves.view(np.uint8)), -1)


def of_lines(lines: Array, bits: int, dim: int) -> tuple[Array, Array | None]:
    """Numbers or codes [..., dim] and scales [..., groups], where there are some; both float32."""
    lines = np.ascontiguousarray(lines)
    if bits == 32:
        return lines.view(F), None
    if bits == 16:
        return (lines.view(np.uint16).astype(np.uint32) << 16).view(F), None
    groups = -(-dim // GROUP)
    codes = np.ascontiguousarray(lines[..., : -2 * groups]).view(np.int8)
    if bits == 4:
        codes = np.stack((codes << 4 >> 4, codes >> 4), -1).reshape(*codes.shape[:-1], -1)
    scale = np.ascontiguousarray(lines[..., -2 * groups :]).view(np.uint16).astype(np.uint32) << 16
    return codes[..., :dim].astype(F), scale.view(F)


def parts_of(pool: Array, kv_format: str, kv_heads: int, dim: int) -> list[Array]:
    """Lines of keys and of values, views [blocks, kv_heads, 32, line] of uint8 [blocks, bytes]."""
    out, at = [], 0
    for bits in BITS[kv_format]:
        line = lines_of(np.zeros(dim, F), bits).size
        size = kv_heads * BLOCK * line
        out.append(pool[:, at : at + size].reshape(-1, kv_heads, BLOCK, line))
        assert out[-1].base is not None
        at += size
    return out


def pool_of(numbers: Array, kv_format: str) -> Array:
    """A pool uint8 [blocks, bytes] of float32 [blocks, 2, kv_heads, 32, dim], which are not spread."""
    blocks = len(numbers)
    parts = [lines_of(numbers[:, which], bits).reshape(blocks, -1) for which, bits in enumerate(BITS[kv_format])]
    return np.concatenate(parts, 1)


def nan_block(kv: KVCase) -> Array:
    """The bytes of a block whose numbers are all NaN."""
    return pool_of(np.full((1, 2, kv.kv_heads, BLOCK, kv.dim), np.nan, F), kv.kv_format)[0]


def spread_in(kv_format: str, x: Array) -> Array:
    return spread(x) if BITS[kv_format][0] <= 8 else x


def store(pool: Array, keys: Array, values: Array, blocks: Array, places: Array, kv_format: str, dim: int) -> None:
    """pool uint8 [blocks, bytes] is written."""
    both = [spread_in(kv_format, x.reshape(len(x), -1, dim)) for x in (keys, values)]
    parts = parts_of(pool, kv_format, both[0].shape[1], dim)
    for part, x, bits in zip(parts, both, BITS[kv_format], strict=True):
        part[blocks, :, places] = lines_of(x, bits)


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
    kv_format: str,
    kv_heads: int,
    dim: int,
    scale: float,
    softcap: float | None,
    window: int | None,
) -> Array:
    """One row: queries [n, heads × dim] at consecutive positions, `table` the row's blocks by position / 32."""
    key_lines, value_lines = parts_of(pool, kv_format, kv_heads, dim)
    n, heads = len(queries), queries.shape[1] // dim
    group = heads // kv_heads
    q = queries.reshape(n, kv_heads, group, dim)
    out = np.empty_like(q)
    for head in range(kv_heads):
        lines = spread_in(kv_format, q[:, head].reshape(n * group, dim))
        if kv_format != "f32":
            lines = to_bf16(lines)
        at = np.repeat(positions, group)
        heads_of = (key_lines[:, head], value_lines[:, head])
        mixed = _attend_lines(lines, at, heads_of, table, kv_format, scale, softcap, window)
        out[:, head] = spread_in(kv_format, mixed).reshape(n, group, dim)
    return out.reshape(queries.shape)


def _attend_lines(
    q: Array,
    at: Array,
    head: tuple[Array, Array],
    table: Array,
    kv_format: str,
    scale: float,
    cap: float | None,
    window: int | None,
) -> Array:
    """`head`: lines of keys and of values [blocks, 32, line]."""
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
        keys, values = (
            of_lines(lines[table[number]], bits, dim) for lines, bits in zip(head, BITS[kv_format], strict=True)
        )
        now = _block(q, keys, values, kv_format == "bf16", seen, now, scale, cap)
    total = _merge(before, now)
    return div(total.acc, total.l[:, None])


Scaled = tuple[Array, Array | None]
"""Numbers [32, dim]; or codes and scales [32, groups]."""


def _block(
    q: Array, keys: Scaled, values: Scaled, rounds: bool, seen: Array, now: Sums, scale: float, cap: float | None
) -> Sums:
    """The sums with one more block; the same ones for a line that sees nothing of it. `rounds`: p to bfloat16."""
    dim, (k, key_scale), (v, value_scale) = q.shape[1], keys, values
    score = np.zeros(seen.shape, F)
    for step in range(0, dim, GROUP):
        pair = q[:, None, step : step + GROUP], k[None, :, step : step + GROUP]
        if key_scale is None:
            score = _pairs(score, *pair)
        else:
            score = fma(_pairs(np.zeros_like(score), *pair), key_scale[None, :, step // GROUP], score)
    score = mul(score, F(scale))
    if cap:
        score = softcap(score, cap)
    score = np.where(seen, score, F(-np.inf))
    here = score.max(1)
    m = np.where(here > now.m, here, now.m)
    p = exp(sub(score, m[:, None]))
    if rounds:
        p = to_bf16(p)
    p = np.where(seen, p, F(0))
    sums = lane_sum(add(p[:, :LANES], p[:, LANES:]))
    factor = exp(sub(now.m, m))
    moved = Sums(m, mul(now.l, factor), mul(now.acc, factor[:, None])).chosen(m != now.m, now)
    if value_scale is None:
        acc = _pairs(moved.acc, p[:, None], v.T[None])
    else:
        shares = [to_bf16(mul(p, of_group)) for of_group in value_scale.T]
        acc = np.concatenate(
            [
                _pairs(moved.acc[:, d : d + GROUP], shares[d // GROUP][:, None], v.T[None, d : d + GROUP])
                for d in range(0, dim, GROUP)
            ],
            1,
        )
    return Sums(moved.m, add(moved.l, sums), acc).chosen(seen.any(1), now)


def _merge(before: Sums, now: Sums) -> Sums:
    m = np.where(now.m > before.m, now.m, before.m)
    old, new = exp(sub(before.m, m)), exp(sub(now.m, m))
    acc = fma(before.acc, old[:, None], mul(now.acc, new[:, None]))
    merged = Sums(m, add(mul(before.l, old), mul(now.l, new)), acc)
    return before.chosen((now.m == -np.inf) & (now.l == 0), merged)
