"""Q3_K: super-blocks of 256 numbers with 3 bits each. Source: ggml-common.h and ggml-quants.c of GGML (the GGUF
format)."""

from __future__ import annotations

import numpy as np

from headrace.formats.bits import halves, planes
from headrace.formats.format import Format


class Q3_K(Format):
    """16 groups of 16 numbers; x = d (s - 32) (q - 4), with s of the group.

    | bytes | what |
    |---|---|
    | 0-31 | the highest bit of q: bit i of the 32 bytes are numbers 32 i to 32 i + 31 |
    | 32-95 | the lower 2 bits of q: each 32 bytes hold 128 numbers, 32 in each pair of bits, lowest first |
    | 96-103 | the lower 4 bits of s: low nibbles are groups 0-7, high nibbles 8-15 |
    | 104-107 | the upper 2 bits of s: pairs of bits of the 4 bytes, lowest first, are groups 0-3, 4-7, 8-11, 12-15 |
    | 108-109 | d, binary16 |
    """

    name = "Q3_K"
    block = 256
    block_bytes = 110

    @classmethod
    def decode_into(cls, blocks: np.ndarray, out: np.ndarray) -> None:
        s = (planes(blocks[:, 96:104], 8, 4) | planes(blocks[:, 104:108], 4, 2) << 4).view(np.int8) - np.int8(32)
        scale = halves(blocks, 108) * s.astype(np.float32)
        q = planes(blocks[:, :32], 32, 1)
        q <<= 2
        q |= planes(blocks[:, 32:96], 32, 2)
        signed = q.view(np.int8)
        signed -= 4
        groups = out.reshape(-1, 16, 16)
        groups[...] = signed.reshape(-1, 16, 16)
        groups *= scale[:, :, None]
