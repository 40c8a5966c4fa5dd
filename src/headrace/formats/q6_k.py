"""Q6_K: super-blocks of 256 numbers with 6 bits each. Source: ggml-common.h and ggml-quants.c of GGML (the GGUF
format)."""

from __future__ import annotations

import numpy as np

from headrace.formats.bits import halves, planes
from headrace.formats.format import Format


class Q6_K(Format):
    """16 groups of 16 numbers; x = (d s) (q - 32), with s of the group.

    | bytes | what |
    |---|---|
    | 0-127 | the lower 4 bits of q: each 64 bytes hold 128 numbers, low nibbles first |
    | 128-191 | the upper 2 bits of q: each 32 bytes hold 128 numbers, 32 in each pair of bits, lowest first |
    | 192-207 | s, int8 |
    | 208-209 | d, binary16 |
    """

    name = "Q6_K"
    block = 256
    block_bytes = 210

    @classmethod
    def decode_into(cls, blocks: np.ndarray, out: np.ndarray) -> None:
        scale = halves(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32)
        q = planes(blocks[:, 128:192], 32, 2)
        q <<= 4
        q |= planes(blocks[:, :128], 64, 4)
        signed = q.view(np.int8)
        signed -= 32
        groups = out.reshape(-1, 16, 16)
        groups[...] = signed.reshape(-1, 16, 16)
        groups *= scale[:, :, None]
