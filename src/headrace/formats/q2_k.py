"""Q2_K: super-blocks of 256 numbers with 2 bits each. Source: ggml-common.h and ggml-quants.c of GGML (the GGUF
format)."""

from __future__ import annotations

import numpy as np

from headrace.formats.bits import halves, planes
from headrace.formats.format import Format


class Q2_K(Format):
    """16 groups of 16 numbers; x = (d s) q - (dmin m), with s and m of the group.

    | bytes | what |
    |---|---|
    | 0-15 | per group: s in the low nibble, m in the high one |
    | 16-79 | q of 2 bits: each 32 bytes hold 128 numbers, 32 in each pair of bits, lowest first |
    | 80-81 | d, binary16 |
    | 82-83 | dmin, binary16 |
    """

    name = "Q2_K"
    block = 256
    block_bytes = 84

    @classmethod
    def decode_into(cls, blocks: np.ndarray, out: np.ndarray) -> None:
        scale = halves(blocks, 80) * (blocks[:, :16] & 15).astype(np.float32)
        minimum = halves(blocks, 82) * (blocks[:, :16] >> 4).astype(np.float32)
        groups = out.reshape(-1, 16, 16)
        groups[...] = planes(blocks[:, 16:80], 32, 2).reshape(-1, 16, 16)
        groups *= scale[:, :, None]
        groups -= minimum[:, :, None]
