"""Q5_0 and Q5_1: blocks of 32 numbers with 5 bits each, the fifth ones apart. Source: ggml-common.h and ggml-quants.c
of GGML (the GGUF format)."""

from __future__ import annotations

import numpy as np

from headrace.formats.bits import halves, planes
from headrace.formats.format import Format


class Q5_0(Format):
    """x = d (q - 16).

    | bytes | what |
    |---|---|
    | 0-1 | d, binary16 |
    | 2-5 | the highest bit of q: bit i of the little-endian word is number i's |
    | 6-21 | the lower 4 bits of q: low nibbles are numbers 0-15, high nibbles 16-31 |
    """

    name = "Q5_0"
    block = 32
    block_bytes = 22

    @classmethod
    def decode_into(cls, blocks: np.ndarray, out: np.ndarray) -> None:
        q = _five_bits(blocks[:, 2:6], blocks[:, 6:]).view(np.int8)
        q -= 16
        out[...] = q
        out *= halves(blocks, 0)


class Q5_1(Format):
    """x = d q + m.

    | bytes | what |
    |---|---|
    | 0-1 | d, binary16 |
    | 2-3 | m, binary16 |
    | 4-7 | the highest bit of q: bit i of the little-endian word is number i's |
    | 8-23 | the lower 4 bits of q: low nibbles are numbers 0-15, high nibbles 16-31 |
    """

    name = "Q5_1"
    block = 32
    block_bytes = 24

    @classmethod
    def decode_into(cls, blocks: np.ndarray, out: np.ndarray) -> None:
        out[...] = _five_bits(blocks[:, 4:8], blocks[:, 8:])
        out *= halves(blocks, 0)
        out += halves(blocks, 2)


def _five_bits(high: np.ndarray, low: np.ndarray) -> np.ndarray:
    """uint8 [n, 32] of 0-31 out of the word of fifth bits, uint8 [n, 4], and the nibbles, uint8 [n, 16]."""
    q = np.unpackbits(high, axis=1, bitorder="little")
    q <<= 4
    q |= planes(low, 16, 4)
    return q
