"""IQ4_NL and IQ4_XS: 4 bits a number that choose one of 16 unevenly spaced values. Source: ggml-common.h and
ggml-quants.c of GGML (the GGUF format)."""

from __future__ import annotations

import numpy as np

from headrace.formats.bits import halves, planes
from headrace.formats.format import Format

VALUES = np.array((-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113), np.float32)
"""The 16 values, which both formats share."""


class IQ4_NL(Format):
    """x = d VALUES[q].

    | bytes | what |
    |---|---|
    | 0-1 | d, binary16 |
    | 2-17 | q of 4 bits: low nibbles are numbers 0-15, high nibbles 16-31 |
    """

    name = "IQ4_NL"
    block = 32
    block_bytes = 18

    @classmethod
    def decode_into(cls, blocks: np.ndarray, out: np.ndarray) -> None:
        np.take(VALUES, planes(blocks[:, 2:], 16, 4), out=out, mode="clip")
        out *= halves(blocks, 0)


class IQ4_XS(Format):
    """8 groups of 32 numbers; x = d (s - 32) VALUES[q], with s of the group.

    | bytes | what |
    |---|---|
    | 0-1 | d, binary16 |
    | 2-3 | the upper 2 bits of s: of group i, bits 2 i and 2 i + 1 of the little-endian word |
    | 4-7 | the lower 4 bits of s: groups 0 and 1 in the first byte, low nibble first, and so on |
    | 8-135 | q of 4 bits: each 16 bytes are a group, low nibbles are its numbers 0-15, high nibbles 16-31 |
    """

    name = "IQ4_XS"
    block = 256
    block_bytes = 136

    @classmethod
    def decode_into(cls, blocks: np.ndarray, out: np.ndarray) -> None:
        s = (planes(blocks[:, 4:8], 1, 4) | planes(blocks[:, 2:4], 1, 2) << 4).view(np.int8) - np.int8(32)
        scale = halves(blocks, 0) * s.astype(np.float32)
        np.take(VALUES, planes(blocks[:, 8:], 16, 4), out=out, mode="clip")
        groups = out.reshape(-1, 8, 32)
        groups *= scale[:, :, None]
