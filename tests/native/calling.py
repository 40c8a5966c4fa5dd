"""Running one operation on native kernels: a program of that operation alone, its inputs given as arrays."""

from __future__ import annotations

from functools import cache

import numpy as np

from headrace import native
from headrace.formats import FORMATS
from headrace.formats.format import Format
from headrace.formats.kv import KV_FORMATS
from headrace.ops.op import Case, KVCase


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
    """A program under construction whose slots are outside arrays, and then some of its own."""

    def __init__(self, isa: str, *, threads: int = 2, case: Case | None = None, vocab: int = 1 << 20) -> None:
        self.threads = workers(threads)
        self.arrays: list[np.ndarray] = []
        self.own: list[int] = []
        self.widths: list[int] = []
        self.case, self.isa, self.vocab = case, isa, vocab
        self.pool: native.Pool | None = None
        self.windows: list[int] = []

    def slot(self, array: np.ndarray) -> int:
        """A slot that stands for a float32 array of two axes."""
        self.arrays.append(array)
        return len(self.arrays) - 1

    def own_slot(self, row_bytes: int) -> int:
        """A slot of the program's own memory; all outside arrays come before."""
        self.own.append(row_bytes)
        return len(self.arrays) + len(self.own) - 1

    def program(self) -> native.Program:
        slots = [(False, row_bytes) for row_bytes in (*(4 * array.shape[1] for array in self.arrays), *self.own)]
        flat = native.Program(self.isa, self.threads, slots, self.pool, self.windows, self.vocab)
        flat.region(False)
        return flat

    def run(self, flat: native.Program, tokens: np.ndarray | None = None, positions: np.ndarray | None = None) -> None:
        n = max(len(a) for a in self.arrays) if tokens is None else len(tokens)
        tokens = np.zeros(n, np.int32) if tokens is None else tokens
        positions = np.arange(n, dtype=np.int32) if positions is None else positions
        offsets, tables = np.array([0, n], np.int32), []
        if self.case is not None and self.case.kv is not None:
            offsets, tables = self.case.kv.offsets, [self.case.kv.table]
        elif not (np.diff(positions) == 1).all():
            offsets = np.arange(n + 1, dtype=np.int32)
        externals = [(s, a) for s, a in enumerate(self.arrays)]
        flat.run(tokens, positions, offsets, tables, np.zeros(0, np.int32), externals)


def _heads(lines: np.ndarray, bits: int, dim: int, *, keys: bool) -> np.ndarray:
    """Lines uint8 [n, 32, line] as heads in the order of csrc/kernels.h, uint8 [n, bytes]."""
    n, lines = len(lines), np.ascontiguousarray(lines)
    if bits > 8:
        numbers = lines.view(np.float32 if bits == 32 else np.uint16)
        return _paired(numbers, keys=keys, pair=1 if bits == 32 else 2).view(np.uint8).reshape(n, -1)
    groups = -(-dim // 32)
    codes, scales = lines[..., : -2 * groups], np.ascontiguousarray(lines[..., -2 * groups :]).view(np.uint16)
    behind = np.ascontiguousarray(scales.transpose(0, 2, 1)).view(np.uint8).reshape(n, -1)
    if bits == 8:
        front = _paired(codes, keys=keys, pair=1)
    else:  # a byte of the line has channels 2i and 2i + 1, one of the kernels i and 16 + i of a group
        assert not keys
        single = np.stack((codes & 15, codes >> 4), -1).reshape(n, 32, groups, 2, 16)
        front = single[..., 0, :] | single[..., 1, :] << 4
    return np.concatenate((front.reshape(n, -1), behind), 1)


def _paired(numbers: np.ndarray, *, keys: bool, pair: int) -> np.ndarray:
    n, block, dim = numbers.shape
    if keys:
        return np.ascontiguousarray(numbers.reshape(n, block, dim // pair, pair).transpose(0, 2, 1, 3))
    return np.ascontiguousarray(numbers.reshape(n, block // pair, pair, dim).transpose(0, 1, 3, 2))


def to_native_pool(kv: KVCase) -> np.ndarray:
    """A case's pool in the order of csrc/kernels.h, as bytes uint8 [n]."""
    blocks, form, parts, at = len(kv.pool), KV_FORMATS[kv.kv_format], [], 0
    sizes = ((form.key_bits, form.key_line(kv.dim)), (form.value_bits, form.value_line(kv.dim)))
    for which, (bits, line) in enumerate(sizes):
        lines = kv.pool[:, at : at + kv.kv_heads * 32 * line].reshape(-1, 32, line)
        parts.append(_heads(lines, bits, kv.dim, keys=which == 0).reshape(blocks, -1))
        at += kv.kv_heads * 32 * line
    return np.concatenate(parts, 1).reshape(-1)


def call(kind: str, case: Case, isa: str, threads: int = 2) -> np.ndarray:
    """The output of a case, or the pool afterwards, as bytes in the kernels' order."""
    one = OneOp(isa, threads=threads, case=case)
    memory = None
    if case.kv is not None:
        memory = to_native_pool(case.kv)
        one.pool = native.Pool([memory], len(case.kv.pool), case.kv.kv_heads, case.kv.dim, case.kv.kv_format)
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
        heads = inputs[0].shape[1] // case.kv.dim
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
        return memory
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
    """A linear map as programs hold it: the input converted as the weight's format asks for it, then the map. Behind
    the last row nothing is written."""
    one, n, width = OneOp(isa, threads=threads), len(x), x.shape[1]
    out = np.full((n + 1, weight.shape[0]), 7, np.float32)
    matrix = packed(weight, one.threads)
    source, at = one.slot(x.copy()), one.slot(out)
    match weight.name:
        case "F16" | "F32":
            flat, given = one.program(), source
        case "BF16":
            given = one.own_slot(native.bf16_row_bytes(width))
            flat = one.program()
            flat.to_bf16(source, given, width)
            flat.region(False)
        case _:
            given = one.own_slot(native.int8_row_bytes(width))
            flat = one.program()
            flat.to_int8(source, given, width)
            flat.region(False)
    flat.linear(given, at, matrix, bias)
    one.run(flat, np.zeros(n, np.int32), np.arange(n, dtype=np.int32))
    assert (out[n] == 7).all()
    return out[:n]
