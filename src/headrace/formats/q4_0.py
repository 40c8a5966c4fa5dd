"""Q4_0 and Q4_1: blocks of 32 numbers with 4 bits each. Source: ggml-common.h and ggml-quants.c of GGML (the GGUF
format)."""

from __future__ import annotations

import numpy as np

from headrace.formats.bits import halves, planes
from headrace.formats.format import Format


class Q4_0(Format):
    """x = d (q - 8).

    | bytes | what |
    |---|---|
    | 0-1 | d, binary16 |
    | 2-17 | q of 4 bits: low nibbles are numbers 0-15, high nibbles 16-31 |
    """

    name = "Q4_0"
    block = 32
    block_bytes = 18

    @classmethod
    def decode_into(cls, blocks: np.ndarray, out: np.ndarray) -> None:
        q = planes(blocks[:, 2:], 16, 4).view(np.int8)
        q -= 8
        out[...] = q
        out *= halves(blocks, 0)


class Q4_1(Format):
    """x = d q + m.

    | bytes | what |
    |---|---|
    | 0-1 | d, binary16 |
    | 2-3 | m, binary16 |
    | 4-19 | q of 4 bits: low nibbles are numbers 0-15, high nibbles 16-31 |
    """

    name = "Q4_1"
    block = 32
    block_bytes = 20

    @classmethod
    def decode_into(cls, blocks: np.ndarray, out: np.ndarray) -> None:
        out[...] = planes(blocks[:, 4:], 16, 4)
        out *= halves(blocks, 0)
        out += halves(blocks, 2)
