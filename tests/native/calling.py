"""Running one operation on native kernels: a program of that operation alone, its inputs given as arrays."""

from __future__ import annotations

from functools import cache

import numpy as np

from headrace import native
from headrace.formats import FORMATS
from headrace.formats.format import Format
from headrace.ops.op import Case


@cache
def workers(count: int) -> native.Threads:
    """Shared by all tests: a thread that is only being started takes no part in what runs meanwhile."""
    return native.Threads(count)


def packed(weight: Format, threads: native.Threads) -> native.Packed:
    matrix = native.Packed(weight.name, *weight.shape)
    matrix.fill(weight.data.reshape(-1), threads)
    return matrix


def stored(array: np.ndarray) -> Format:
    return FORMATS["F32"](array.shape, np.ascontiguousarray(array).view(np.uint8).reshape(*array.shape[:-1], -1))


class OneOp:
    """A program under construction whose slots are all outside arrays."""

    def __init__(self, isa: str, *, threads: int = 2, case: Case | None = None, vocab: int = 1 << 20) -> None:
        self.threads = workers(threads)
        self.arrays: list[np.ndarray] = []
        self.widths: list[int] = []
        self.case, self.isa, self.vocab = case, isa, vocab
        self.pool: native.Pool | None = None
        self.windows: list[int] = []

    def slot(self, array: np.ndarray) -> int:
        """A slot that stands for a float32 array of two axes."""
        self.arrays.append(array)
        return len(self.arrays) - 1

    def program(self) -> native.Program:
        slots = [(False, 4 * array.shape[1]) for array in self.arrays]
        flat = native.Program(self.isa, self.threads, slots, self.pool, self.windows, self.vocab)
        flat.region(False)
        return flat

    def run(self, flat: native.Program, tokens: np.ndarray | None = None, positions: np.ndarray | None = None) -> None:
        n = max(len(a) for a in self.arrays)
        tokens = np.zeros(n, np.int32) if tokens is None else tokens
        positions = np.arange(n, dtype=np.int32) if positions is None else positions
        offsets, tables = np.array([0, n], np.int32), []
        if self.case is not None and self.case.kv is not None:
            offsets, tables = self.case.kv.offsets, [self.case.kv.table]
        elif not (np.diff(positions) == 1).all():
            offsets = np.arange(n + 1, dtype=np.int32)
        externals = [(s, a) for s, a in enumerate(self.arrays)]
        flat.run(tokens, positions, offsets, tables, np.zeros(0, np.int32), externals)


def to_native_pool(pool: np.ndarray) -> np.ndarray:
    """[blocks, 2, kv_heads, 32, dim] in the order of csrc/kernels.h, as bytes uint8 [n]."""
    blocks, _, heads, block, dim = pool.shape
    out = np.empty((blocks, 2, heads, block * dim), pool.dtype)
    pair = 1 if pool.dtype == np.float32 else 2
    keys = pool[:, 0].reshape(blocks, heads, block, dim // pair, pair)
    out[:, 0] = keys.transpose(0, 1, 3, 2, 4).reshape(blocks, heads, -1)
    values = pool[:, 1].reshape(blocks, heads, block // pair, pair, dim)
    out[:, 1] = values.transpose(0, 1, 2, 4, 3).reshape(blocks, heads, -1)
    return out.reshape(-1).view(np.uint8)


def from_native_pool(data: np.ndarray, like: np.ndarray) -> np.ndarray:
    """The inverse, of the shape and dtype of `like`."""
    blocks, _, heads, block, dim = like.shape
    flat = data.view(like.dtype).reshape(blocks, 2, heads, block * dim)
    out = np.empty_like(like)
    pair = 1 if like.dtype == np.float32 else 2
    keys = flat[:, 0].reshape(blocks, heads, dim // pair, block, pair)
    out[:, 0] = keys.transpose(0, 1, 3, 2, 4).reshape(blocks, heads, block, dim)
    values = flat[:, 1].reshape(blocks, heads, block // pair, dim, pair)
    out[:, 1] = values.transpose(0, 1, 2, 4, 3).reshape(blocks, heads, block, dim)
    return out


def call(kind: str, case: Case, isa: str, threads: int = 2) -> np.ndarray:
    """The output of a case, or the pool afterwards."""
    one = OneOp(isa, threads=threads, case=case)
    memory = None
    if case.kv is not None:
        memory = to_native_pool(case.kv.pool)
        _, _, heads, _, dim = case.kv.pool.shape
        one.pool = native.Pool([memory], len(case.kv.pool), heads, dim, case.kv.pool.dtype != np.float32)
        one.windows = [case.kv.window or 0]
    inputs, attrs, weights = case.inputs, case.attrs, case.weights
    lines = inputs[0] if inputs[0].ndim == 2 else None
    positions = None
    if kind == "embed":
        return embed(stored(weights[0]), inputs[0], isa, threads, attrs["scale"])
    if kind == "angles":
        out = np.zeros((len(inputs[0]), 2 * len(weights[0])), np.float32)
        at = one.slot(out)
        flat = one.program()
        flat.angles(at, weights[0], attrs["factor"])
        positions = inputs[0]
    elif kind == "linear":
        out = np.zeros((len(inputs[0]), len(weights[0])), np.float32)
        x, at = one.slot(inputs[0].copy()), one.slot(out)
        matrix = packed(stored(weights[0]), one.threads)
        flat = one.program()
        flat.linear(x, at, matrix, weights[1] if len(weights) > 1 else None)
    elif kind == "store":
        out = np.zeros((0, 0), np.float32)
        k, v = (one.slot(i.copy()) for i in inputs)
        flat = one.program()
        flat.store(k, v, 0, 0)
    elif kind == "attend":
        out = np.zeros_like(inputs[0])
        x, at = one.slot(inputs[0].copy()), one.slot(out)
        flat = one.program()
        assert case.kv is not None
        heads = inputs[0].shape[1] // case.kv.pool.shape[-1]
        flat.attend(x, at, heads, attrs["scale"], attrs["softcap"] or 0.0, 0, 0)
    else:
        assert lines is not None
        out = np.zeros_like(lines)
        slots = [one.slot(i.copy()) for i in inputs]
        at = one.slot(out)
        flat = one.program()
        width = lines.shape[1]
        if kind == "rms_norm":
            flat.rms_norm(slots[0], at, width, weights[0], attrs["eps"], attrs["offset"])
        elif kind == "rotate":
            flat.rotate(slots[0], slots[1], at, width, attrs["dim"], inputs[1].shape[1] // 2)
        elif kind == "gated":
            flat.gated(slots[0], slots[1], at, width, attrs["activation"])
        elif kind == "add":
            flat.add(slots[0], slots[1], at, width)
        else:
            assert kind == "softcap"
            flat.softcap(slots[0], at, width, attrs["cap"])
    if case.kv is not None:
        positions = case.kv.positions
    if len(inputs[0]):
        one.run(flat, positions=positions)
    if kind == "store":
        assert memory is not None
        assert case.kv is not None
        return from_native_pool(memory, case.kv.pool)
    return out


def converted(kind: str, x: np.ndarray, isa: str, threads: int = 2) -> np.ndarray:
    """The bytes of `to_int8` or `to_bf16`, uint8 [n, bytes]."""
    one = OneOp(isa, threads=threads)
    row_bytes = {"to_int8": native.int8_row_bytes, "to_bf16": native.bf16_row_bytes}[kind](x.shape[1])
    out = np.zeros((len(x), row_bytes // 4), np.float32)
    source, at = one.slot(x.copy()), one.slot(out)
    flat = one.program()
    {"to_int8": flat.to_int8, "to_bf16": flat.to_bf16}[kind](source, at, x.shape[1])
    one.run(flat)
    return out.view(np.uint8)


def embed(table: Format, tokens: np.ndarray, isa: str, threads: int = 2, scale: float = 1.0) -> np.ndarray:
    one = OneOp(isa, threads=threads, vocab=table.shape[0])
    out = np.zeros((len(tokens), table.shape[1]), np.float32)
    matrix = packed(table, one.threads)
    at = one.slot(out)
    flat = one.program()
    flat.embed(matrix, at, scale)
    if len(tokens):
        one.run(flat, tokens)
    return out


def linear(weight: Format, x: np.ndarray, isa: str, threads: int = 2, bias: np.ndarray | None = None) -> np.ndarray:
    """A linear map as programs hold it: the input converted as the weight's format asks for it, then the map."""
    kind = {"BF16": "to_bf16", "F16": None, "F32": None}.get(weight.name, "to_int8")
    given = x.copy() if kind is None else converted(kind, x, isa, threads).view(np.float32)
    one = OneOp(isa, threads=threads)
    out = np.zeros((len(x), weight.shape[0]), np.float32)
    matrix = packed(weight, one.threads)
    source, at = one.slot(given), one.slot(out)
    flat = one.program()
    flat.linear(source, at, matrix, bias)
    one.run(flat)
    return out
