"""Every operation on every instruction set of this machine, against both its twins: exact arithmetic within a
tolerance (tests/ops/definitions.py), and the recipe bit for bit (emulated.py). Then what the promise of equal bits
rests on: rows, threads and sizes do not matter, a number that is not finite stays in its row."""

from __future__ import annotations

import gc
import weakref
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest

from headrace import native
from headrace.formats import FORMATS
from headrace.formats.kv import KV_FORMATS
from headrace.loading.gguf import GGUF
from headrace.ops.op import Case, KVCase, Op
from headrace.ops.registry import OPS
from tests.native import emulated
from tests.native.calling import call, converted, embed, linear, packed, stored, to_native_pool, workers
from tests.native.weights import SCALES, random_weight
from tests.ops.definitions import DEFINITIONS
from tests.ops.test_ops import MUTATIONS

ISAS = pytest.mark.parametrize("isa", native.isas())
KV = pytest.mark.parametrize("kv_format", KV_FORMATS)
KINDS = [kind for kind in OPS if kind != "select"]  # which is a copy, and covered by whole models
BF16_ATTENTION = 2e-3
"""Tolerance where the pool is not float32, the queries being rounded: probabilities are rounded to bfloat16 too."""


def same_bits(got: np.ndarray, want: np.ndarray) -> bool:
    """-0 is not 0; a NaN is a NaN."""
    assert got.shape == want.shape and got.dtype == want.dtype
    if got.dtype == np.uint8:
        return got.tobytes() == want.tobytes()
    if got.dtype == ml_dtypes.bfloat16:
        got, want = got.astype(np.float32), want.astype(np.float32)
    return bool(((got.view(np.uint32) == want.view(np.uint32)) | (np.isnan(got) & np.isnan(want))).all())


def seeded(*of: object) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(repr(of).encode()))


# ---- the meaning


@cache
def cases(kind: str) -> list[tuple[Case, np.ndarray]]:
    """With what is exact, of queries as they are rounded."""
    return [(case, DEFINITIONS[kind](rounded(kind, case))) for case in OPS[kind].cases(np.random.default_rng(11))]


def rounded(kind: str, case: Case) -> Case:
    """Queries are rounded to bfloat16 as the pool's format has them, spread or not."""
    if kind != "attend" or case.kv is None or case.kv.kv_format == "f32":
        return case
    queries, kv = case.inputs[0], case.kv
    heads = emulated.spread_in(kv.kv_format, queries.reshape(len(queries), -1, kv.dim))
    heads = emulated.spread_in(kv.kv_format, emulated.to_bf16(heads))
    return replace(case, inputs=(heads.reshape(queries.shape),))


def agrees(op: Op, case: Case, exact: np.ndarray, got: np.ndarray) -> bool:
    if not op.signature.output:
        return same_bits(got, in_native_order(case, exact))
    rounds = op.signature.kind == "attend" and case.kv is not None and case.kv.kv_format != "f32"
    assert got.dtype == np.float32 and got.shape == exact.shape
    tolerance = BF16_ATTENTION if rounds else op.tolerance
    return bool((np.abs(got - exact) <= tolerance * np.abs(exact).max(initial=0.0)).all())


def in_native_order(case: Case, pool: np.ndarray) -> np.ndarray:
    assert case.kv is not None
    return to_native_pool(replace(case.kv, pool=pool))


@ISAS
@pytest.mark.parametrize("kind", KINDS)
def test_exact_within_the_tolerance(kind: str, isa: str) -> None:
    for case, exact in cases(kind):
        assert agrees(OPS[kind], case, exact, call(kind, case, isa)), case.name


@ISAS
@pytest.mark.parametrize(("kind", "number"), [(kind, n) for kind in KINDS for n in range(len(MUTATIONS[kind]))])
def test_a_mutation_is_seen(kind: str, number: int, isa: str) -> None:
    change = MUTATIONS[kind][number]
    assert any(not agrees(OPS[kind], case, exact, call(kind, change(case), isa)) for case, exact in cases(kind))


@ISAS
@pytest.mark.parametrize("name", FORMATS)
def test_linear_means_what_the_format_says(name: str, isa: str) -> None:
    """Against float64 on the dense weight: with the activations as they are rounded tightly, with the given ones by the
    error of their rounding."""
    rng = seeded(name)
    weight, x = random_weight(name, 40, 512, rng), rng.standard_normal((3, 512), np.float32)
    got, dense = linear(weight, x, isa), weight.dense().astype(np.float64)
    rows = emulated.to_int8(x)
    rounded = {"BF16": emulated.to_bf16(x), "F16": x, "F32": x}.get(
        name, (rows.codes * rows.scale[:, :, None].astype(np.float64)).reshape(3, -1)
    )
    largest = np.abs(x @ dense.T).max()
    assert np.abs(got - rounded @ dense.T).max() <= 2e-6 * largest
    assert np.abs(got - x @ dense.T).max() <= 2e-2 * largest


# ---- the recipe


def emulation(kind: str, case: Case) -> np.ndarray:
    x, attrs, weights = case.inputs, case.attrs, case.weights
    if kind == "store" or kind == "attend":
        assert case.kv is not None
        return _emulated_store(case, case.kv) if kind == "store" else _emulated_attend(case, case.kv)
    run: dict[str, Callable[[], np.ndarray]] = {
        "embed": lambda: emulated.embed(stored(weights[0]), x[0], attrs["scale"]),
        "linear": lambda: emulated.linear(x[0], stored(weights[0]), *weights[1:]),
        "rms_norm": lambda: emulated.rms_norm(x[0], weights[0], attrs["eps"], attrs["offset"]),
        "angles": lambda: emulated.angles(x[0], weights[0], attrs["factor"]),
        "rotate": lambda: emulated.rotate(x[0], x[1], attrs["dim"]),
        "gated": lambda: emulated.gated(x[0], x[1], attrs["activation"]),
        "add": lambda: emulated.add(x[0], x[1]),
        "softcap": lambda: emulated.softcap(x[0], attrs["cap"]),
    }
    return run[kind]()


def _emulated_store(case: Case, kv: KVCase) -> np.ndarray:
    pool, counts = kv.pool.copy(), np.diff(kv.offsets)
    owner = np.repeat(np.arange(len(counts)), counts)
    blocks = kv.table[owner, kv.positions // 32]
    keys, values = case.inputs
    emulated.store(pool, keys, values, blocks, kv.positions % 32, kv.kv_format, kv.dim)
    return in_native_order(case, pool)


def _emulated_attend(case: Case, kv: KVCase) -> np.ndarray:
    out = np.empty_like(case.inputs[0])
    for table, begin, end in zip(kv.table, kv.offsets, kv.offsets[1:], strict=False):
        own = slice(begin, end)
        out[own] = emulated.attend(
            case.inputs[0][own],
            kv.pool,
            table,
            kv.positions[own],
            kv_format=kv.kv_format,
            kv_heads=kv.kv_heads,
            dim=kv.dim,
            scale=case.attrs["scale"],
            softcap=case.attrs["softcap"],
            window=kv.window,
        )
    return out


def edges() -> np.ndarray:
    """float32 numbers at which rules change: denormals, the least and largest, signs of zero, infinities, NaN."""
    tiny = np.float32(2.0**-126)
    some = [0, 1e-45, 2.0**-127, np.nextafter(tiny, np.float32(0)), tiny, 2.0**-100, 1e-20, 0.5, 1, 3, 44, 87.3, 88.3]
    some += [127, 1e10, 3.4e38, np.inf]
    return np.array([*some, *(-x for x in some), np.nan], np.float32)


def random_cases(kind: str) -> Iterator[Case]:
    """Beyond the operation's own cases: other sizes, and all pairs of the numbers at the edges."""
    rng = seeded(kind)
    first, second = (a.reshape(7, -1) for a in np.meshgrid(edges(), edges()))
    n, width = int(rng.integers(1, 18)), int(rng.integers(1, 100))
    x, y = (3 * rng.standard_normal((n, width), np.float32) for _ in range(2))
    if kind == "add":
        yield from (Case("edges", (first, second)), Case("random", (x, y)))
    elif kind == "gated":
        for activation in ("silu", "gelu_tanh"):
            yield Case(f"edges, {activation}", (first, second), attrs={"activation": activation})
            yield Case(f"random, {activation}", (x, y), attrs={"activation": activation})
    elif kind == "softcap":
        for cap in (0.7, 50.0):
            yield Case(f"edges, {cap}", (first,), attrs={"cap": cap})
            yield Case(f"random, {cap}", (x * 10,), attrs={"cap": cap})
    elif kind == "rms_norm":
        for dim in (1, 15, 16, 33, 576):
            x = rng.standard_normal((3, 2 * dim), np.float32) * np.float32(10.0) ** rng.integers(-22, 18, (3, 1))
            weight = rng.standard_normal(dim, np.float32)
            yield Case(f"dim {dim}", (x.astype(np.float32),), (weight,), {"eps": 1e-6, "offset": 1.0})
    elif kind == "embed":
        table = rng.standard_normal((9, 41), np.float32) * np.float32(1e-37)
        for scale in (1.0, 0.37):
            yield Case(f"small, {scale}", (np.arange(9, dtype=np.int32),), (table,), {"scale": scale})
    elif kind == "angles":
        frequencies = np.concatenate(([1, 0], 10_000.0 ** -rng.random(37))).astype(np.float32)
        positions = np.array([0, 1, 7, 511, 4095, 32_768, 131_071, (1 << 24) + 1], np.int32)
        yield Case("random", (positions,), (frequencies,), {"factor": 1.3})
    elif kind == "rotate":
        for dim, half in ((128, 64), (80, 20), (48, 17)):
            x = rng.standard_normal((3, 3 * dim), np.float32)
            yield Case(f"{half} of {dim}", (x, rng.standard_normal((3, 2 * half), np.float32)), attrs={"dim": dim})
    elif kind == "linear":
        for inputs in (1, 16, 37):
            weight = rng.standard_normal((19, inputs), np.float32)
            yield Case(f"{inputs} inputs", (rng.standard_normal((6, inputs), np.float32),), (weight,))
        yield Case("edges", (first[:, :40],), (second[:, :40],))
    else:
        yield from kv_cases(kind, rng)


def kv_case(
    rng: np.random.Generator,
    rows: list[tuple[int, int]],
    kv_format: str,
    window: int | None = None,
    dim: int | None = None,
) -> KVCase:
    """Rows (position, tokens) over a pool that is random everywhere, so also behind a row's last token."""
    kv_heads, dim = int(rng.choice([1, 3])), dim or int(rng.choice([16, 48, 64]))
    lengths = np.array([start + count for start, count in rows], np.int32)
    most = int(lengths.max() - 1) // 32 + 1
    numbers = rng.standard_normal((len(rows) * most, 2, kv_heads, 32, dim), np.float32)
    return KVCase(
        pool=emulated.pool_of(numbers, kv_format),
        kv_format=kv_format,
        kv_heads=kv_heads,
        dim=dim,
        positions=np.concatenate([np.arange(s, s + n) for s, n in rows]).astype(np.int32),
        offsets=np.cumsum([0, *(n for _, n in rows)]).astype(np.int32),
        lengths=lengths,
        table=rng.permutation(len(rows) * most).reshape(len(rows), most).astype(np.int32),
        window=window,
    )


def edge_cases(rng: np.random.Generator) -> Iterator[Case]:
    """Heads of numbers at the edges, alone among ordinary ones and among their like, in formats that have scales."""
    for kv_format, dim in (("int8", 64), ("int8", 48), ("int4", 128), ("int4", 80)):
        kv = replace(kv_case(rng, [(0, 3 * len(edges()))], kv_format, dim=dim), kv_heads=2)
        kv = replace(kv, pool=emulated.pool_of(np.zeros((len(kv.pool), 2, 2, 32, dim), np.float32), kv_format))
        x = rng.standard_normal((3, len(edges()), 2 * dim)).astype(np.float32)
        x[0, :, 5], x[1, :, dim:] = edges(), edges()[:, None]
        x[2] *= np.float32(2.0) ** rng.integers(-110, -90, (len(edges()), 1))  # around what counts as zero
        yield Case(f"{kv_format} of {dim}, edges", (x.reshape(-1, 2 * dim), x[::-1].reshape(-1, 2 * dim)), kv=kv)


def kv_cases(kind: str, rng: np.random.Generator) -> Iterator[Case]:
    if kind == "store":
        yield from edge_cases(rng)
    for kv_format in KV_FORMATS:
        for rows, window in [
            ([(0, 3), (45, 1), (30, 5)], None),
            ([(500, 30), (1100, 1), (511, 1), (512, 1), (1023, 3)], None),
            ([(500, 30), (1100, 1), (700, 9)], 512),
            ([(1020, 17), (33, 1)], 33),
        ]:
            kv = kv_case(rng, rows, kv_format, window)
            kv_heads, dim = kv.kv_heads, kv.dim
            heads = kv_heads if kind == "store" else kv_heads * int(rng.choice([1, 2, 3]))
            x = [2 * rng.standard_normal((len(kv.positions), heads * dim), np.float32) for _ in range(2)]
            name = f"{kv_format}, {rows}, window {window}"
            if kind == "store":
                yield Case(name, (x[0], x[1]), kv=kv)
            else:
                softcap = 3.0 if (kv_format == "f32") == (window is not None) else None
                yield Case(f"{name}, cap {softcap}", (x[0],), attrs={"scale": 0.21, "softcap": softcap}, kv=kv)


@pytest.mark.parametrize("kind", KINDS)
def test_the_recipe(kind: str) -> None:
    """Every instruction set, with 1, 2 and 3 threads."""
    for case in (*(case for case, _ in cases(kind)), *random_cases(kind)):
        want = emulation(kind, case)
        for number, isa in enumerate(native.isas()):
            got = call(kind, case, isa, threads=1 + number % 3)
            assert same_bits(got, want), f"{case.name} on {isa}"


def shapes(name: str) -> list[tuple[int, int]]:
    """(outputs, inputs), most of them not whole panels or chunks."""
    if name not in SCALES:
        return [(33, 70), (16, 32), (1, 1), (17, 129), (40, 256)]
    return [(33, 256), (5, 768)] if FORMATS[name].block == 256 else [(33, 96), (16, 64), (1, 32), (50, 160)]


@pytest.mark.parametrize("name", FORMATS)
def test_the_recipe_of_a_linear_map(name: str) -> None:
    """All rows at once, on every instruction set; each row alone; with 1, 2 and 3 threads."""
    rng = seeded(name)
    for outputs, inputs in shapes(name):
        weight = random_weight(name, outputs, inputs, rng)
        x = rng.standard_normal((17, inputs), np.float32)
        bias = rng.standard_normal(outputs, np.float32)
        want = emulated.linear(x, weight, bias)
        for isa in native.isas():
            for threads in (1, 2, 3):
                assert same_bits(linear(weight, x, isa, threads, bias), want), f"{weight.shape}, {isa}, {threads}"
            for n in (*range(1, 10), 16):
                assert same_bits(linear(weight, x[:n], isa, 2, bias), want[:n]), f"{weight.shape}, {isa}, {n} rows"
            alone = [linear(weight, x[r : r + 1], isa, 1, bias) for r in range(17)]
            assert same_bits(np.concatenate(alone), want), f"{weight.shape}, {isa}, alone"


@pytest.mark.parametrize("name", FORMATS)
def test_any_number_of_rows(name: str) -> None:
    """Around tiles of 16 rows and stretches of 128; the last outputs fill no panel, the inputs more than one stretch of
    what is unpacked at once."""
    rng = seeded(name, "rows")
    weight = random_weight(name, 41, {"BF16": 1100, "F16": 70, "F32": 70}.get(name, 768), rng)
    x, bias = rng.standard_normal((150, weight.shape[1]), np.float32), rng.standard_normal(41, np.float32)
    want = emulated.linear(x, weight, bias)
    for isa in native.isas():
        for n in (*range(1, 37), 47, 48, 51, 52, 64, 127, 128, 129, 132, 144, 150):
            assert same_bits(linear(weight, x[:n], isa, 1 + n % 3, bias), want[:n]), f"{isa}, {n} rows"


@pytest.mark.parametrize("name", SCALES)
def test_extreme_codes_and_scales(name: str) -> None:
    """Blocks of any bits at all, infinite and NaN scales among them; activations all at their largest: integer sums
    that an 8-bit or 16-bit step could not hold."""
    rng, kind = seeded(name, "any"), FORMATS[name]
    inputs = max(kind.block, 64)
    x = np.concatenate((np.ones((2, inputs)), -np.ones((1, inputs)), np.full((1, inputs), 3e38))).astype(np.float32)
    x[1, ::2] *= -1
    x = np.tile(x, (5, 1))
    blocks = rng.integers(0, 256, (160, inputs // kind.block, kind.block_bytes), dtype=np.uint8)
    blocks[0], blocks[1] = 0, 255
    for line, byte in ((2, 0), (3, 255)):  # least and largest codes with plain scales
        blocks[line] = byte
        for at in SCALES[name]:
            blocks[line, :, at : at + 2] = np.float16(0.3).reshape(1).view(np.uint8)
    weight = kind((160, inputs), blocks.reshape(160, -1))
    want = emulated.linear(x, weight)
    for isa in native.isas():
        assert same_bits(linear(weight, x, isa), want), isa


@pytest.mark.parametrize("name", SCALES)
def test_the_parts_of_a_weight_are_the_formats(name: str) -> None:
    """What the emulation multiplies makes up the numbers that the format defines."""
    weight = random_weight(name, 7, 512, seeded(name))
    assert same_bits(emulated.parts(weight).dense(), weight.dense())


# ---- conversions


def rows_to_convert(inputs: int) -> np.ndarray:
    rng = seeded(inputs)
    size = np.float32(10.0) ** rng.integers(-38, 37, (30, -(-inputs // 32)))
    x = rng.standard_normal((30, inputs), np.float32) * np.repeat(size, 32, 1)[:, :inputs].astype(np.float32)
    x[0] = 0
    x[1] = np.resize(edges()[:-1], inputs)
    x[2, 0], x[3, -1], x[4, inputs // 2] = np.nan, np.inf, -np.inf
    x[5] = np.resize(np.array([127, 0.5, 1.5, 2.5, -0.5, -1.5, -126.5], np.float32), inputs)  # ties
    return x


@ISAS
@pytest.mark.parametrize("inputs", [1, 31, 32, 33, 64, 96, 100, 576])
def test_to_int8(inputs: int, isa: str) -> None:
    x = rows_to_convert(inputs)
    want = emulated.to_int8(x).bytes()
    got = converted("to_int8", x, isa)[:, : want.shape[1]]
    filled = -(-inputs // 64) * 64
    assert same_bits(got[:, :filled].copy(), want[:, :filled].copy())
    numbers = [np.ascontiguousarray(a[:, filled:]).view(np.float32).reshape(30, -1, 4) for a in (got, want)]
    assert same_bits(numbers[0][:, :, :2].copy(), numbers[1][:, :, :2].copy())
    assert numbers[0][:, :, 2:].tobytes() == numbers[1][:, :, 2:].tobytes()


@ISAS
@pytest.mark.parametrize("inputs", [1, 16, 31, 32, 33, 100])
def test_to_bf16(inputs: int, isa: str) -> None:
    x = rows_to_convert(inputs)
    got = converted("to_bf16", x, isa).view(np.float32)
    assert same_bits(got[:, :inputs].copy(), emulated.to_bf16(x))
    filled = -(-inputs // 32) * 32
    assert not got[:, inputs:filled].any()
    if isa == "amx":  # and once more, as tiles read them
        copy = got[:, filled:].copy().view(ml_dtypes.bfloat16)[:, :filled]
        assert same_bits(copy.astype(np.float32), got[:, :filled].copy())
    numbers = x[np.isfinite(x)]
    assert same_bits(emulated.to_bf16(numbers), numbers.astype(ml_dtypes.bfloat16).astype(np.float32))


@ISAS
def test_every_quiet_nan_stays_one(isa: str) -> None:
    nans = np.array([[0x7FC00000, 0x7FFFFFFF, 0xFFC00000, 0xFFFFFFFF, 0x7FFFE000, 0xFFFF8000]], np.uint32)
    got = converted("to_bf16", nans.view(np.float32), isa).view(np.float32)
    assert np.isnan(got[:, :6]).all(), got[:, :6]


# ---- what the arithmetic rests on


@pytest.mark.parametrize("seed", range(40))
def test_the_emulated_fma_is_right(seed: int) -> None:
    """Against whole numbers of any length."""
    rng = np.random.default_rng(seed)
    a, b = (rng.integers(-(1 << 24), 1 << 24, 200).astype(np.float32) for _ in range(2))
    shift = int(rng.integers(-30, 30))
    c = np.ldexp(rng.integers(-(1 << 24), 1 << 24, 200).astype(np.float32), shift).astype(np.float32)
    near = rng.random(200) < 0.3  # sums that cancel, or lie half way between two numbers
    c = np.where(near, -(a * b) + np.ldexp(np.float32(rng.integers(-3, 4)), shift).astype(np.float32), c)
    got = emulated.fma(a, b, c)
    for x, y, z, r in zip(a.tolist(), b.tolist(), c.tolist(), got.tolist(), strict=True):
        exact = int(x) * int(y) * 2**60 + int(z * 2**60)
        assert r == _nearest(exact, 60), (x, y, z)


def _nearest(number: int, less: int) -> float:
    """number / 2^less to 24 binary digits, half to even."""
    size = abs(number)
    drop = max(0, size.bit_length() - 24)
    kept, rest = size >> drop, size & ((1 << drop) - 1)
    half = (1 << drop) >> 1
    kept += rest > half or (rest == half and drop > 0 and kept & 1)
    value = kept * 2.0 ** (drop - less)
    return -value if number < 0 else value


def test_rounding_of_the_tiny() -> None:
    """Zero below the least normal number, where what counts is the rounded one (as on x86)."""
    least = 2.0**-126
    given = np.array([least, least - 2.0**-152, least - 2.0**-151, least - 2.0**-150, -1e-45, 1e-39, -least])
    want = np.array([least, least, least, 0, -0.0, 0, -least], np.float32)
    assert same_bits(emulated.rounded(given), want)


# ---- one row, whatever is beside it


@ISAS
@pytest.mark.parametrize("kind", [k for k in KINDS if k != "store"])
def test_rows_one_by_one(kind: str, isa: str) -> None:
    for case in (*(case for case, _ in cases(kind)), *random_cases(kind)):
        if case.kv is not None and len(case.kv.positions) > 60:
            continue
        whole = call(kind, case, isa)
        n = len(case.inputs[0])
        for row in range(n if case.kv is None else len(case.kv.lengths)):
            own = slice(row, row + 1) if case.kv is None else slice(*case.kv.offsets[row : row + 2])
            assert same_bits(call(kind, alone(case, row, own), isa), whole[own]), f"{case.name}, row {row}"


@ISAS
@pytest.mark.parametrize("threads", [1, 3])
def test_denormals_are_zeros_on_every_thread(threads: int, isa: str) -> None:
    """Enough work that all threads take part; every sum would be a denormal."""
    weight = np.full((2048, 256), 2.0**-100, np.float32)
    stored_bf16 = FORMATS["BF16"](weight.shape, (weight.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8))
    x = np.full((40, 256), 2.0**-35, np.float32)
    assert not linear(stored_bf16, x, isa, threads).any()
    small = np.full((40, 2048), 1e-39, np.float32)
    assert not call("add", Case("", (small, small)), isa, threads).any()


def alone(case: Case, row: int, own: slice) -> Case:
    inputs = tuple(x[own] for x in case.inputs)
    if case.kv is None:
        return replace(case, inputs=inputs)
    kv = replace(
        case.kv,
        positions=case.kv.positions[own],
        offsets=np.array([0, own.stop - own.start], np.int32),
        lengths=case.kv.lengths[row : row + 1],
        table=case.kv.table[row : row + 1],
    )
    return replace(case, inputs=inputs, kv=kv)


@pytest.mark.parametrize(
    ("kv_format", "dim"),
    [*(("bf16", dim) for dim in (32, 64, 96, 128, 256)), ("int8", 32), ("int8", 96), ("int4", 64), ("int4", 256)],
)
@pytest.mark.parametrize(
    ("group", "rows", "window", "softcap"),
    [
        (1, [(0, 3), (29, 4), (5, 5), (20, 15), (31, 16), (0, 17), (40, 33)], None, None),
        (3, [(30, 5), (496, 30), (27, 9), (64, 1)], 33, 3.0),
        (7, [(60, 1), (31, 2), (1021, 6)], 512, None),
        (4, [(20, 14), (510, 4), (62, 1)], 2, 50.0),
    ],
)
def test_attention_in_tiles(
    kv_format: str, dim: int, group: int, rows: list[tuple[int, int]], window: int | None, softcap: float | None
) -> None:
    """Query lines around a tile of 16, some of which see nothing of a block: at borders of blocks and windows."""
    rng = seeded("tiles", dim, group)
    kv = kv_case(rng, rows, kv_format, window, dim)
    x = rng.standard_normal((len(kv.positions), group * kv.kv_heads * dim), np.float32)
    case = Case("", (x,), attrs={"scale": 0.21, "softcap": softcap}, kv=kv)
    want = emulation("attend", case)
    for isa in native.isas():
        for threads in (1, 3):  # which decides how many lines a tile has at most
            assert same_bits(call("attend", case, isa, threads), want), (isa, threads)


@ISAS
@pytest.mark.parametrize("kv_format", ["bf16", "int8", "int4"])
def test_not_finite_stays_in_its_block_of_attention(kv_format: str, isa: str) -> None:
    """Lines of one tile that do not see a block of NaN are as if it were not there."""
    rng = seeded("blocks")
    kv = kv_case(rng, [(28, 8)], kv_format, dim=64)
    x = rng.standard_normal((8, 2 * kv.kv_heads * 64), np.float32)
    case = Case("", (x,), attrs={"scale": 0.3, "softcap": None}, kv=kv)
    whole, pool = call("attend", case, isa), kv.pool.copy()
    pool[kv.table[0, 1]] = emulated.nan_block(kv)
    poisoned = call("attend", replace(case, kv=replace(kv, pool=pool)), isa)
    assert same_bits(poisoned[:4], whole[:4])
    assert np.isnan(poisoned[4:]).all()


@ISAS
@KV
def test_zeroed_memory_is_zeros(kv_format: str, isa: str) -> None:
    kv = kv_case(seeded("zeros"), [(40, 5)], kv_format)
    x = seeded("zeros").standard_normal((5, 2 * kv.kv_heads * kv.dim), np.float32)
    case = Case("", (x,), attrs={"scale": 0.3, "softcap": None}, kv=replace(kv, pool=np.zeros_like(kv.pool)))
    assert not call("attend", case, isa).any()


@ISAS
@KV
def test_attention_in_chunks(kv_format: str, isa: str) -> None:
    """A row of 600 tokens at once, or cut anywhere, its tokens at any number of threads."""
    rng = seeded("chunks", kv_format)
    kv = kv_case(rng, [(0, 600)], kv_format)
    kv_heads, dim = kv.kv_heads, kv.dim
    queries = rng.standard_normal((600, 2 * kv_heads * dim), np.float32)
    case = Case("whole", (queries,), attrs={"scale": 0.3, "softcap": None}, kv=kv)
    whole = call("attend", case, isa, threads=1)
    for threads, cuts in [(2, []), (3, []), (2, [1, 2, 3, 33, 49, 511]), (1, [512]), (3, [513, 599])]:
        cut = [0, *cuts, 600]
        parts = [call("attend", chunk(case, start, stop), isa, threads) for start, stop in pairwise(cut)]
        assert same_bits(np.concatenate(parts), whole), (threads, cuts)


def chunk(case: Case, start: int, stop: int) -> Case:
    assert case.kv is not None
    kv = replace(
        case.kv,
        positions=np.arange(start, stop, dtype=np.int32),
        offsets=np.array([0, stop - start], np.int32),
        lengths=np.array([stop], np.int32),
    )
    return replace(case, inputs=(case.inputs[0][start:stop],), kv=kv)


@ISAS
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_not_finite_stays_in_its_row(value: float, name: str, isa: str) -> None:
    rng = seeded(name, value)
    weight = random_weight(name, 20, 256, rng)
    x = rng.standard_normal((29, 256), np.float32)
    clean = linear(weight, x, isa)
    x[4, 77] = value
    got = linear(weight, x, isa)
    others = np.arange(29) != 4
    assert same_bits(got[others], clean[others])
    assert same_bits(linear(weight, x[:9], isa), got[:9])
    touched = weight.dense()[:, 77] != 0
    if name in SCALES:
        touched[:] = True  # a group with such a number has no scale
    assert not np.isfinite(got[4, touched]).any()


@ISAS
@KV
def test_not_finite_stays_in_its_row_of_attention(kv_format: str, isa: str) -> None:
    rng = seeded("attention", kv_format)
    kv = kv_case(rng, [(40, 3), (500, 30), (7, 1)], kv_format)
    kv_heads, dim = kv.kv_heads, kv.dim
    queries = rng.standard_normal((34, 2 * kv_heads * dim), np.float32)
    case = Case("", (queries,), attrs={"scale": 0.3, "softcap": None}, kv=kv)
    whole = call("attend", case, isa)
    pool = kv.pool.copy()
    pool[kv.table[0]] = emulated.nan_block(kv)
    poisoned = call("attend", replace(case, kv=replace(kv, pool=pool)), isa)
    assert np.isnan(poisoned[:3]).all()
    assert same_bits(poisoned[3:], whole[3:])


# ---- packing


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("threads", [1, 3])
def test_packing_keeps_every_bit(name: str, threads: int) -> None:
    """Blocks of random bytes: every NaN, infinity and denormal of the file is there."""
    rng, kind = seeded(name, "packing"), FORMATS[name]
    for outputs, inputs in ((1, 256), (16, 512), (85, 768), *(((33, 96), (17, 32)) if kind.block <= 32 else ())):
        data = rng.integers(0, 256, (outputs, kind.line_bytes(inputs)), dtype=np.uint8)
        weight = kind((outputs, inputs), data)
        whole = packed(weight, native.Threads(threads))
        got = np.stack([whole.line(o) for o in range(outputs)])
        assert same_bits(got, weight.dense())
        assert whole.nbytes == native.packed_bytes(name, outputs, inputs) == len(whole.data())
        again = native.Packed(name, outputs, inputs)
        again.view(whole.data())
        assert same_bits(again.line(outputs - 1), got[-1])


@pytest.mark.parametrize(
    ("name", "formats"),
    [("smollm2-135m", {"Q4_1", "Q8_0"}), ("qwen2.5-coder-0.5b", {"Q5_0", "Q8_0", "Q4_K", "Q6_K"})],
)
def test_w2_real_tensors_of_every_type(name: str, formats: set[str], test_model: Callable[[str], Path]) -> None:
    """Each by its own type: packed, and as rows that are looked up, they are the numbers that gguf-py makes of them."""
    source = GGUF(test_model(name))
    firsts = {i.format: tensor for tensor, i in reversed(source.tensors.items()) if len(i.shape) == 2}
    assert set(firsts) == formats
    for tensor in {*firsts.values(), "token_embd.weight"}:
        weight = source.read(tensor).shard(slice(-40, None))
        want = gguf.dequantize(weight.data, gguf.GGMLQuantizationType[source.tensors[tensor].format])
        matrix = packed(weight, workers(2))
        assert same_bits(np.stack([matrix.line(n) for n in range(40)]), want), tensor
        rows = np.array([39, 0, 7, 7, 20], np.int32)
        for isa in native.isas():
            assert same_bits(embed(weight, rows, isa), want[rows]), (tensor, isa)
    source.close()


@pytest.mark.parametrize("name", SCALES)
def test_packed_weights_are_hardly_larger(name: str) -> None:
    assert native.packed_bytes(name, 1024, 1024) <= 1.06 * 1024 * FORMATS[name].line_bytes(1024)


# ---- what is refused


def program(isa: str = "portable") -> native.Program:
    return native.Program(isa, native.Threads(1), [(False, 64)] * 3, None, [], 10)


def filled(name: str = "F32", outputs: int = 4, inputs: int = 16) -> native.Packed:
    return packed(random_weight(name, outputs, inputs, seeded(name)), native.Threads(1))


def test_bad_weights_are_refused() -> None:
    threads = native.Threads(1)
    with pytest.raises(ValueError, match="no native kernels for the format Q9_9"):
        native.Packed("Q9_9", 1, 32)
    for shape in ((0, 32), (4, 0), (-1, 32)):
        with pytest.raises(ValueError, match="has outputs and inputs"):
            native.Packed("Q4_0", *shape)
    with pytest.raises(ValueError, match="whole groups of 32"):
        native.Packed("Q4_0", 4, 33)
    with pytest.raises(ValueError, match="not those of the shape"):
        native.Packed("Q4_0", 4, 32).fill(np.zeros(71, np.uint8), threads)
    weight = filled()
    with pytest.raises(ValueError, match="filled already"):
        weight.fill(np.zeros(256, np.uint8), threads)
    with pytest.raises(ValueError, match="filled already"):
        weight.view(weight.data())
    with pytest.raises(ValueError, match="not those of the packed weight"):
        native.Packed("F32", 4, 16).view(np.zeros(7, np.uint8))
    odd = np.zeros(native.packed_bytes("F32", 4, 16) + 64, np.uint8)
    at = (1 - odd.ctypes.data) % 64
    with pytest.raises(ValueError, match="begins on a cache line"):
        native.Packed("F32", 4, 16).view(odd[at : at + native.packed_bytes("F32", 4, 16)])
    for output in (-1, 4):
        with pytest.raises(ValueError, match="no such output"):
            weight.line(output)


def test_bad_programs_are_refused() -> None:
    with pytest.raises(ValueError, match=r"isa must be one of .*portable.* not 'sse9'"):
        program("sse9")
    flat = program()
    with pytest.raises(ValueError, match="needs a region"):
        flat.add(0, 1, 2, 16)
    flat.region(False)
    for x, y, out in ((0, 1, 3), (7, 1, 2), (0, -1, 2), (0, 1, -7)):
        with pytest.raises(ValueError, match="no such slot"):
            flat.add(x, y, out, 16)
    wide: list[tuple[str, Callable[[], None]]] = [
        ("add", lambda: flat.add(0, 1, 2, 17)),
        ("select", lambda: flat.select(0, 1, 17)),
        ("to_int8", lambda: flat.to_int8(0, 1, 16)),
        ("to_bf16", lambda: flat.to_bf16(0, 1, 16)),
        ("rms_norm", lambda: flat.rms_norm(0, 1, 32, np.ones(16, np.float32), 1e-6, 0.0)),
        ("angles", lambda: flat.angles(0, np.ones(9, np.float32), 1.0)),
        ("rotate", lambda: flat.rotate(0, 1, 2, 32, 16, 8)),
        ("gated", lambda: flat.gated(0, 1, 2, 17, "silu")),
        ("softcap", lambda: flat.softcap(0, 1, 17, 3.0)),
        ("embed", lambda: flat.embed(filled(inputs=17), 0, 1.0)),
        ("linear", lambda: flat.linear(0, 1, filled(outputs=17), None)),
        ("linear", lambda: flat.linear(0, 1, filled("Q8_0", 16, 32), None)),
        ("linear", lambda: flat.linear(0, 1, filled("BF16", 16, 16), None)),
    ]
    for name, write in wide:
        with pytest.raises(ValueError, match=rf"{name}: slot . has fewer than \d+ bytes"):
            write()
    empty = native.Packed("F32", 4, 16)
    for write in (lambda: flat.linear(0, 1, empty, None), lambda: flat.embed(empty, 0, 1.0), lambda: empty.line(0)):
        with pytest.raises(ValueError, match="not filled yet"):
            write()
    with pytest.raises(ValueError, match="linear: the bias"):
        flat.linear(0, 1, filled(), np.zeros(3, np.float32))
    with pytest.raises(ValueError, match="rms_norm"):
        flat.rms_norm(0, 1, 16, np.ones(3, np.float32), 1e-6, 0.0)
    for dim, half in ((12, 4), (0, 0), (16, 9)):
        with pytest.raises(ValueError, match="rotate"):
            flat.rotate(0, 1, 2, 16, dim, half)
    with pytest.raises(ValueError, match="gated: the activation is silu or gelu_tanh"):
        flat.gated(0, 1, 2, 16, "relu")
    for write in (lambda: flat.store(0, 1, 0, 0), lambda: flat.attend(0, 1, 1, 1.0, 0.0, 0, 0)):
        with pytest.raises(ValueError, match="has no pool"):
            write()


def test_rows_of_another_count_are_refused() -> None:
    memory = np.zeros(2 * 3 * 2 * 32 * 16 * 4, np.uint8)
    pool = native.Pool([memory], 3, 2, 16, "f32")
    slots = [(wanted, 128) for wanted in (False, False, True, True)]
    flat = native.Program("portable", native.Threads(1), slots, pool, [0], 10)
    table, one = filled(outputs=10), np.ones(1, np.float32)
    flat.region(True)
    for name, write in (
        ("embed", lambda: flat.embed(table, 2, 1.0)),
        ("angles", lambda: flat.angles(2, one, 1.0)),
        ("store", lambda: flat.store(2, 3, 0, 0)),
        ("attend", lambda: flat.attend(2, 3, 2, 1.0, 0.0, 0, 0)),
    ):
        with pytest.raises(ValueError, match=f"{name}: a region of other rows"):
            write()
    for x, y, out in ((0, 2, 3), (2, 0, 3), (2, 3, 0)):
        with pytest.raises(ValueError, match="add: slot 0 has other rows"):
            flat.add(x, y, out, 16)
    with pytest.raises(ValueError, match="select: slot 2 has other rows"):
        flat.select(2, 3, 16)
    flat.select(0, 3, 16)
    flat.region(False)
    with pytest.raises(ValueError, match="select: a region of other rows"):
        flat.select(0, 3, 16)
    with pytest.raises(ValueError, match="add: slot 2 has other rows"):
        flat.add(0, 1, 2, 16)


def test_bad_pools_are_refused() -> None:
    memory = np.zeros(2 * 3 * 2 * 32 * 16 * 4, np.uint8)
    for dim in (8, 24, 272):
        with pytest.raises(ValueError, match="multiple of 16 channels, at most 256"):
            native.Pool([memory], 3, 2, dim, "f32")
    with pytest.raises(ValueError, match="groups are of a pool"):
        native.Program("portable", native.Threads(1), [(False, 256)] * 2, None, [0], 10)
    with pytest.raises(ValueError, match="not of that shape"):
        native.Pool([memory[1:]], 3, 2, 16, "f32")
    pool = native.Pool([memory], 3, 2, 16, "f32")
    flat = native.Program("portable", native.Threads(1), [(False, 256)] * 2, pool, [0], 10)
    flat.region(False)
    with pytest.raises(ValueError, match="no such slot in the pool"):
        flat.attend(0, 1, 2, 1.0, 0.0, 1, 0)
    with pytest.raises(ValueError, match="no such group"):
        flat.attend(0, 1, 2, 1.0, 0.0, 0, 1)
    with pytest.raises(ValueError, match="attend: the heads are no multiple"):
        flat.attend(0, 1, 3, 1.0, 0.0, 0, 0)


def test_bad_batches_are_refused() -> None:
    """Whatever is used as an index is judged before; a good batch runs afterwards."""
    memory = np.zeros(2 * 3 * 2 * 32 * 16 * 4, np.uint8)
    pool = native.Pool([memory], 3, 2, 16, "f32")
    flat = native.Program("portable", native.Threads(1), [(False, 64), (True, 64)], pool, [0], 10)
    table = filled(outputs=10)
    flat.region(False)
    flat.embed(table, 0, 1.0)
    flat.region(True)
    flat.select(0, 1, 16)
    good: dict[str, Any] = {
        "tokens": np.array([3, 4, 9], np.int32),
        "positions": np.array([31, 32, 5], np.int32),
        "offsets": np.array([0, 2, 3], np.int32),
        "tables": [np.array([[0, 1], [2, -1]], np.int32)],
        "wanted": np.array([1, 2], np.int32),
    }
    out = np.zeros((2, 16), np.float32)

    def run(**changes: Any) -> None:
        a = {**good, **changes}
        flat.run(a["tokens"], a["positions"], a["offsets"], a["tables"], a["wanted"], [(1, out)])

    def ints(*numbers: int) -> np.ndarray:
        return np.array(numbers, np.int32)

    bad: list[tuple[dict[str, Any], str]] = [
        ({"tokens": ints(3, 10, 9)}, "token 10 is outside the vocabulary of 10"),
        ({"tokens": ints(3, -1, 9)}, "token -1 is outside the vocabulary of 10"),
        ({"positions": ints(31, 33, 5)}, "positions are consecutive"),
        ({"positions": ints(-1, 0, 5)}, "positions are consecutive"),
        ({"positions": ints(31, 32)}, "do not fit together"),
        ({"offsets": ints(0, 2, 4)}, "offsets do not end"),
        ({"offsets": ints(1, 2, 3)}, "offsets do not end"),
        ({"offsets": ints(0, 4, 3)}, "offsets must ascend"),
        ({"wanted": ints(1, 3)}, "a wanted token is not in the batch"),
        ({"wanted": ints(-1, 2)}, "a wanted token is not in the batch"),
        ({"wanted": ints(0, 1, 2)}, "an array has too few lines"),
        ({"tables": []}, "one table for each group"),
        ({"tables": [np.zeros((1, 2), np.int32)]}, "one line for each row"),
        ({"tables": [np.zeros((2, 1), np.int32)]}, "too short for its row"),
        ({"tables": [np.array([[0, -1], [2, -1]], np.int32)]}, "row 0: the block table has no block"),
        ({"tables": [np.array([[0, 1], [3, -1]], np.int32)]}, "row 1: the block table has no block"),
        ({"positions": ints(63, 64, 5)}, "too short for its row"),
    ]
    for changes, message in bad:
        with pytest.raises(ValueError, match=message):
            run(**changes)
    with pytest.raises(ValueError, match="lines are too short"):
        flat.run(*good.values(), [(1, out[:, :15].copy())])  # type: ignore[call-arg]
    run()
    assert same_bits(out, np.stack([table.line(4), table.line(9)]))


def test_a_program_keeps_what_it_points_into() -> None:
    """Its weights and vectors live as long as it does, and are taken as they are or not at all."""
    rng = np.random.default_rng(1)
    program = native.Program(native.isas()[0], native.Threads(1), [(True, 256), (True, 256)], None, [], 1)
    program.region(True)
    weight, bias = (
        packed(stored(rng.standard_normal((64, 64), np.float32)), native.Threads(1)),
        rng.standard_normal(64, np.float32),
    )
    held = weakref.ref(bias)
    program.linear(0, 1, weight, bias)
    with pytest.raises(TypeError):
        program.linear(0, 1, weight, bias.astype(np.float64))
    del weight, bias
    gc.collect()
    assert held() is not None
    out = np.empty((1, 64), np.float32)
    program.run_head(1, [(0, np.ones((1, 64), np.float32)), (1, out)])
    assert np.isfinite(out).all()
