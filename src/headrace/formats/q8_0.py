"""Q8_0: blocks of 32 numbers with 8 bits each. Source: ggml-common.h and ggml-quants.c of GGML (the GGUF format)."""

from __future__ import annotations

import numpy as np

from headrace.formats.bits import halves
from headrace.formats.format import Format


class Q8_0(Format):
    """x = d q.

    | bytes | what |
    |---|---|
    | 0-1 | d, binary16 |
    | 2-33 | q, int8 |
    """

    name = "Q8_0"
    block = 32
    block_bytes = 34

    @classmethod
    def decode_into(cls, blocks: np.ndarray, out: np.ndarray) -> None:
        out[...] = blocks[:, 2:].view(np.int8)
        out *= halves(blocks, 0)
