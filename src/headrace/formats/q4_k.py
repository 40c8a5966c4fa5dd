"""Q4_K and Q5_K: super-blocks of 256 numbers with 4 and 5 bits each, which share the packing of their scales. Source:
ggml-common.h and ggml-quants.c of GGML (the GGUF format)."""

from __future__ import annotations

import numpy as np

from headrace.formats.bits import halves, planes
from headrace.formats.format import Format


class Q4_K(Format):
    """8 groups of 32 numbers; x = (d s) q - (dmin m), with s and m of the group.

    | bytes | what |
    |---|---|
    | 0-1 | d, binary16 |
    | 2-3 | dmin, binary16 |
    | 4-15 | s and m, 6 bits each, see `_scales` |
    | 16-143 | q of 4 bits: each 32 bytes hold 64 numbers, low nibbles first |
    """

    name = "Q4_K"
    block = 256
    block_bytes = 144

    @classmethod
    def decode_into(cls, blocks: np.ndarray, out: np.ndarray) -> None:
        _affine(blocks, planes(blocks[:, 16:], 32, 4), out)


class Q5_K(Format):
    """8 groups of 32 numbers; x = (d s) q - (dmin m), with s and m of the group.

    | bytes | what |
    |---|---|
    | 0-1 | d, binary16 |
    | 2-3 | dmin, binary16 |
    | 4-15 | s and m, 6 bits each, see `_scales` |
    | 16-47 | the highest bit of q: bit i of the 32 bytes is group i |
    | 48-175 | the lower 4 bits of q: each 32 bytes hold 64 numbers, low nibbles first |
    """

    name = "Q5_K"
    block = 256
    block_bytes = 176

    @classmethod
    def decode_into(cls, blocks: np.ndarray, out: np.ndarray) -> None:
        q = planes(blocks[:, 16:48], 32, 1)
        q <<= 4
        q |= planes(blocks[:, 48:], 32, 4)
        _affine(blocks, q, out)


def _affine(blocks: np.ndarray, q: np.ndarray, out: np.ndarray) -> None:
    """out = (d s) q - (dmin m), group by group, from the first 16 bytes of the blocks and q, uint8 [n, 256]."""
    s, m = _scales(blocks[:, 4:16])
    scale = halves(blocks, 0) * s
    minimum = halves(blocks, 2) * m
    groups = out.reshape(-1, 8, 32)
    groups[...] = q.reshape(-1, 8, 32)
    groups *= scale[:, :, None]
    groups -= minimum[:, :, None]


def _scales(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """s and m, each float32 [n, 8], out of uint8 [n, 12].

    Of groups 0-3, bytes 0-3 have s and bytes 4-7 have m in their lower 6 bits. Of groups 4-7, bytes 8-11 have the
    lower 4 bits of s (low nibble) and of m (high nibble); the upper 2 bits are the upper 2 of bytes 0-3 and 4-7.
    """
    s, m, rest = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    first = (s & 63, m & 63)
    second = (rest & 15 | (s & 192) >> 2, rest >> 4 | (m & 192) >> 2)
    return (
        np.concatenate((first[0], second[0]), axis=1).astype(np.float32),
        np.concatenate((first[1], second[1]), axis=1).astype(np.float32),
    )
