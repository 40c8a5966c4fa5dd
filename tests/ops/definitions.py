"""What every operation means, slowly, in float64 NumPy, with loops where they say it best. The tests' own twin."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from headrace.ops.op import Case, KVCase
from tests.native import emulated


def _embed(case: Case) -> np.ndarray:
    return np.stack([case.weights[0][t].astype(np.float64) * case.attrs["scale"] for t in case.inputs[0]])


def _select(case: Case) -> np.ndarray:
    x, wanted = case.inputs
    return np.array([x[i] for i in wanted], np.float64).reshape(len(wanted), x.shape[1])


def _linear(case: Case) -> np.ndarray:
    x, weight, *bias = (a.astype(np.float64) for a in (*case.inputs, *case.weights))
    return np.einsum("ni,oi->no", x, weight) + (bias[0] if bias else 0)


def _rms_norm(case: Case) -> np.ndarray:
    x, weight = case.inputs[0].astype(np.float64), case.weights[0].astype(np.float64)
    out = np.empty_like(x)
    for line in range(len(x)):
        for start in range(0, x.shape[1], len(weight)):
            part = x[line, start : start + len(weight)]
            rms = math.sqrt(sum(part**2) / len(part) + case.attrs["eps"])
            out[line, start : start + len(weight)] = part / rms * (weight + case.attrs["offset"])
    return out


def _angles(case: Case) -> np.ndarray:
    (positions,), (frequencies,) = case.inputs, case.weights
    turned = positions.astype(np.float32)[:, None] * frequencies  # the product is float32 by definition
    turned = turned.astype(np.float64)
    return case.attrs["factor"] * np.concatenate((np.cos(turned), np.sin(turned)), 1)


def _rotate(case: Case) -> np.ndarray:
    x, turns = (a.astype(np.float64) for a in case.inputs)
    out, half = x.copy(), turns.shape[1] // 2
    for head in range(0, x.shape[1], case.attrs["dim"]):
        for i in range(half):
            number = (x[:, head + i] + 1j * x[:, head + half + i]) * (turns[:, i] + 1j * turns[:, half + i])
            out[:, head + i], out[:, head + half + i] = number.real, number.imag
    return out


def _gated(case: Case) -> np.ndarray:
    gate, up = (a.astype(np.float64) for a in case.inputs)
    if case.attrs["activation"] == "silu":
        with np.errstate(over="ignore"):
            return gate / (1 + np.exp(-gate)) * up
    return 0.5 * gate * (1 + np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) * up


def _add(case: Case) -> np.ndarray:
    return case.inputs[0].astype(np.float64) + case.inputs[1]


def _softcap(case: Case) -> np.ndarray:
    return case.attrs["cap"] * np.tanh(case.inputs[0].astype(np.float64) / case.attrs["cap"])


def _store(case: Case) -> np.ndarray:
    """The whole pool after the call, in its own format, which says every bit."""
    kv = case.kv
    assert kv is not None
    pool = kv.pool.copy()
    parts = emulated.parts_of(pool, kv.kv_format, kv.kv_heads, kv.dim)
    for row in range(len(kv.lengths)):
        for token in range(kv.offsets[row], kv.offsets[row + 1]):
            number, place = divmod(int(kv.positions[token]), 32)
            for part, numbers, bits in zip(parts, case.inputs, emulated.BITS[kv.kv_format], strict=True):
                heads = emulated.spread_in(kv.kv_format, numbers[token].reshape(kv.kv_heads, kv.dim))
                part[kv.table[row, number], :, place] = emulated.lines_of(heads, bits)
    return pool


def _numbers(kv: KVCase) -> list[np.ndarray]:
    """float64 [blocks, kv_heads, 32, dim] of keys and of values: what the pool holds, no longer spread."""
    out = []
    parts = emulated.parts_of(kv.pool, kv.kv_format, kv.kv_heads, kv.dim)
    for part, bits in zip(parts, emulated.BITS[kv.kv_format], strict=True):
        codes, scales = emulated.of_lines(part, bits, kv.dim)
        numbers = codes.astype(np.float64)
        if scales is not None:
            numbers *= np.repeat(scales, 32, -1)[..., : kv.dim]
            if kv.dim & (kv.dim - 1) == 0:
                odd = [[(a & b).bit_count() % 2 for a in range(kv.dim)] for b in range(kv.dim)]
                numbers = numbers @ ((1 - 2 * np.array(odd)) / math.sqrt(kv.dim))
        out.append(numbers)
    return out


def _attend(case: Case) -> np.ndarray:
    kv = case.kv
    assert kv is not None
    queries = case.inputs[0].astype(np.float64)
    dim, block = kv.dim, 32
    keys, values = _numbers(kv)
    heads = queries.shape[1] // dim
    out = np.empty_like(queries)
    for row in range(len(kv.lengths)):
        for token in range(kv.offsets[row], kv.offsets[row + 1]):
            at = int(kv.positions[token])
            seen = range(0 if kv.window is None else max(0, at - kv.window + 1), at + 1)
            cells = [(kv.table[row, p // block], p % block) for p in seen]
            for head in range(heads):
                of = head // (heads // kv.kv_heads)
                q = queries[token, head * dim : (head + 1) * dim]
                scores = np.array([case.attrs["scale"] * (keys[b, of, p] @ q) for b, p in cells])
                if cap := case.attrs["softcap"]:
                    scores = cap * np.tanh(scores / cap)
                chances = np.exp(scores - scores.max())
                chances /= chances.sum()
                mixed = sum(chance * values[b, of, p] for chance, (b, p) in zip(chances, cells, strict=True))
                out[token, head * dim : (head + 1) * dim] = mixed
    return out


DEFINITIONS: dict[str, Callable[[Case], Any]] = {
    "embed": _embed,
    "select": _select,
    "linear": _linear,
    "rms_norm": _rms_norm,
    "angles": _angles,
    "rotate": _rotate,
    "store": _store,
    "attend": _attend,
    "gated": _gated,
    "add": _add,
    "softcap": _softcap,
}
"""Case to the exact output, by kind of operation."""
